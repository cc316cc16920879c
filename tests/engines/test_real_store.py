"""Engines on real nodes: real sockets, shared memory, and blocks that travel; nodes that die and hang."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncaked.client import Client
from mooncaked.engines.reference.model_files import LoadedModel, namespace_of
from tests.engines.conftest import Start
from tests.engines.harness import Answer, Running
from tests.engines.test_model import prompt_of
from tests.node.running import node_process, node_thread, until

PROMPT = prompt_of(203)
CONTEXT = 256


def client(model: LoadedModel, socket: Path, timeout_s: float = 5.0) -> Client:
    namespace = namespace_of(model, block_tokens=4, chunk_tokens=8, dtype="float32")
    return Client(socket, namespace, timeout_s=timeout_s)


@pytest.fixture
def expected(start: Start) -> list[int]:
    """The answer of an engine without a store."""
    return start().run(PROMPT, 16, ignore_eos=True).tokens


def cached(answer: Answer) -> int:
    assert answer.finish is not None
    return answer.finish.cached_tokens


@contextmanager
def two_nodes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The sockets of n1 and n2, which know each other."""
    with node_thread(tmp_path / "n1", node_id="n1") as n1, node_thread(tmp_path / "n2", node_id="n2") as n2:
        n1.peers["n2"], n2.peers["n1"] = n2.peer_address, n1.peer_address
        yield n1.socket, n2.socket


def test_prefill_on_one_node_and_decode_on_another(
    start: Start, tiny: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    with two_nodes(tmp_path) as (first_node, second_node):
        prefill, decode = start(client(tiny, first_node)), start(client(tiny, second_node))
        first = prefill.run(PROMPT, 1, handover=True)
        answer = decode.run(PROMPT, 16, first_token=first.tokens[0], sources=["n1"], ignore_eos=True)
        assert answer.tokens == expected
        assert cached(answer) == 203
        # What came over stays: a prefill on the second node reuses it without the first.
        again = start(client(tiny, second_node)).run(PROMPT, 16, sources=[], ignore_eos=True)
        assert again.tokens == expected
        assert cached(again) == 200
        prefill.close()
        decode.close()


def test_a_common_beginning_is_reused(start: Start, tiny: LoadedModel, tmp_path: Path) -> None:
    with node_thread(tmp_path / "n1") as node:
        engine = start(client(tiny, node.socket))
        for index, question in enumerate(([1, 2, 3], [9, 8, 7, 6])):
            prompt = [*PROMPT, *question]
            answer = engine.run(prompt, 8, ignore_eos=True)
            assert answer.tokens == start().run(prompt, 8, ignore_eos=True).tokens
            assert cached(answer) == (200 if index else 0)
            engine.settle()
        engine.close()


def test_a_node_that_is_killed_costs_reuse_and_nothing_else(
    start: Start, tiny: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    with node_process(tmp_path / "n1") as node:
        engine = start(client(tiny, node.socket))
        for alive in (True, False, True, False):
            answer = engine.run(PROMPT, 16, ignore_eos=True)
            engine.settle()
            assert answer.tokens == expected
            if alive:
                _reused(engine, expected)
                node.kill()
            else:
                assert cached(answer) == 0
                node.start()


def _reused(engine: Running, expected: list[int]) -> None:
    """Once the engine has found out that its node works (again), blocks are stored and loaded."""
    seen: list[int] = []

    def loads() -> bool:
        answer = engine.run(PROMPT, 16, ignore_eos=True)
        engine.settle()
        assert answer.tokens == expected
        seen.append(cached(answer))
        return seen[-1] == 200

    until(loads, f"blocks are reused: {seen}")


def test_the_only_copy_dies_with_its_node(
    start: Start, tiny: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    with (
        node_process(tmp_path / "n1") as first_node,
        node_thread(tmp_path / "n2", node_id="n2", peers={"n1": first_node.peer_address}) as second_node,
    ):
        first = start(client(tiny, first_node.socket)).run(PROMPT, 1, handover=True).tokens[0]
        first_node.kill()
        decode = start(client(tiny, second_node.socket))
        answer = decode.run(PROMPT, 16, first_token=first, sources=["n1"], ignore_eos=True)
        assert answer.tokens == expected
        assert cached(answer) == 0
        decode.settle()
        decode.close()


def test_a_node_that_hangs_delays_a_request_within_bounds(
    start: Start, tiny: LoadedModel, tmp_path: Path, expected: list[int]
) -> None:
    with node_process(tmp_path / "n1") as node:
        engine = start(client(tiny, node.socket, timeout_s=0.5))
        engine.run(PROMPT, 1)
        engine.settle()
        node.signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(3):
            answer = engine.run(PROMPT, 16, ignore_eos=True)
            assert answer.tokens == expected
        assert time.monotonic() - began < 10
        node.signal(signal.SIGCONT)


def test_a_pool_that_is_too_small_evicts_and_serves(start: Start, tiny: LoadedModel, tmp_path: Path) -> None:
    """The pool holds about one prompt, and many pass through it."""
    with node_thread(tmp_path / "n1", size=204 * tiny.config.kv_values_per_token() * 4) as node:
        engine = start(client(tiny, node.socket))
        for seed in range(5):
            prompt = prompt_of(203, seed=seed)
            assert engine.run(prompt, 1).finish is not None
            engine.settle()
        assert node.store.stats().evicted > 100
        answer = engine.run(prompt, 1)
        assert cached(answer) > 0
        engine.settle()
        engine.close()
