"""Engines that refuse, break, hang or talk nonsense: what one fails another does, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mooncaked.conductor.fleet import RANK_FAILED
from mooncaked.gateway import serve, watchdog
from mooncaked.types import Role
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, pair, running
from tests.fakes.engine import FakeEngine

BODY = {"model": "tiny", "prompt": "once upon a time", "max_tokens": 4}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running(request_timeout=20.0) as result:
        yield result


async def two_of_each(gateway: Running) -> tuple[FakeEngine, FakeEngine, FakeEngine, FakeEngine]:
    engines = (
        FakeEngine("p1", Role.PREFILL, "n1"),
        FakeEngine("p2", Role.PREFILL, "n2"),
        FakeEngine("d1", Role.DECODE, "n3"),
        FakeEngine("d2", Role.DECODE, "n4"),
    )
    await gateway.add(*engines)
    return engines


# --- before the first token: the request does not notice -----------------------------------------------


async def test_a_prefill_instance_that_refuses_connections_is_replaced(gateway: Running) -> None:
    first, second, *_ = await two_of_each(gateway)
    await first.stop()

    for _ in range(3):
        status, answer, headers = await gateway.post("/v1/completions", BODY)
        assert status == 200
        assert answer["choices"][0]["text"] == "w0 w1 w2 w3 "
        assert headers["X-Mooncake-Prefill"] == "p2"

    assert len(second.prefills) == 3
    assert gateway.reservations() == 0
    fleet, now_ms = gateway.candidate.conductor.fleet, asyncio.get_running_loop().time() * 1000
    assert fleet.rank(fleet.sites["p1"], frozenset(), now_ms) == RANK_FAILED


async def test_a_prefill_that_breaks_is_done_elsewhere(gateway: Running) -> None:
    first, second, *_ = await two_of_each(gateway)
    first.break_before_first = 5  # more than the one retry of a stale connection
    status, _, headers = await gateway.post("/v1/completions", BODY)
    assert status == 200
    assert headers["X-Mooncake-Prefill"] == "p2"
    assert second.prefills


async def test_a_decode_instance_that_fails_is_replaced_without_a_second_prefill(gateway: Running) -> None:
    first, second, third, fourth = await two_of_each(gateway)
    third.fail_status = 500

    status, _, headers = await gateway.post("/v1/completions", BODY)

    assert status == 200
    assert headers["X-Mooncake-Decode"] == "d2"
    assert len(first.prefills) + len(second.prefills) == 1
    prefill_node = (first.prefills and "n1") or "n2"
    assert fourth.decodes[0]["kv_transfer_params"]["sources"] == [prefill_node]


async def test_an_error_event_before_the_first_token_counts_as_a_failure(gateway: Running) -> None:
    *_, third, fourth = await two_of_each(gateway)
    third.error_after = 0
    _, events = await gateway.events("/v1/completions", BODY)
    assert events[-1] == "[DONE]"
    assert fourth.decodes


async def test_the_only_decode_instance_is_tried_again(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    decode.break_before_first = 2  # a stale connection is retried at once, so this is one failure
    status, _, _ = await gateway.post("/v1/completions", BODY)
    assert status == 200
    assert len(prefill.prefills) == 1


async def test_tries_are_bounded(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    decode.fail_status = 503
    status, answer, _ = await gateway.post("/v1/completions", BODY)
    assert status == 502
    assert answer["error"]["code"] == "engine_failed"
    assert "d1" in answer["error"]["message"]
    assert "out of order" in answer["error"]["message"]
    assert len(decode.decodes) == serve.TRIES_MAX
    assert gateway.reservations() == 0


async def test_tokenizing_moves_to_another_instance_too(gateway: Running) -> None:
    first, second, third, fourth = await two_of_each(gateway)
    for engine in (first, third):
        await engine.stop()
    for i in range(4):
        assert (await gateway.post("/v1/completions", BODY | {"prompt": f"text {i}"}))[0] == 200
    assert len(second.tokenized) + len(fourth.tokenized) == 4


async def test_a_whole_answer_that_breaks_in_the_middle_is_made_again(gateway: Running) -> None:
    *_, third, fourth = await two_of_each(gateway)
    third.break_after = 2
    status, answer, _ = await gateway.post("/v1/completions", BODY)
    assert status == 200
    assert answer["choices"][0]["text"] == "w0 w1 w2 w3 "
    assert answer["usage"]["completion_tokens"] == 4
    assert fourth.decodes


async def test_what_the_engine_calls_a_bad_request_is_not_tried_elsewhere(gateway: Running) -> None:
    first, second, *_ = await two_of_each(gateway)
    for engine in (first, second):
        engine.fail_status, engine.fail_message = 400, "this seed is unlucky"
    status, answer, _ = await gateway.post("/v1/completions", BODY | {"prompt": [1, 2, 3]})
    assert status == 400
    assert answer["error"]["message"] == "this seed is unlucky"
    assert len(first.bodies) + len(second.bodies) == 1


# --- after the first token: the stream says so and ends ------------------------------------------------


@pytest.mark.parametrize("fault", ["break_after", "error_after"])
async def test_a_stream_that_breaks_ends_with_an_error_event(gateway: Running, fault: str) -> None:
    *_, third, fourth = await two_of_each(gateway)
    for engine in (third, fourth):
        setattr(engine, fault, 2)
    _, events = await gateway.events("/v1/completions", BODY)
    *chunks, error = events
    assert [c["choices"][0]["text"] for c in chunks] == ["w0 ", "w1 "]
    assert error["error"]["code"] == "engine_failed"
    assert error["error"]["type"] == "server_error"
    assert gateway.reservations() == 0


# --- nothing hangs -------------------------------------------------------------------------------------


async def test_an_instance_that_leaves_the_cluster_in_silence_is_given_up(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.2)
    first, second, *_ = await two_of_each(gateway)
    first.hang.set()
    call = asyncio.create_task(gateway.post("/v1/completions", BODY))
    await eventually(lambda: first.running == 1, 5)

    gateway.view.instances = {k: v for k, v in gateway.view.instances.items() if k != "p1"}
    gateway.view.tell()

    status, _, headers = await call
    assert status == 200
    assert headers["X-Mooncake-Prefill"] == "p2"
    assert second.prefills


async def test_the_deadline_ends_a_request_that_nobody_answers() -> None:
    async with running(request_timeout=1.0) as gateway:
        prefill, decode = pair()
        prefill.hang.set()
        await gateway.add(prefill, decode)
        status, answer, _ = await gateway.post("/v1/completions", BODY)
        assert status == 504
        assert answer["error"]["code"] == "deadline_exceeded"
        assert gateway.reservations() == 0


async def test_the_deadline_in_mid_stream_is_an_error_event() -> None:
    async with running(request_timeout=1.0) as gateway:
        prefill, decode = pair()
        decode.token_s = 0.3
        await gateway.add(prefill, decode)
        _, events = await gateway.events("/v1/completions", BODY | {"max_tokens": 50})
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        assert gateway.reservations() == 0


async def test_an_idle_connection_that_the_engine_ended_is_no_failure(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    assert (await gateway.post("/v1/completions", BODY))[0] == 200
    for engine in (prefill, decode):  # restarted on the same port: the kept connections are dead
        await engine.stop()
        await engine.start()
    assert (await gateway.post("/v1/completions", BODY))[0] == 200
    assert "engine_failures_total 0.0" in await gateway.metrics()


# --- nodes that are away -------------------------------------------------------------------------------


async def test_instances_whose_node_is_away_are_used_last(gateway: Running) -> None:
    first, second, *_ = await two_of_each(gateway)
    gateway.candidate.conductor.fleet.set_away(frozenset({"n1"}))
    for _ in range(2):
        assert (await gateway.post("/v1/completions", BODY))[2]["X-Mooncake-Prefill"] == "p2"
    await second.stop()
    status, _, headers = await gateway.post("/v1/completions", BODY)
    assert (status, headers["X-Mooncake-Prefill"]) == (200, "p1")
    assert first.prefills
