"""Calls and leases with members of etcd that are dead, hung, or all away."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from mooncakectl.local.etcd_server import EtcdServer, free_ports
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import Put, Snapshot
from mooncaked.errors import ConfigError, OutcomeUnknown, Unreachable
from tests.cluster.conftest import Trio
from tests.cluster.etcd_admin import EtcdAdmin
from tests.cluster.waiting import eventually

TIMEOUT_S = 3.0


async def test_calls_move_on_from_a_hung_member(trio: Trio) -> None:
    async with EtcdSession(EtcdOptions(endpoints=trio.endpoints)) as etcd:
        await etcd.put("/a", b"1")
        hung = etcd.endpoint
        trio.at(hung).pause()
        begin = time.monotonic()
        kv = await etcd.get("/a")
        took_s = time.monotonic() - begin
        assert kv is not None
        assert kv.value == b"1"
        assert took_s < TIMEOUT_S
        assert etcd.endpoint != hung
        begin = time.monotonic()
        await etcd.put("/a", b"2")
        assert time.monotonic() - begin < 1, "the hung member is not asked again"


async def test_a_put_that_hangs_is_done_once_elsewhere(trio: Trio) -> None:
    """The write itself, not a read before it, meets the hung member: afterwards it is there exactly once."""
    async with EtcdSession(EtcdOptions(endpoints=trio.endpoints)) as etcd:
        await etcd.put("/b", b"1")
        server = trio.at(etcd.endpoint)
        read = etcd._get

        async def read_then_hang(*args: object) -> object:
            seen = await read(*args)  # type: ignore[arg-type]
            if seen is not None and seen.value == b"1":
                server.pause()
            return seen

        etcd._get = read_then_hang  # type: ignore[method-assign, assignment]
        begin = time.monotonic()
        revision = await etcd.put("/b", b"2")
        assert time.monotonic() - begin < 2 * TIMEOUT_S
        server.resume()
        etcd._get = read  # type: ignore[method-assign]
        assert await etcd.put("/b", b"3") > revision
        await asyncio.to_thread(server.wait_ready)
        kv = await etcd.get("/b")
        assert kv is not None
        assert kv.value == b"3", "the request that hung does nothing when its member wakes up"


async def test_a_transaction_without_an_answer_is_not_sent_again(own_etcd: EtcdServer) -> None:
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)
    async with EtcdSession(options) as etcd:
        await etcd.get("/a")
        own_etcd.pause()
        begin = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="may or may not have taken effect"):
            await etcd.txn([], [])
        assert time.monotonic() - begin < 1
        own_etcd.resume()


async def test_dead_members_are_skipped(etcd_endpoint: str) -> None:
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with EtcdSession(EtcdOptions(endpoints=[*dead, etcd_endpoint])) as etcd:
        begin = time.monotonic()
        await etcd.put("/a", b"1")
        assert time.monotonic() - begin < 1
        statuses = {status.address: status for status in await etcd.members()}
        assert statuses[etcd_endpoint].leads
        assert not statuses[etcd_endpoint].problem
        assert statuses[dead[0]].problem


async def test_no_member_at_all_is_unreachable_in_time() -> None:
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with EtcdSession(EtcdOptions(endpoints=dead, request_timeout_s=0.5)) as etcd:
        begin = time.monotonic()
        with pytest.raises(Unreachable, match=r"connection refused\. .*etcd\.endpoints"):
            await etcd.get("/a")
        assert 0.4 < time.monotonic() - begin < 1


async def test_a_hung_etcd_is_unreachable_in_time(own_etcd: EtcdServer) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)) as etcd:
        own_etcd.pause()
        begin = time.monotonic()
        with pytest.raises(Unreachable):
            await etcd.get("/a")
        with pytest.raises(Unreachable):
            await etcd.put("/a", b"")
        assert time.monotonic() - begin < 1.5
        own_etcd.resume()
        await etcd.put("/a", b"")


async def test_closing_the_session_ends_calls_with_an_error_and_not_their_tasks(own_etcd: EtcdServer) -> None:
    """gRPC reports a closed channel as a cancellation, which would look as if somebody cancelled the task."""
    etcd = EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=5.0))
    await etcd.start()
    await etcd.get("/a")
    own_etcd.pause()
    getting = asyncio.create_task(etcd.get("/a"))
    writing = asyncio.create_task(etcd.txn([], [Put("/a", b"")]))
    watching = asyncio.create_task(anext(etcd.watch("/a", 1)))
    await asyncio.sleep(0.2)
    await etcd.close()
    async with asyncio.timeout(3):
        results = await asyncio.gather(getting, writing, watching, return_exceptions=True)
    assert [type(result) for result in results] == [Unreachable, OutcomeUnknown, StopAsyncIteration]


async def test_an_etcd_that_comes_up_later_is_found(tmp_path: Path) -> None:
    """A session can be made and used while etcd is away."""
    port, peer = free_ports(2)
    server = EtcdServer(tmp_path / "etcd", port, peer, tmp_path / "etcd.log")
    async with EtcdSession(EtcdOptions(endpoints=[server.endpoint], request_timeout_s=0.3)) as etcd:
        with pytest.raises(Unreachable):
            await etcd.get("/a")
        snapshot = asyncio.create_task(_first_snapshot(etcd))
        try:
            server.start()
            assert (await asyncio.wait_for(snapshot, 10)).items == []
        finally:
            server.kill()


async def _first_snapshot(etcd: EtcdSession) -> Snapshot:
    async for event in etcd.watch("/a"):
        if isinstance(event, Snapshot):
            return event
    raise AssertionError("the watch ended")


async def test_a_lease_outlives_hung_and_dead_members(trio: Trio) -> None:
    async with EtcdSession(EtcdOptions(endpoints=trio.endpoints)) as etcd:
        lease = await etcd.grant(2.0, "test")
        await etcd.put("/leased", b"1", lease.id)
        (hung,) = (member for member in trio.members if member.endpoint == etcd.endpoint)
        hung.pause()
        await eventually(lambda: lease.sent_at_s > time.monotonic() - 0.2, 3, "a keepalive gets through")
        begin = time.monotonic()
        while time.monotonic() - begin < 2.5:
            assert lease.valid()
            await asyncio.sleep(0.05)
        assert await etcd.get("/leased")
        assert lease.lost_cause is None
        await lease.close()


async def test_a_blocked_event_loop_does_not_cost_a_lease(own_etcd: EtcdServer) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint])) as etcd:
        lease = await etcd.grant(1.0, "test")
        await etcd.put("/leased", b"1", lease.id)
        time.sleep(lease.times.ttl_s * 2)  # noqa: ASYNC251 - the point: nothing on this loop runs meanwhile
        assert lease.valid()
        kv = await etcd.get("/leased")
        assert kv is not None
        assert kv.lease == lease.id
        await lease.close()


async def test_a_lease_survives_a_restart_of_etcd(own_etcd: EtcdServer) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint])) as etcd:
        lease = await etcd.grant(3.0, "test")
        await etcd.put("/leased", b"1", lease.id)
        await asyncio.to_thread(own_etcd.restart)
        sent_at_s = lease.sent_at_s
        await eventually(lambda: lease.sent_at_s > sent_at_s, 3, "it is kept alive again")
        assert lease.valid()
        assert await etcd.get("/leased")
        await lease.close()


async def test_a_lease_is_not_valid_while_etcd_does_not_answer(own_etcd: EtcdServer) -> None:
    """By its own clock, before etcd could have given its keys away."""
    async with EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint])) as etcd:
        lease = await etcd.grant(1.0, "test")
        own_etcd.pause()
        paused_at_s = time.monotonic()
        took_s = await eventually(lambda: not lease.valid(), 2)
        assert took_s < lease.times.ttl_s - lease.times.margin_s + 0.1
        assert lease.valid_until_s <= paused_at_s + lease.times.ttl_s
        assert lease.lost_cause is None, "nobody knows yet"
        own_etcd.resume()
        await lease.close()


@pytest.mark.parametrize(
    ("endpoints", "problem"),
    [
        ([], "empty"),
        (["localhost"], "no address"),
        (["localhost:0"], "no address"),
        (["localhost:70000"], "no address"),
        (["ftp://localhost:2379"], "no address"),
        (["http://a:2379", "https://b:2379"], "do not go together"),
    ],
)
def test_bad_endpoints_are_refused_at_once(endpoints: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EtcdSession(EtcdOptions(endpoints=endpoints))


async def test_a_range_that_is_compacted_between_its_pages_is_read_anew(etcd_session: EtcdSession) -> None:
    for start in range(0, 1500, 100):
        await etcd_session.txn([], [Put(f"/paged/{start + number:05d}", b"1") for number in range(100)])
    call, pages = etcd_session._caller.call, 0

    async def compact_after_the_first_page(service: str, name: str, request: Any, *rest: Any) -> Any:
        nonlocal pages
        reply = await call(service, name, request, *rest)
        pages += 1
        if pages == 1:
            with EtcdAdmin(etcd_session.endpoint) as admin:
                admin.compact(admin.put("/paged/00000", b"2"))
        return reply

    etcd_session._caller.call = compact_after_the_first_page  # type: ignore[method-assign, assignment]
    listing = await etcd_session.range("/paged/")
    assert len(listing.items) == 1500
    assert listing.items[0].value == b"2"
    assert pages == 3, "one page, and both anew"
