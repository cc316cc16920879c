"""An etcd in memory, on an injected clock: `FakeStore` is the cluster, `FakeEtcd` a client's session with it.

It keeps the promises of `mooncaked.cluster.kv.Etcd` (tests/contract/test_etcd_contract.py checks both), and
fails on demand: `away`, `denied`, `lose_next_reply`, `lose_next_request`, `FakeStore.compact` and `expire`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Sequence

from mooncaked.clock import Clock
from mooncaked.cluster.kv import (
    Compare,
    Delete,
    Event,
    Get,
    KeyValue,
    Listing,
    Op,
    Put,
    TxnResult,
    WatchEvent,
)
from mooncaked.cluster.lease import Lease
from mooncaked.cluster.watch import Cursor, WatchResponse
from mooncaked.errors import LeaseLost, OutcomeUnknown, Unauthenticated, Unreachable


class _StoredLease:
    def __init__(self, ttl_s: float, now_s: float) -> None:
        self.ttl_s = ttl_s
        self.ends_at_s = now_s + ttl_s


class FakeStore:
    """Keys with revisions, their history, and leases that end when their time is over."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 1
        self.items: dict[str, KeyValue] = {}
        self.history: list[Event] = []
        self.compacted = 0
        self.leases: dict[int, _StoredLease] = {}
        self.changed = asyncio.Event()  # replaced at each change, and when a session goes away or comes back
        self._lease_ids = itertools.count(0x5EED)
        self._tasks: set[asyncio.Task[None]] = set()

    def session(self) -> FakeEtcd:
        """A new client."""
        return FakeEtcd(self)

    async def close(self) -> None:
        """End the tasks that watch over leases."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def compact(self, revision: int) -> None:
        """Forget the history up to `revision`."""
        self.compacted = revision
        self.history = [event for event in self.history if event.mod_revision > revision]

    def tell(self) -> None:
        """Wake everything that waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    # --- transactions ----------------------------------------------------------------------------------

    def holds(self, compare: Compare) -> bool:
        kv = self.items.get(compare.key)
        if compare.create_revision is not None:
            return (kv.create_revision if kv else 0) == compare.create_revision
        if compare.mod_revision is not None:
            return (kv.mod_revision if kv else 0) == compare.mod_revision
        return kv is not None and kv.value == compare.value

    def apply(self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> TxnResult:
        succeeded = all(self.holds(compare) for compare in compares)
        ops = then if succeeded else otherwise
        for op in ops:
            if isinstance(op, Put) and op.lease and op.lease not in self.leases:
                raise LeaseLost(what="this request", cause="requested lease not found")
        revision, events, got = self.revision + 1, list[Event](), list[KeyValue | None]()
        for op in ops:
            match op:
                case Put():
                    before = self.items.get(op.key)
                    created = before.create_revision if before else revision
                    self.items[op.key] = KeyValue(op.key, op.value, created, revision, op.lease)
                    events.append(Event(op.key, self.items[op.key], revision))
                case Delete():
                    if self.items.pop(op.key, None) is not None:
                        events.append(Event(op.key, None, revision))
                case Get():
                    got.append(self.items.get(op.key))
        if events:
            self.revision = revision
            self.history += events
            self.tell()
        return TxnResult(succeeded, self.revision, got)

    # --- leases ----------------------------------------------------------------------------------------

    def grant(self, ttl_s: float) -> int:
        lease_id = next(self._lease_ids)
        self.leases[lease_id] = _StoredLease(ttl_s, self.clock.monotonic())
        task = asyncio.create_task(self._end_when_due(lease_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return lease_id

    def keep_alive(self, lease_id: int) -> bool:
        if (lease := self.leases.get(lease_id)) is None:
            return False
        lease.ends_at_s = self.clock.monotonic() + lease.ttl_s
        return True

    def expire(self, lease_id: int) -> None:
        """End a lease, with its keys in one revision."""
        if self.leases.pop(lease_id, None) is not None:
            self.apply([], [Delete(key) for key, kv in self.items.items() if kv.lease == lease_id], [])

    async def _end_when_due(self, lease_id: int) -> None:
        while (lease := self.leases.get(lease_id)) is not None:
            left_s = lease.ends_at_s - self.clock.monotonic()
            if left_s <= 0:
                self.expire(lease_id)
            else:
                await self.clock.sleep(left_s)


class FakeEtcd:
    """`Etcd` on a `FakeStore`."""

    request_timeout_s = 3.0

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.denied = False  # etcd refuses the credentials
        self.lose_next_reply = False  # the next transaction is done, but its answer gets lost
        self.lose_next_request = False  # the next transaction gets lost on its way, which looks the same
        self._away = ""
        self._closed = False
        self._keepers: set[asyncio.Task[None]] = set()

    @property
    def away(self) -> str:
        """Why this session cannot reach etcd; "" when it can."""
        return "the session is closed" if self._closed else self._away

    @away.setter
    def away(self, cause: str) -> None:
        self._away = cause
        self.store.tell()

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        if self.denied:
            raise Unauthenticated(what="etcd", cause="permission denied", remedy="Check etcd.user.")
        if self.away:
            if not self._closed:
                await self.store.clock.sleep(self.request_timeout_s)
            raise Unreachable(what="etcd", address="fake", cause=self.away, remedy="Bring it back.")

    async def get(self, key: str) -> KeyValue | None:
        await self._reach()
        return self.store.items.get(key)

    async def range(self, prefix: str) -> Listing:
        await self._reach()
        items = sorted(self.store.items.items())
        return Listing(self.store.revision, [kv for key, kv in items if key.startswith(prefix)])

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        await self._reach()
        return self.store.apply([], [Put(key, value, lease)], []).revision

    async def delete(self, key: str) -> bool:
        await self._reach()
        existed = key in self.store.items
        self.store.apply([], [Delete(key)], [])
        return existed

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()
    ) -> TxnResult:
        await self._reach()
        if self.lose_next_request:
            self.lose_next_request = False
            raise OutcomeUnknown(operation="etcd txn", cause="no answer")
        result = self.store.apply(compares, then, otherwise)
        if self.lose_next_reply:
            self.lose_next_reply = False
            raise OutcomeUnknown(operation="etcd txn", cause="no answer")
        return result

    async def watch(self, prefix: str, revision: int | None = None) -> AsyncGenerator[WatchEvent, None]:
        cursor = Cursor(revision)
        while not self._closed:
            try:
                if cursor.next_revision is None:
                    for event in cursor.snapshot(await self.range(prefix)):
                        yield event
                await self._reach()
            except Unreachable as error:
                for event in cursor.broke(str(error.fields["cause"])):
                    yield event
                continue
            for event in cursor.take(self._opened(cursor)):
                yield event
            while cursor.next_revision is not None and not self.away:
                changed = self.store.changed
                for event in cursor.take(self._new(prefix, cursor.next_revision)):
                    yield event
                if changed is self.store.changed:
                    await changed.wait()
            if self.away and not self._closed:
                cursor.broke(self.away)

    def _opened(self, cursor: Cursor) -> WatchResponse:
        if cursor.next_revision is not None and cursor.next_revision <= self.store.compacted:
            compacted = self.store.compacted
            return WatchResponse(revision=self.store.revision, canceled=True, compact_revision=compacted)
        return WatchResponse(revision=self.store.revision, created=True)

    def _new(self, prefix: str, first: int) -> WatchResponse:
        events = [event for event in self.store.history if event.mod_revision >= first]
        mine = [event for event in events if event.key.startswith(prefix)]
        return WatchResponse(revision=self.store.revision, events=mine)

    async def grant(self, ttl_s: float, what: str) -> Lease:
        sent_at_s = self.store.clock.monotonic()
        await self._reach()
        lease_id = self.store.grant(math.ceil(ttl_s))

        async def end(revoke: bool) -> None:
            keeper.cancel()
            await asyncio.wait([keeper])
            self._keepers.discard(keeper)
            if revoke and not self.away:
                self.store.expire(lease_id)

        lease = Lease(lease_id, math.ceil(ttl_s), sent_at_s, self.store.clock, what=what, end=end)
        keeper = asyncio.create_task(self._keep(lease))
        self._keepers.add(keeper)
        return lease

    async def _keep(self, lease: Lease) -> None:
        clock = self.store.clock
        while lease.lost_cause is None:
            due_s = lease.sent_at_s + lease.times.interval_s - clock.monotonic()
            await clock.sleep(due_s if due_s > 0 else lease.times.attempt_s)
            if not self.away:
                sent_at_s = clock.monotonic()
                if self.store.keep_alive(lease.id):
                    lease.acknowledged(sent_at_s)
                else:
                    lease.lose("etcd has expired it")

    async def close(self) -> None:
        self._closed = True
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        self.store.tell()
