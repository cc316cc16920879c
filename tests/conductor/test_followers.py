"""Who decides: the leader for its followers, and each for itself when there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mooncaked.cluster.records import Leader
from mooncaked.gateway import dispatch
from mooncaked.keys import chain_keys
from mooncaked.types import Role
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, pair, running
from tests.fakes.cluster_view import FakeView, candidate_record
from tests.fakes.engine import FakeEngine

BODY = {"model": "tiny", "prompt": list(range(100, 120)), "max_tokens": 2}


@asynccontextmanager
async def leader_and_follower(**fields: object) -> AsyncIterator[tuple[Running, Running]]:
    """c1 leads in term 7, c2 follows it; both see the same cluster."""
    view = FakeView()
    async with running("c1", view, **fields) as leader, running("c2", view, **fields) as follower:
        leader.term, follower.term = 7, None
        view.leader = Leader(7, candidate_record("c1", leader.url))
        view.tell()
        yield leader, follower


async def test_a_follower_serves_what_the_leader_decides() -> None:
    async with leader_and_follower() as (leader, follower):
        prefill, decode = pair()
        decode.token_s = 0.05
        await leader.add(prefill, decode)
        call = asyncio.create_task(follower.post("/v1/completions", BODY | {"max_tokens": 10}))
        await eventually(lambda: decode.running == 1, 5)
        assert leader.reservations() == 1, "reserved where it was decided"
        assert follower.reservations() == 1, "and remembered, for when this one decides"

        status, answer, headers = await call

        assert status == 200
        assert answer["usage"]["completion_tokens"] == 10
        assert headers["X-Mooncake-Term"] == "7"
        assert "X-Mooncake-Degraded" not in headers
        await eventually(lambda: leader.reservations() == follower.reservations() == 0, 5)
        for candidate in (leader, follower):  # both learn from it
            fit = candidate.candidate.conductor.fleet.sites["p1"].models.estimate()
            assert fit.prefill_samples == 1


async def test_the_leaders_index_counts_for_a_followers_requests() -> None:
    async with leader_and_follower() as (leader, follower):
        await leader.add(
            FakeEngine("p1", Role.PREFILL, "n1"),
            FakeEngine("p2", Role.PREFILL, "n2"),
            FakeEngine("d1", Role.DECODE, "n3"),
        )
        leader.hold("n2", "tiny", chain_keys("tiny", BODY["prompt"], 4))
        _, _, headers = await follower.post("/v1/completions", BODY)
        assert headers["X-Mooncake-Prefill"] == "p2"


async def test_the_leaders_refusal_reaches_the_followers_client() -> None:
    async with leader_and_follower() as (leader, follower):
        prefill, decode = pair()
        await leader.add(prefill, decode)
        prompt = list(range(995))
        status, answer, _ = await follower.post(
            "/v1/completions", BODY | {"prompt": prompt, "max_tokens": 50}
        )
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_decode_that_fails_is_placed_again_by_the_leader() -> None:
    async with leader_and_follower() as (leader, follower):
        prefill, decode = pair()
        spare = FakeEngine("d2", Role.DECODE, "n3")
        await leader.add(prefill, decode, spare)
        decode.fail_status = 500
        status, _, headers = await follower.post("/v1/completions", BODY)
        assert (status, headers["X-Mooncake-Decode"], headers["X-Mooncake-Term"]) == (200, "d2", "7")
        fleet = leader.candidate.conductor.fleet
        assert fleet.failed(asyncio.get_running_loop().time() * 1000) == ["d1"], "the leader was told"


async def test_when_the_leader_dies_requests_wait_for_the_next_one() -> None:
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        follower.view.leader = Leader(7, candidate_record("c1", "http://127.0.0.1:1"))  # refuses
        call = asyncio.create_task(follower.post("/v1/completions", BODY))
        await asyncio.sleep(0.3)
        assert not call.done()

        follower.view.leader = Leader(9, candidate_record("c1", leader.url))
        leader.term = 9
        follower.view.tell()

        status, _, headers = await call
        assert (status, headers["X-Mooncake-Term"]) == (200, "9")
        assert "X-Mooncake-Degraded" not in headers


async def test_a_follower_that_becomes_leader_decides_for_those_that_wait() -> None:
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        follower.view.leader = None
        follower.view.tell()
        call = asyncio.create_task(follower.post("/v1/completions", BODY))
        await asyncio.sleep(0.2)
        follower.term = 8
        follower.candidate.dispatch.wake()
        status, _, headers = await asyncio.wait_for(call, 1)
        assert (status, headers["X-Mooncake-Term"]) == (200, "8")


async def test_without_any_leader_a_gateway_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 0.3)
    async with running() as gateway:
        gateway.term = None
        prefill, decode = pair()
        await gateway.add(prefill, decode, FakeEngine("p2", Role.PREFILL, "n3"))
        gateway.hold("n3", "tiny", chain_keys("tiny", BODY["prompt"], 4))

        status, _, headers = await gateway.post("/v1/completions", BODY)

        assert status == 200
        assert headers["X-Mooncake-Degraded"] == "1"
        assert headers["X-Mooncake-Prefill"] == "p2", "it has a warm index of its own"
        assert "degraded_decisions_total 1.0" in await gateway.metrics()
        begin = asyncio.get_running_loop().time()
        await gateway.post("/v1/completions", BODY)
        assert asyncio.get_running_loop().time() - begin < 0.25, "only the first request waited"
        assert gateway.reservations() == 0


async def test_without_etcd_the_wait_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 60)
    monkeypatch.setattr(dispatch, "PATIENCE_BLIND_S", 0.2)
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        follower.view.connected = False
        follower.view.leader = Leader(7, candidate_record("c1", "http://127.0.0.1:1"))
        status, _, headers = await asyncio.wait_for(follower.post("/v1/completions", BODY), 3)
        assert (status, headers["X-Mooncake-Degraded"]) == (200, "1")


async def test_a_leader_that_hangs_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 0.3)
    hung = await asyncio.start_server(lambda _r, _w: asyncio.sleep(30), "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        follower.view.leader = Leader(7, candidate_record("c1", f"http://127.0.0.1:{port}"))
        status, _, headers = await asyncio.wait_for(follower.post("/v1/completions", BODY), 4)
        assert (status, headers["X-Mooncake-Degraded"]) == (200, "1")
    hung.close()


async def test_a_leader_that_no_longer_leads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 0.2)
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        leader.term = None
        status, answer, _ = await leader.post("/v1/schedule", BODY, headers={dispatch.RELAYED: "c2"})
        assert (status, answer["error"]["code"]) == (503, "not_leader")
        assert (await follower.post("/v1/completions", BODY))[2]["X-Mooncake-Degraded"] == "1"


async def test_a_decision_of_an_old_term_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE_S", 0.2)
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        assert (await follower.post("/v1/completions", BODY))[2]["X-Mooncake-Term"] == "7"
        leader.term = 5  # a frozen leader of long ago comes back to the same address
        _, _, headers = await follower.post("/v1/completions", BODY)
        assert headers["X-Mooncake-Degraded"] == "1"


async def test_losing_the_leader_between_prefill_and_decode_loses_no_request() -> None:
    async with leader_and_follower() as (leader, follower):
        prefill, decode = pair()
        prefill.prefill_s = 0.3
        await leader.add(prefill, decode)
        call = asyncio.create_task(follower.post("/v1/completions", BODY))
        await eventually(lambda: prefill.running == 1, 5)
        follower.view.leader = None
        follower.view.tell()
        status, answer, headers = await call
        assert (status, answer["choices"][0]["text"]) == (200, "w0 w1 ")
        assert headers["X-Mooncake-Decode"] == "d1"
        assert follower.reservations() == 0
