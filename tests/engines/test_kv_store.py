"""The store fails, lags and lies; requests do not."""

from __future__ import annotations

import threading

import pytest

from mooncaked.client import PutResult
from mooncaked.clock import SystemClock
from mooncaked.engines.reference import kv_store
from mooncaked.engines.reference.kv_store import KvStore
from mooncaked.errors import ConnectionLost, MooncakeError, ProtocolError, Unreachable
from mooncaked.keys import chain_keys, tail_key
from tests.engines.conftest import Start
from tests.engines.harness import Running
from tests.engines.memory_store import MemoryStore
from tests.engines.test_model import prompt_of

PROMPT = prompt_of(43)


@pytest.fixture
def expected(start: Start) -> list[int]:
    """The answer without a store."""
    return start().run(PROMPT, 6, ignore_eos=True).tokens


def unreachable() -> MooncakeError:
    return Unreachable(what="the daemon", address="sock", cause="refused", remedy="Start it.")


def counts(engine: Running) -> kv_store.StoreCounts:
    assert engine.parts.store is not None
    return engine.parts.store.counts


def test_blocks_are_stored_under_the_keys_that_everybody_makes(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    engine.run(PROMPT, 1, handover=True)
    keys = chain_keys(engine.parts.namespace, PROMPT, 4)
    tail = tail_key(keys[-1], PROMPT[40:])
    assert list(store.values) == [*keys, tail]  # parents first
    assert list(store.parents.values()) == [None, *keys]
    full, part = store.values[keys[0]], store.values[tail]
    assert len(full) == 4 * engine.parts.kv_bytes_per_token
    assert len(part) == 3 * engine.parts.kv_bytes_per_token


def test_the_tail_is_stored_for_a_handover_only(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    engine.run(PROMPT, 1)
    engine.settle()
    assert len(store.values) == 10


def test_a_prompt_shorter_than_a_block_is_handed_over_too(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    first = engine.run([5, 6, 7], 1, handover=True).tokens[0]
    assert len(store.values) == 1
    answer = engine.run([5, 6, 7], 4, first_token=first, sources=[], ignore_eos=True)
    assert answer.finish is not None
    assert answer.finish.cached_tokens == 3
    assert answer.tokens == start().run([5, 6, 7], 4, ignore_eos=True).tokens


def test_loaded_blocks_are_not_stored_again(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    for _ in range(2):
        engine.run(PROMPT, 1)
        engine.settle()
    assert sum(map(len, store.puts)) == 10  # the second time, the last chunk had no full block of its own
    assert counts(engine).saved_blocks == 10


def test_where_to_look(start: Start, store: MemoryStore) -> None:
    """Named sources are asked; without a hint, whichever node the conductor's index names."""
    engine = start(store)
    engine.run(PROMPT, 1, sources=["node-7", "node-3"])
    engine.run(PROMPT, 1, sources=[])
    engine.run(PROMPT, 1)
    assert [(sources, locate) for _, sources, locate in store.got] == [
        (["node-7", "node-3"], False),
        ([], False),
        ([], True),
    ]


def test_after_a_miss_nothing_more_is_asked_for(
    start: Start, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(store)
    monkeypatch.setattr(kv_store, "_GROUP_BYTES", 2 * 4 * engine.parts.kv_bytes_per_token)
    engine.run(PROMPT, 1)
    engine.settle()
    del store.values[list(store.values)[3]]
    store.got.clear()
    engine.run(PROMPT, 1)
    assert [len(keys) for keys, *_ in store.got] == [2, 2]


@pytest.mark.parametrize(
    "error",
    [
        unreachable(),
        ConnectionLost(what="the daemon", operation="get", cause="reset"),
        ProtocolError(peer="the daemon", problem="nonsense"),
    ],
)
def test_a_failing_store_is_a_miss(
    start: Start, store: MemoryStore, expected: list[int], error: MooncakeError
) -> None:
    store.fail = lambda: error
    engine = start(store)
    for fields in ({}, {"handover": True}, {"first_token": expected[0], "sources": ["n"]}):
        answer = engine.run(PROMPT, 6, ignore_eos=True, **fields)
        assert answer.tokens == (expected[:1] if fields.get("handover") else expected)
        assert answer.finish is not None
        assert answer.finish.cached_tokens == 0
    assert counts(engine).failures >= 1
    assert not store.values


def test_a_bug_in_the_client_is_a_miss_too(start: Start, store: MemoryStore, expected: list[int]) -> None:
    def bug() -> MooncakeError | None:
        raise ZeroDivisionError

    store.fail = bug
    assert start(store).run(PROMPT, 6, ignore_eos=True).tokens == expected


def test_a_store_that_failed_is_left_alone_for_a_moment_then_used_again(
    start: Start, store: MemoryStore
) -> None:
    calls = 0

    def fail() -> MooncakeError:
        nonlocal calls
        calls += 1
        return unreachable()

    store.fail = fail
    engine = start(store)
    for _ in range(5):
        engine.run(PROMPT, 1)
    assert calls < 5
    store.fail = lambda: None
    deadline = threading.Event()
    while not store.values and not deadline.wait(0.02):
        engine.run(PROMPT, 1)
        engine.settle()
    assert engine.run(PROMPT, 1).finish is not None


def test_a_value_of_the_wrong_size_is_a_miss(start: Start, store: MemoryStore, expected: list[int]) -> None:
    engine = start(store)
    engine.run(PROMPT, 1)
    engine.settle()
    key = list(store.values)[4]
    store.values[key] = store.values[key][:-4]
    answer = engine.run(PROMPT, 6, ignore_eos=True)
    assert answer.tokens == expected
    assert answer.finish is not None
    assert answer.finish.cached_tokens == 16


@pytest.mark.parametrize("result", [PutResult.FULL, PutResult.TOO_LARGE, PutResult.DROPPED])
def test_a_store_without_room_costs_nothing_but_the_reuse(
    start: Start, store: MemoryStore, expected: list[int], result: PutResult
) -> None:
    store.put_result = result
    engine = start(store)
    assert engine.run(PROMPT, 6, handover=True).tokens == expected[:1]
    assert counts(engine).saved_blocks == 0
    answer = engine.run(PROMPT, 6, first_token=expected[0], sources=["n"], ignore_eos=True)
    assert answer.tokens == expected


def test_a_block_that_another_writer_stores_is_waited_for(
    start: Start, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode pulls as soon as a handover ends, so it ends when the block is there, whoever stores it."""
    monkeypatch.setattr(kv_store, "_BUSY_PAUSE_S", 0.001)
    store.put_result = PutResult.BUSY
    engine = start(store)
    answer = engine.submit(PROMPT[:6], 1, handover=True)
    while len(store.puts) < 3:
        assert answer.news.qsize() <= 1
    store.put_result = None
    answer.wait()
    assert len(store.values) == 2


def test_a_block_that_stays_busy_is_given_up(
    start: Start, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "_BUSY_PAUSE_S", 0.001)
    store.put_result = PutResult.BUSY
    assert start(store).run(PROMPT, 1, handover=True).finish is not None
    assert not store.values


def test_loading_ends_at_its_time_limit(
    start: Start, store: MemoryStore, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(store)
    engine.run(PROMPT, 1)
    engine.settle()
    monkeypatch.setattr(kv_store, "_GROUP_BYTES", 1)
    monkeypatch.setattr(kv_store, "LOAD_S", 0.0)
    answer = engine.run(PROMPT, 6, ignore_eos=True)
    assert answer.tokens == expected
    assert answer.finish is not None
    assert answer.finish.cached_tokens == 0


def test_closing_ends_what_has_not_begun(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    store.gate.clear()
    answers = [engine.submit(PROMPT, 1, handover=True) for _ in range(6)]  # more than there are threads
    closing = threading.Thread(target=_close, args=(engine.parts.store,))
    closing.start()
    store.gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert all(answer.wait().finish is not None for answer in answers)


def _close(store: KvStore | None) -> None:
    assert store is not None
    store.close()


def test_counts_survive_threads() -> None:
    totals = kv_store.StoreCounts()
    threads = [
        threading.Thread(target=lambda: [totals.add(loaded_blocks=1) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals.loaded_blocks == 2000
    assert SystemClock().monotonic() > 0
