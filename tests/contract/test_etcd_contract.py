"""What `Etcd` promises, checked on the real session with a real etcd and on the fake alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

import msgspec
import pytest

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import (
    Changes,
    Delete,
    Etcd,
    Event,
    Gap,
    Get,
    Live,
    Op,
    Put,
    Snapshot,
    WatchEvent,
    absent,
    created_at,
    has_value,
    unchanged_since,
)
from mooncaked.errors import LeaseLost, Unreachable
from tests.cluster.etcd_admin import EtcdAdmin
from tests.fakes.fake_etcd import FakeStore
from tests.fakes.manual_clock import ManualClock

TTL_S = 2.0


class World(msgspec.Struct, frozen=True):
    """An etcd and the means to let time pass and history be forgotten."""

    etcd: Etcd
    other: Etcd  # a second session with the same etcd
    prefix: str
    advance: Callable[[float], Awaitable[None]]
    compact: Callable[[int], None]


@pytest.fixture(params=["fake", "real"])
async def world(request: pytest.FixtureRequest, etcd_prefix: str) -> AsyncIterator[World]:
    if request.param == "fake":
        clock = ManualClock()
        store = FakeStore(clock)
        yield World(store.session(), store.session(), etcd_prefix, clock.advance, store.compact)
        await store.close()
        return
    server: EtcdServer = request.getfixturevalue("etcd_server")
    options = EtcdOptions(endpoints=[server.endpoint])
    with EtcdAdmin(server.endpoint) as admin:
        async with EtcdSession(options) as etcd, EtcdSession(options) as other:
            yield World(etcd, other, etcd_prefix, asyncio.sleep, admin.compact)


class Watcher:
    """Reads a watch event by event, with a limit on waiting."""

    def __init__(self, events: AsyncGenerator[WatchEvent, None]) -> None:
        self._events = events

    async def __aenter__(self) -> Watcher:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._events.aclose()

    async def next(self, kind: type[WatchEvent]) -> WatchEvent:
        async with asyncio.timeout(10):
            event = await anext(self._events)
        assert isinstance(event, kind), event
        return event

    async def changes(self, count: int) -> list[Event]:
        """The next `count` events, however they are grouped."""
        events: list[Event] = []
        while len(events) < count:
            change = await self.next(Changes)
            assert isinstance(change, Changes)
            assert change.revision == change.events[-1].mod_revision
            events += change.events
        assert len(events) == count
        return events


def shown(events: list[Event]) -> list[tuple[str, bytes | None]]:
    return [(event.key[-1], event.value.value if event.value else None) for event in events]


# --- keys ----------------------------------------------------------------------------------------------


async def test_a_key_is_read_as_it_was_written(world: World) -> None:
    key = f"{world.prefix}/ключ"
    assert await world.etcd.get(key) is None
    first = await world.etcd.put(key, b"\x00\xff one")
    second = await world.etcd.put(key, b"two")
    kv = await world.other.get(key)
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision) == (key, b"two", first, second)
    assert second > first
    assert kv.lease == 0


async def test_a_deleted_key_begins_anew(world: World) -> None:
    key = f"{world.prefix}/a"
    first = await world.etcd.put(key, b"1")
    assert await world.etcd.delete(key) is True
    assert await world.etcd.delete(key) is False
    assert await world.etcd.get(key) is None
    await world.etcd.put(key, b"2")
    kv = await world.etcd.get(key)
    assert kv is not None
    assert kv.create_revision > first


async def test_range_has_exactly_the_prefix_sorted(world: World) -> None:
    for name in ("b/2", "a", "b/1", "b", "b0", "b/\U0010ffff"):
        await world.etcd.put(f"{world.prefix}/{name}", name.encode())
    listing = await world.etcd.range(f"{world.prefix}/b/")
    assert [kv.value.decode() for kv in listing.items] == ["b/1", "b/2", "b/\U0010ffff"]
    last = listing.items[-1]
    assert listing.revision >= last.mod_revision
    assert await world.etcd.range(f"{world.prefix}/none/") == (listing.revision, [])


async def test_range_reads_more_than_a_page_as_of_one_revision(world: World) -> None:
    keys = [f"{world.prefix}/many/{number:05d}" for number in range(2300)]
    for start in range(0, len(keys), 100):
        await world.etcd.txn([], [Put(key, b"v") for key in keys[start : start + 100]])
    listing = await world.etcd.range(f"{world.prefix}/many/")
    assert [kv.key for kv in listing.items] == keys
    assert max(kv.mod_revision for kv in listing.items) <= listing.revision


async def test_concurrent_puts_each_happen_once(world: World) -> None:
    key = f"{world.prefix}/contended"
    async with Watcher(world.etcd.watch(key)) as watcher:
        await watcher.next(Snapshot)
        await watcher.next(Live)
        sessions = [world.etcd, world.other] * 3
        puts = [session.put(key, str(number).encode()) for number, session in enumerate(sessions)]
        revisions = await asyncio.gather(*puts)
        assert len(set(revisions)) == len(puts)
        seen = await watcher.changes(len(puts))
    assert sorted(event.mod_revision for event in seen) == sorted(revisions)
    assert {event.value.value for event in seen if event.value} == {b"0", b"1", b"2", b"3", b"4", b"5"}


# --- transactions --------------------------------------------------------------------------------------


async def test_txn_does_one_branch_atomically(world: World) -> None:
    a, b = f"{world.prefix}/a", f"{world.prefix}/b"
    made = await world.etcd.txn([absent(a), absent(b)], [Put(a, b"1"), Put(b, b"1")], [Get(a)])
    assert made.succeeded
    assert made.got == []
    kv = await world.etcd.get(b)
    assert kv is not None
    assert kv.create_revision == kv.mod_revision == made.revision

    refused = await world.etcd.txn([absent(a)], [Put(a, b"2")], [Get(a), Get(f"{world.prefix}/none"), Get(b)])
    assert not refused.succeeded
    assert [got.value if got else None for got in refused.got] == [b"1", None, b"1"]
    assert refused.revision >= made.revision


async def test_txn_compares_by_creation_change_and_value(world: World) -> None:
    key = f"{world.prefix}/a"
    created = await world.etcd.put(key, b"1")
    changed = await world.etcd.put(key, b"2")
    for compare, holds in [
        (created_at(key, created), True),
        (created_at(key, changed), False),
        (unchanged_since(key, changed), True),
        (unchanged_since(key, created), False),
        (unchanged_since(f"{world.prefix}/none", 0), True),
        (has_value(key, b"2"), True),
        (has_value(key, b"1"), False),
        (has_value(f"{world.prefix}/none", b""), False),
        (absent(key), False),
    ]:
        assert (await world.etcd.txn([compare], [])).succeeded is holds, compare
    both = await world.etcd.txn([has_value(key, b"2"), absent(key)], [Delete(key)])
    assert not both.succeeded
    assert await world.etcd.get(key) is not None


async def test_the_key_created_first_has_the_lower_term(world: World) -> None:
    first = await world.etcd.txn([absent(f"{world.prefix}/1")], [Put(f"{world.prefix}/1", b"")])
    await world.etcd.delete(f"{world.prefix}/1")
    again = await world.other.txn([absent(f"{world.prefix}/1")], [Put(f"{world.prefix}/1", b"")])
    assert again.revision > first.revision
    fenced = await world.etcd.txn([created_at(f"{world.prefix}/1", first.revision)], [Put("x", b"")])
    assert not fenced.succeeded


# --- watches -------------------------------------------------------------------------------------------


async def test_watch_gives_a_snapshot_and_then_every_change(world: World) -> None:
    prefix = f"{world.prefix}/w/"
    await world.etcd.put(prefix + "a", b"1")
    await world.etcd.put(f"{world.prefix}/unrelated", b"1")
    async with Watcher(world.etcd.watch(prefix)) as watcher:
        snapshot = await watcher.next(Snapshot)
        assert isinstance(snapshot, Snapshot)
        assert [kv.key for kv in snapshot.items] == [prefix + "a"]
        await watcher.next(Live)
        await world.other.put(prefix + "b", b"2")
        await world.other.put(f"{world.prefix}/unrelated", b"2")
        await world.other.put(prefix + "a", b"3")
        await world.other.delete(prefix + "b")
        events = await watcher.changes(3)
    assert shown(events) == [("b", b"2"), ("a", b"3"), ("b", None)]
    revisions = [event.mod_revision for event in events]
    assert revisions == sorted(revisions)
    assert revisions[0] > snapshot.revision


async def test_events_of_one_transaction_come_together(world: World) -> None:
    prefix = f"{world.prefix}/w/"
    await world.etcd.put(prefix + "z", b"")
    async with Watcher(world.etcd.watch(prefix)) as watcher:
        await watcher.next(Snapshot)
        await watcher.next(Live)
        ops: list[Op] = [Put(prefix + "a", b"1"), Put(prefix + "b", b"2"), Delete(prefix + "z")]
        result = await world.etcd.txn([], ops)
        changes = await watcher.next(Changes)
    assert isinstance(changes, Changes)
    assert changes.revision == result.revision
    assert {event.mod_revision for event in changes.events} == {result.revision}
    assert sorted(shown(changes.events)) == [("a", b"1"), ("b", b"2"), ("z", None)]


async def test_watch_from_a_revision_misses_nothing_since(world: World) -> None:
    prefix = f"{world.prefix}/w/"
    await world.etcd.put(prefix + "a", b"before")
    start = await world.etcd.put(prefix + "a", b"1")
    await world.etcd.put(prefix + "b", b"2")
    await world.etcd.delete(prefix + "a")
    async with Watcher(world.etcd.watch(prefix, start)) as watcher:
        await watcher.next(Live)
        assert shown(await watcher.changes(3)) == [("a", b"1"), ("b", b"2"), ("a", None)]


async def test_watch_from_a_compacted_revision_says_gap_and_starts_over(world: World) -> None:
    prefix = f"{world.prefix}/w/"
    start = await world.etcd.put(prefix + "a", b"1")
    await world.etcd.put(prefix + "a", b"2")
    last = await world.etcd.put(prefix + "b", b"3")
    world.compact(last)
    async with Watcher(world.etcd.watch(prefix, start)) as watcher:
        event = await watcher.next(cast("type[WatchEvent]", Gap | Live))
        if isinstance(event, Live):  # etcd opens the watch before it finds that it cannot serve it
            await watcher.next(Gap)
        snapshot = await watcher.next(Snapshot)
        assert isinstance(snapshot, Snapshot)
        assert [(kv.key[-1], kv.value) for kv in snapshot.items] == [("a", b"2"), ("b", b"3")]
        await world.other.put(prefix + "c", b"4")
        while not isinstance(event := await watcher.next(cast("type[WatchEvent]", Changes | Live)), Changes):
            pass
    assert shown(event.events) == [("c", b"4")]


async def test_watch_of_a_key_under_a_lease_sees_it_vanish(world: World) -> None:
    prefix = f"{world.prefix}/w/"
    lease = await world.etcd.grant(TTL_S, "test")
    async with Watcher(world.other.watch(prefix)) as watcher:
        await watcher.next(Snapshot)
        await watcher.next(Live)
        await world.etcd.txn([], [Put(prefix + "a", b"1", lease.id), Put(prefix + "b", b"1", lease.id)])
        assert sorted(shown(await watcher.changes(2))) == [("a", b"1"), ("b", b"1")]
        await lease.close()
        assert sorted(shown(await watcher.changes(2))) == [("a", None), ("b", None)]


# --- leases --------------------------------------------------------------------------------------------


async def test_a_lease_is_kept_alive_beyond_its_ttl(world: World) -> None:
    key = f"{world.prefix}/a"
    lease = await world.etcd.grant(TTL_S, "test")
    assert lease.valid()
    await world.etcd.put(key, b"1", lease.id)
    await world.advance(lease.times.ttl_s * 1.5)
    assert lease.valid()
    assert not lease.lost.is_set()
    kv = await world.other.get(key)
    assert kv is not None
    assert kv.lease == lease.id
    await lease.close()
    assert not lease.valid()
    assert await world.other.get(key) is None


async def test_a_lease_that_nobody_keeps_alive_ends(world: World) -> None:
    key = f"{world.prefix}/a"
    lease = await world.etcd.grant(1.0, "test")
    await world.etcd.put(key, b"1", lease.id)
    await lease.close(revoke=False)
    assert await world.other.get(key) is not None
    await world.advance(lease.times.ttl_s + 1.5)
    assert await world.other.get(key) is None


async def test_a_lease_lost_in_etcd_says_so(world: World) -> None:
    lease = await world.etcd.grant(TTL_S, "test")
    twin = await world.etcd.grant(TTL_S, "test")
    assert twin.id != lease.id
    await _revoke(world, lease.id)
    await world.advance(lease.times.interval_s + 0.1)
    async with asyncio.timeout(5):
        await lease.lost.wait()
    assert not lease.valid()
    assert lease.lost_cause
    assert twin.valid()
    with pytest.raises(LeaseLost):
        await world.etcd.put(f"{world.prefix}/a", b"1", lease.id)
    await lease.close()
    await twin.close()


async def _revoke(world: World, lease_id: int) -> None:
    """As an operator would, behind the owner's back."""
    if isinstance(world.etcd, EtcdSession):
        with EtcdAdmin(world.etcd.endpoint) as admin:
            admin.revoke(lease_id)
    else:
        world.etcd.store.expire(lease_id)  # type: ignore[attr-defined]


async def test_a_key_written_under_another_lease_leaves_the_first(world: World) -> None:
    key = f"{world.prefix}/a"
    first, second = await world.etcd.grant(TTL_S, "first"), await world.other.grant(TTL_S, "second")
    await world.etcd.put(key, b"1", first.id)
    await world.other.put(key, b"2", second.id)
    await first.close()
    kv = await world.etcd.get(key)
    assert kv is not None
    assert (kv.value, kv.lease) == (b"2", second.id)
    await world.other.put(key, b"3")
    await second.close()
    assert await world.etcd.get(key) is not None


# --- the end -------------------------------------------------------------------------------------------


async def test_a_closed_session_is_unreachable_and_its_watches_end(world: World) -> None:
    events = world.other.watch(world.prefix)
    watcher = Watcher(events)
    await watcher.next(Snapshot)
    await watcher.next(Live)
    reading = asyncio.create_task(_drain(events))
    await asyncio.sleep(0)
    await world.other.close()
    async with asyncio.timeout(5):
        await reading
    with pytest.raises(Unreachable):
        await world.other.get(world.prefix)


async def _drain(events: AsyncGenerator[WatchEvent, None]) -> None:
    async with aclosing(events):
        async for event in events:
            assert isinstance(event, Changes), event
