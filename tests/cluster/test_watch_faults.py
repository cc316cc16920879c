"""A watch loses and repeats nothing, whatever happens to etcd; where it cannot keep that, it says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import Changes, Event, Gap, Snapshot, Stalled, WatchEvent
from mooncaked.errors import OutcomeUnknown, Unreachable
from tests.cluster.conftest import Trio
from tests.cluster.etcd_admin import EtcdAdmin
from tests.cluster.waiting import eventually

PREFIX = "/watched/"


class Recorder:
    """Keeps everything that a watch yields."""

    def __init__(self) -> None:
        self.all: list[WatchEvent] = []

    @property
    def events(self) -> list[Event]:
        return [event for changes in self.all if isinstance(changes, Changes) for event in changes.events]

    def of(self, kind: type[WatchEvent]) -> list[WatchEvent]:
        return [event for event in self.all if isinstance(event, kind)]

    async def run(self, events: AsyncGenerator[WatchEvent, None]) -> None:
        async with aclosing(events):
            async for event in events:
                self.all.append(event)


@asynccontextmanager
async def recording(etcd: EtcdSession) -> AsyncIterator[Recorder]:
    recorder = Recorder()
    task = asyncio.create_task(recorder.run(etcd.watch(PREFIX)))
    await eventually(lambda: len(recorder.all) >= 2, 10, "snapshot and live")
    yield recorder
    task.cancel()
    await asyncio.wait([task])


async def write_all(etcd: EtcdSession, count: int) -> None:
    """Write `count` keys, each at least once, through whatever happens meanwhile."""
    for number in range(count):
        while True:
            try:
                await etcd.put(f"{PREFIX}{number:05d}", b"v")
            except (OutcomeUnknown, Unreachable):
                continue
            break
        await asyncio.sleep(0.002)  # spread the writes over the faults


def check_complete(recorder: Recorder, listing_revisions: dict[str, int]) -> None:
    """Exactly the writes that etcd has, each once and in order."""
    seen = [(event.key, event.mod_revision) for event in recorder.events]
    revisions = [revision for _, revision in seen]
    assert revisions == sorted(set(revisions)), "repeated or out of order"
    assert dict(seen) == listing_revisions, "lost"


async def test_no_event_is_lost_or_repeated_over_kills_and_restarts(own_etcd: EtcdServer) -> None:
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=1.0)
    async with EtcdSession(options) as etcd, EtcdSession(options) as writer, recording(etcd) as recorder:
        writing = asyncio.create_task(write_all(writer, 300))
        for kills in range(1, 4):
            await eventually(lambda: len(recorder.events) >= 60 * kills, 20, "events go on")  # noqa: B023
            await asyncio.to_thread(own_etcd.restart)
        await writing
        listing = await etcd.range(PREFIX)
        await eventually(lambda: len(recorder.events) >= 300, 10, "all events")
    assert len(listing.items) == 300
    check_complete(recorder, {kv.key: kv.mod_revision for kv in listing.items})
    assert len(recorder.of(Snapshot)) == 1
    assert not recorder.of(Gap)


async def test_compaction_while_away_gives_a_gap_and_a_new_snapshot(own_etcd: EtcdServer) -> None:
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=1.0)
    async with EtcdSession(options) as etcd, recording(etcd) as recorder:
        await etcd.put(PREFIX + "a", b"1")
        await eventually(lambda: recorder.events, 10)
        await asyncio.to_thread(own_etcd.kill)
        await eventually(lambda: recorder.of(Stalled), 10, "it says that it is stalled")
        own_etcd.start()
        with EtcdAdmin(own_etcd.endpoint) as admin:  # blocks the loop: all this is before the watch resumes
            own_etcd.wait_ready()
            for number in range(3):
                admin.put(PREFIX + "a", str(number).encode())
            last = admin.put(PREFIX + "b", b"after")
            admin.compact(last)
        await eventually(lambda: len(recorder.of(Snapshot)) == 2, 10, "a second snapshot")
        kinds = [type(event) for event in recorder.all]
        assert kinds[kinds.index(Gap) + 1] is Snapshot
        snapshot = recorder.of(Snapshot)[1]
        assert isinstance(snapshot, Snapshot)
        assert [(kv.key, kv.value) for kv in snapshot.items] == [
            (PREFIX + "a", b"2"),
            (PREFIX + "b", b"after"),
        ]
        assert len(recorder.events) == 1
        await etcd.put(PREFIX + "c", b"1")
        await eventually(lambda: len(recorder.events) == 2, 10, "it goes on")


async def test_an_etcd_that_lost_its_data_gives_a_gap(own_etcd: EtcdServer) -> None:
    """An operator replaced it with an empty one: the old revision lies in its future, where a watch would
    wait in silence."""
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=1.0)
    async with EtcdSession(options) as etcd, recording(etcd) as recorder:
        for number in range(10):
            await etcd.put(f"{PREFIX}{number}", b"old")
        await eventually(lambda: len(recorder.events) == 10, 10)
        await asyncio.to_thread(own_etcd.kill)
        own_etcd.data_dir.rename(own_etcd.data_dir.with_name("lost"))
        own_etcd.start()
        await asyncio.to_thread(own_etcd.wait_ready)
        await etcd.put(PREFIX + "new", b"1")
        await eventually(lambda: len(recorder.of(Snapshot)) == 2, 10, "a second snapshot")
        snapshot = recorder.of(Snapshot)[1]
        assert isinstance(snapshot, Snapshot)
        assert {kv.key for kv in snapshot.items} <= {PREFIX + "new"}
        assert recorder.of(Gap)


async def test_a_watch_leaves_a_hung_member(trio: Trio) -> None:
    options = EtcdOptions(endpoints=trio.endpoints)
    async with EtcdSession(options) as etcd, EtcdSession(options) as writer, recording(etcd) as recorder:
        await etcd.put(PREFIX + "a", b"1")
        await eventually(lambda: len(recorder.events) == 1, 10)
        trio.at(etcd.endpoint).pause()
        await writer.put(PREFIX + "b", b"2")
        took_s = await eventually(
            lambda: len(recorder.events) == 2, 10, "the event comes from another member"
        )
        assert took_s < 6
        assert not recorder.of(Gap)
        assert len(recorder.of(Snapshot)) == 1


async def test_a_watch_outlives_the_end_of_its_member(trio: Trio) -> None:
    options = EtcdOptions(endpoints=trio.endpoints)
    async with EtcdSession(options) as etcd, recording(etcd) as recorder:
        trio.at(etcd.endpoint).kill()
        await etcd.put(PREFIX + "a", b"1")
        await eventually(lambda: len(recorder.events) == 1, 5)
        assert not recorder.of(Gap)
