"""Leader election: who leads, and the term that fences what a leader writes and orders.

Each candidate puts a key under a lease of its own; the key that was created first leads, and its create
revision is the term. A term is unique and greater than every earlier one, because etcd's revisions are.

A leader believes in itself only while its lease is valid by its own clock (see lease.py), so it stops before
another can begin, also when it cannot reach etcd. What it writes to etcd goes through `fenced`, which etcd
itself refuses to a leader that has been replaced; what it orders from nodes carries the term, and nodes
refuse lower terms than they have seen. So a leader that was frozen in between does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import msgspec

from mooncaked.clock import Clock, SystemClock
from mooncaked.cluster import keys
from mooncaked.cluster.kv import Delete, Etcd, Op, Put, TxnResult, absent, created_at
from mooncaked.cluster.lease import Lease
from mooncaked.cluster.records import ElectionTable, Leader, Standings, encode, read_leader
from mooncaked.cluster.watch import View, watch_prefix
from mooncaked.errors import LeaseLost, MooncakeError, NotLeader, OutcomeUnknown
from mooncaked.types import CandidateRecord, TermRecord

__all__ = ["Election", "Leader", "Standing", "read_leader"]

log = logging.getLogger(__name__)

HISTORY_TERMS_MAX = 100
_PAUSE_S = 0.1  # before another attempt; doubles with each failure, up to
_PAUSE_MAX_S = 1.0


class Standing(msgspec.Struct, frozen=True):
    """What a candidate knows of the election."""

    term: int | None  # the term in which this candidate leads; None: it does not
    leader: Leader | None  # as last seen in etcd; may be out of date while etcd is away


class Election:
    """One candidate. `run` campaigns until cancelled or `resign`; failures of etcd only make it not lead."""

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        record: CandidateRecord,
        ttl_s: float,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.record = record
        self.problem = "not yet standing"  # why it does not stand for election; "" when it does
        self._etcd, self._prefix, self._ttl_s = etcd, prefix, ttl_s
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._table = ElectionTable(prefix)
        self._standings = Standings()
        self._view = View()
        self._lease: Lease | None = None
        self._won: int | None = None  # the term in which etcd has this candidate lead, valid or not
        self._told = Standing(None, None)
        self._callbacks: list[Callable[[Standing], None]] = []
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._resigned = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._recording: asyncio.Task[None] | None = None

    # --- what it knows ---------------------------------------------------------------------------------

    @property
    def term(self) -> int | None:
        """The term in which this candidate leads at this moment, by its own clock; None: it does not lead.
        Ask anew before each decision; any thread may."""
        won, lease = self._won, self._lease
        return won if won is not None and lease is not None and lease.valid() else None

    def leader(self) -> Leader | None:
        """Who leads, as last seen in etcd: itself, another, or nobody."""
        return self._standings.leader

    @property
    def standing(self) -> Standing:
        """`term` and `leader()` together."""
        return Standing(self.term, self.leader())

    def on_change(self, callback: Callable[[Standing], None]) -> Callable[[], None]:
        """Call `callback` when the standing changes, on the event loop of `run`. Returns what undoes that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def changes(self) -> AsyncIterator[Standing]:
        """The standing now, and again whenever it has changed since; intermediate ones may be skipped."""
        last: Standing | None = None
        while True:
            changed = self._changed
            if (now := self.standing) != last:
                last = now
                yield now
            else:
                await changed.wait()

    # --- what a leader does ----------------------------------------------------------------------------

    async def fenced(self, then: Sequence[Op]) -> TxnResult:
        """Write to etcd as the leader: all of `then`, or nothing and `NotLeader` when this candidate's term
        is over. Raises what `Etcd.txn` raises."""
        term, lease = self.term, self._lease
        if term is None or lease is None:
            raise self._not_leader()
        key = keys.candidate_key(self._prefix, lease.id)
        result = await self._etcd.txn([created_at(key, term)], then)
        if not result.succeeded:
            self._wake.set()
            raise self._not_leader()
        return result

    def _not_leader(self) -> NotLeader:
        leader = self.leader()
        return NotLeader(leader=leader.record.gateway_url if leader else "not known")

    async def resign(self) -> None:
        """Stop to stand, for good: give the lead away at once and end `run`. Returns when that is done."""
        self._resigned = True
        self._wake.set()
        await self._ended.wait()

    # --- the campaign ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stand for election again and again, until cancelled or `resign`."""
        self._ended.clear()
        watching = asyncio.create_task(self._watch(), name="election-watch")
        failures = 0
        try:
            while not self._resigned:
                try:
                    await self._campaign()
                    failures = 0
                except MooncakeError as error:
                    failures += 1
                    self._failed(error)
                await self._pause(failures)
        finally:
            self._won = None
            tasks = [task for task in (watching, self._recording) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._drop_lease()
            self._tell()
            self._ended.set()

    async def _campaign(self) -> None:
        """One candidacy: until the lease or the key is lost, or `resign`."""
        lease = self._lease
        if lease is None:
            lease = self._lease = await self._etcd.grant(self._ttl_s, f"candidate {self.record.candidate_id}")
        key = keys.candidate_key(self._prefix, lease.id)
        waiting = asyncio.create_task(self._wake_when_lost(lease))
        try:
            created = await self._stand(lease, key)
            self.problem = ""
            while not self._resigned and lease.lost_cause is None and self._still_there(key, created):
                self._wake.clear()
                self._follow(key, created)
                await self._wake_or_lapse(lease)
        finally:
            waiting.cancel()
            self._won = None
            if lease.lost_cause is not None:
                await self._drop_lease()
            self._tell()

    async def _stand(self, lease: Lease, key: str) -> int:
        """Create the key; its create revision. What an unanswered request did, the key itself tells."""
        try:
            result = await self._etcd.txn([absent(key)], [Put(key, encode(self.record), lease.id)])
            if result.succeeded:
                return result.revision
        except OutcomeUnknown:
            log.debug("candidacy not confirmed, reads it again key=%s", key)
        except LeaseLost as error:
            lease.lose(str(error.fields["cause"]))
            raise
        if (mine := await self._etcd.get(key)) is None:
            raise OutcomeUnknown(operation="standing for election", cause="the key is not there")
        return mine.create_revision

    def _still_there(self, key: str, created: int) -> bool:
        """Whether the key made at `created` exists as far as is known: not seen yet counts as yes."""
        seen = self._view.items.get(key)
        if seen is not None:
            return seen.create_revision <= created
        return self._view.revision < created

    def _follow(self, key: str, created: int) -> None:
        """Lead if the key is the first in line."""
        leads = self._standings.first_key == key and self._view.revision >= created
        won, self._won = self._won, created if leads else None
        if won is None and leads:
            if self._recording is not None:
                self._recording.cancel()
            self._recording = asyncio.create_task(self._record_term(created), name=f"record-term-{created}")
        self._tell()

    async def _wake_or_lapse(self, lease: Lease) -> None:
        """Sleep until something changes; while leading, also until the lease would lapse, or holds again."""
        if self._won is None:
            await self._wake.wait()
            return
        left_s = lease.valid_until_s - self._clock.monotonic()
        waking = asyncio.create_task(self._wake.wait())
        lapse = asyncio.create_task(self._clock.sleep(left_s if left_s > 0 else lease.times.attempt_s))
        try:
            await asyncio.wait({waking, lapse}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
            lapse.cancel()

    async def _wake_when_lost(self, lease: Lease) -> None:
        await lease.lost.wait()
        self._wake.set()

    async def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            await lease.close()

    async def _watch(self) -> None:
        async with aclosing(watch_prefix(self._etcd, self._table.prefix, self._clock)) as views:
            async for view in views:
                self._view, self._standings = view, self._table.read(view.items.values())
                self._tell()
                self._wake.set()

    async def _pause(self, failures: int) -> None:
        if failures and not self._resigned:
            longest_s = min(_PAUSE_S * 2.0 ** min(failures, 10), _PAUSE_MAX_S)
            await self._clock.sleep(self._rng.uniform(longest_s / 2, longest_s))

    def _failed(self, error: MooncakeError) -> None:
        if self.problem != str(error):
            level = logging.INFO if isinstance(error, LeaseLost) else logging.WARNING
            log.log(level, "does not stand for election, goes on trying cause=%s", error)
        self.problem = str(error)

    def _tell(self) -> None:
        """Tell those who listen, if the standing has changed since they were told."""
        now, before = self.standing, self._told
        if now == before:
            return
        self._told = now
        if before.term is not None and now.term != before.term:
            log.info("leads no longer term=%d", before.term)
        if now.term is not None and now.term != before.term:
            log.info("leads term=%d", now.term)
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in list(self._callbacks):
            callback(now)

    # --- history ---------------------------------------------------------------------------------------

    async def _record_term(self, term: int) -> None:
        """Write the term into the history and keep that short. A line is not worth more than a few tries."""
        wall_s = self._clock.wall()
        line = TermRecord(term=term, candidate_id=self.record.candidate_id, elected_at_s=wall_s)
        for attempt in range(1, 4):
            try:
                await self.fenced([Put(keys.history_key(self._prefix, term), encode(line))])
                listing = await self._etcd.range(keys.history_prefix(self._prefix))
                if old := listing.items[:-HISTORY_TERMS_MAX]:
                    await self.fenced([Delete(kv.key) for kv in old])
                return
            except MooncakeError as error:
                log.info("term not recorded term=%d cause=%s", term, error)
                await self._pause(attempt)
