"""Registration: a record that stays in etcd for as long as its owner lives, and no longer."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from enum import Enum

import msgspec

from mooncaked.clock import Clock, SystemClock
from mooncaked.cluster.kv import Etcd, Get, KeyValue, Put, unchanged_since
from mooncaked.cluster.lease import Lease
from mooncaked.cluster.records import (
    Leader,
    encode,
    read_candidates,
    read_history,
    read_instances,
    read_leader,
    read_nodes,
)
from mooncaked.cluster.view import ClusterView
from mooncaked.cluster.watch import watch_prefix
from mooncaked.errors import DeadlineExceeded, LeaseLost, MooncakeError, OutcomeUnknown

__all__ = [
    "ClusterView",
    "Leader",
    "Registration",
    "read_candidates",
    "read_history",
    "read_instances",
    "read_leader",
    "read_nodes",
]

log = logging.getLogger(__name__)

_PAUSE_S = 0.1  # before another attempt; doubles with each failure, up to
_PAUSE_MAX_S = 2.0


class Step(Enum):
    """What a registration does next about its key."""

    WRITE = "write the record"
    HOLD = "it is there as it should be"
    YIELD = "another owner has the key: wait until it is free"


def next_step(wanted: bytes, lease_id: int, seen: KeyValue | None, *, take_over: bool) -> Step:
    """Decide by what is at the key now. Pure.

    The newest owner of a name wins: a process that starts takes the key over from whoever had it (most often
    itself, before a crash), and one that finds its key taken does not fight for it. Two processes with one
    name are an operator's mistake, and that way the records do not flap."""
    if seen is None:
        return Step.WRITE
    if seen.lease != lease_id:
        return Step.WRITE if take_over else Step.YIELD
    return Step.HOLD if seen.value == wanted else Step.WRITE


class Registration:
    """Keeps `make_record()` at `key` under a lease, and registers again by itself when that was lost.

    `make_record` is called at each (re-)registration and each `update()`, on the event loop. Use `start` and
    `close`, or run `run` in a task group and `close` after it. While etcd is away it goes on trying; nothing
    raises."""

    def __init__(
        self,
        etcd: Etcd,
        ttl_s: float,
        key: str,
        make_record: Callable[[], msgspec.Struct],
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.key = key
        self.problem = "not yet registered"  # why it is not registered; "" when it is
        self._etcd, self._ttl_s, self._make_record = etcd, ttl_s, make_record
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._wake = asyncio.Event()
        self._became_registered = asyncio.Event()
        self._fresh = True  # has not been registered yet, so may take the key over
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def registered(self) -> bool:
        """Whether the record is in etcd, under a lease that holds."""
        return not self.problem and self._lease is not None and self._lease.valid()

    @property
    def lease_left_s(self) -> float:
        """Seconds for which the lease still holds if no keepalive succeeds any more; 0 without one."""
        lease = self._lease
        return max(0.0, lease.valid_until_s - self._clock.monotonic()) if lease and lease.valid() else 0.0

    def start(self) -> None:
        """Begin to register, in a task of its own."""
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name=f"registration-{self.key}")

    async def wait_registered(self, timeout_s: float) -> None:
        """Wait until the record is in etcd; raises `DeadlineExceeded`, which names the problem."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._became_registered.wait()
        except TimeoutError:
            operation = f"registration at {self.key} ({self.problem})"
            raise DeadlineExceeded(operation=operation, limit_ms=round(timeout_s * 1000)) from None

    def update(self, make_record: Callable[[], msgspec.Struct] | msgspec.Struct | None = None) -> None:
        """Write the record anew, soon: from `make_record`, which may also be the record itself and replaces
        the one given before."""
        if isinstance(make_record, msgspec.Struct):
            record = make_record
            self._make_record = lambda: record
        elif make_record is not None:
            self._make_record = make_record
        self._wake.set()

    async def close(self) -> None:
        """Stop, and remove the record at once where etcd can be reached (else it expires)."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        await self._drop_lease()
        self._not_registered("closed")

    async def run(self) -> None:
        """Keep the record in etcd until cancelled; `close` removes it."""
        watching = asyncio.create_task(self._watch(), name=f"watch-{self.key}")
        failures = 0
        try:
            while True:
                try:
                    await self._hold()
                    failures = 0
                except MooncakeError as error:
                    failures += 1
                    self._failed(error)
                await self._pause(failures)
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _hold(self) -> None:
        """Grant a lease if there is none, write the record, and look after both until the lease is lost.
        Raises on any failure; the lease is kept then, if it still holds."""
        lease = self._lease
        if lease is None:
            lease = self._lease = await self._etcd.grant(self._ttl_s, self.key)
        waiting = asyncio.create_task(self._wake_when_lost(lease))
        try:
            while lease.lost_cause is None:
                self._wake.clear()
                await self._look_after(lease)
                await self._wake.wait()
            raise LeaseLost(what=self.key, cause=lease.lost_cause)
        finally:
            waiting.cancel()
            if lease.lost_cause is not None:
                await self._drop_lease()

    async def _look_after(self, lease: Lease) -> None:
        """Read the key and do what is to be done, once."""
        wanted = encode(self._make_record())
        seen = await self._etcd.get(self.key)
        match next_step(wanted, lease.id, seen, take_over=self._fresh):
            case Step.WRITE:
                await self._write(lease, wanted, seen)
            case Step.HOLD:
                self._is_registered()
            case Step.YIELD:
                self._superseded()

    async def _write(self, lease: Lease, wanted: bytes, seen: KeyValue | None) -> None:
        unchanged = unchanged_since(self.key, seen.mod_revision if seen else 0)
        try:
            result = await self._etcd.txn([unchanged], [Put(self.key, wanted, lease.id)], [Get(self.key)])
        except OutcomeUnknown:
            self._wake.set()  # read again and compare
            return
        except LeaseLost as error:
            lease.lose(str(error.fields["cause"]))
            return
        if result.succeeded:
            self._is_registered()
        else:
            self._wake.set()

    async def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.close()

    async def _wake_when_lost(self, lease: Lease) -> None:
        await lease.lost.wait()
        self._wake.set()

    async def _watch(self) -> None:
        """Wake when someone else changes the key, or when etcd is back."""
        last: tuple[KeyValue | None, bool] | None = None
        async with aclosing(watch_prefix(self._etcd, self.key, self._clock)) as views:
            async for view in views:
                now = (view.items.get(self.key), view.connected)
                if now != last:
                    last = now
                    self._wake.set()

    async def _pause(self, failures: int) -> None:
        if failures:
            longest_s = min(_PAUSE_S * 2.0 ** min(failures, 10), _PAUSE_MAX_S)
            await self._clock.sleep(self._rng.uniform(longest_s / 2, longest_s))

    # --- what it says of itself ------------------------------------------------------------------------

    def _is_registered(self) -> None:
        if self.problem:
            log.info("registered key=%s lease_ttl_s=%.0f", self.key, self._ttl_s)
        self.problem, self._fresh = "", False
        self._became_registered.set()

    def _not_registered(self, problem: str) -> bool:
        """Remember why; True when that is news."""
        news, self.problem = self.problem != problem, problem
        self._became_registered.clear()
        return news

    def _failed(self, error: MooncakeError) -> None:
        if self._not_registered(str(error)):
            level = logging.INFO if isinstance(error, LeaseLost) else logging.WARNING
            log.log(level, "not registered, goes on trying key=%s cause=%s", self.key, error)

    def _superseded(self) -> None:
        if self._not_registered("another process has registered under this name"):
            log.warning("registration taken over by another process key=%s; give each its own id", self.key)
