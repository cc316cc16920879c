"""Feeds the index: one subscription to every node, a snapshot first and numbered deltas after it.

A node whose connection breaks, or that says nothing for `SILENCE_S`, takes its blocks out of the index at
that moment: what a dead node holds is a miss. They are only hidden for `KEEP_S`, so that a node that comes
back with the same epoch goes on where it was. A gap in the numbers asks for a new snapshot, which replaces
the old one when it is complete."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

import msgspec

from mooncaked.api.protocol import Delta, Kind, Snapshot, Subscribe, SubscribeReply
from mooncaked.clock import Clock
from mooncaked.conductor.index import PrefixIndex
from mooncaked.conductor.link import Link, Stream
from mooncaked.errors import MooncakeError
from mooncaked.types import NodeRecord

log = logging.getLogger(__name__)

KEEP_S = 30.0  # how long the blocks of a broken subscription can be taken up again
_PAUSE_S = 0.1  # before another attempt; doubles with each failure, up to
_PAUSE_MAX_S = 3.0
_SWEEP_KEYS = 20_000
_SWEEP_EVERY_S = 0.2
_SWEEP_PAUSE_S = 0.005  # between two steps of one sweep: decisions come first


class SubscriptionState(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription as operators see it."""

    node_id: str
    state: str  # "connecting" | "snapshot" | "live" | "away"
    copies: int  # blocks that the node has named
    sequence: int  # of the last event
    snapshots: int  # how many came in full
    problem: str  # why it is away; "" when it is not


class _Gap(Exception):
    """A delta does not follow the one before it."""


class Subscriber:
    """Call `update` with the nodes of the cluster whenever they change, and `run` it all the time.

    `on_away` is called with the ids of the nodes that do not answer, each time that set changes."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        token: str | None,
        clock: Clock,
        rng: random.Random,
        on_away: Callable[[frozenset[str]], None],
    ) -> None:
        self._index = index
        self._clock = clock
        self._rng = rng
        self._on_away = on_away
        self._link = Link(token, "a subscription")
        self._subscriptions: dict[str, _Subscription] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._away: frozenset[str] = frozenset()

    def update(self, nodes: Mapping[str, NodeRecord]) -> None:
        """These nodes exist now. One that vanished leaves the index; one that began anew is asked at once."""
        for node_id in self._subscriptions.keys() - nodes.keys():
            self._end(node_id)
        for node_id, record in nodes.items():
            known = self._subscriptions.get(node_id)
            if known is None:
                self._begin(record)
            else:
                known.renew(record)
        self._tell_away()

    async def run(self) -> None:
        """Follow the nodes until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for node_id in self._subscriptions:
                self._start(node_id)
            while True:
                more = self._index.sweep(_SWEEP_KEYS)
                await self._clock.sleep(_SWEEP_PAUSE_S if more else _SWEEP_EVERY_S)

    def states(self) -> list[SubscriptionState]:
        """Every subscription, by node."""
        return [self._subscriptions[node_id].describe() for node_id in sorted(self._subscriptions)]

    def settled(self) -> bool:
        """Whether each node has given its snapshot, or is known to be away."""
        return all(s.state in ("live", "away") for s in self._subscriptions.values())

    def _begin(self, record: NodeRecord) -> None:
        subscription = _Subscription(record, self._index, self._link, self._clock, self._rng, self._tell_away)
        self._subscriptions[record.node_id] = subscription
        self._start(record.node_id)

    def _start(self, node_id: str) -> None:
        if self._group is not None and node_id not in self._tasks:
            task = self._group.create_task(self._subscriptions[node_id].run(), name=f"subscribe-{node_id}")
            self._tasks[node_id] = task

    def _end(self, node_id: str) -> None:
        self._subscriptions.pop(node_id).drop()
        if task := self._tasks.pop(node_id, None):
            task.cancel()

    def _tell_away(self) -> None:
        away = frozenset(key for key, s in self._subscriptions.items() if s.state == "away")
        if away != self._away:
            self._away = away
            self._on_away(away)


class _Subscription:
    """One node: connects, follows, tries again, for ever."""

    def __init__(
        self,
        record: NodeRecord,
        index: PrefixIndex,
        link: Link,
        clock: Clock,
        rng: random.Random,
        changed: Callable[[], None],
    ) -> None:
        self.record = record
        self.state = "connecting"
        self.problem = ""
        self.snapshots = 0
        self._index, self._link, self._clock, self._rng = index, link, clock, rng
        self._changed = changed
        self._source: int | None = None  # what lookups see of the node, or saw before it broke
        self._epoch: int | None = None  # of `_source`
        self._sequence = 0
        self._hidden_at_s: float | None = None
        self._renewed = asyncio.Event()

    def describe(self) -> SubscriptionState:
        """What operators see."""
        return SubscriptionState(
            node_id=self.record.node_id,
            state=self.state,
            copies=0 if self._source is None else self._index.copies(self._source),
            sequence=self._sequence,
            snapshots=self.snapshots,
            problem=self.problem,
        )

    def renew(self, record: NodeRecord) -> None:
        """The node's record in etcd, again. A new start or address is tried without waiting."""
        before, self.record = self.record, record
        if (before.epoch, before.peer_address) != (record.epoch, record.peer_address):
            self._renewed.set()

    def drop(self) -> None:
        """The node is gone for good."""
        if self._source is not None:
            self._index.retire(self._source)
            self._source = None

    async def run(self) -> None:
        """Follow the node until cancelled."""
        failures = 0
        while True:
            snapshots, sequence = self.snapshots, self._sequence
            try:
                await self._follow()
            except _Gap:
                log.info("deltas have a gap, asking for a snapshot node=%s", self.record.node_id)
                self._epoch, failures = None, 1  # its blocks stay visible until the new snapshot is there
            except MooncakeError as error:
                moved = (snapshots, sequence) != (self.snapshots, self._sequence)
                failures = 1 if moved else failures + 1
                self._broken(error)
            await self._pause(failures)

    async def _follow(self) -> None:
        async with self._link.open(self.record) as stream:
            resume = Subscribe(epoch=self._epoch, sequence=self._sequence)
            reply = await stream.ask(Kind.SUBSCRIBE, resume, SubscribeReply)
            if reply.resumed and self._source is not None:
                self._live(self._source)
            else:
                await self._snapshot(stream, reply.epoch)
            while True:
                head, data = await stream.next()
                self._delta(stream.event(head, data, Kind.DELTA, Delta))

    async def _snapshot(self, stream: Stream, epoch: int) -> None:
        """Read a snapshot into a new source, which replaces the old one when all of it is there."""
        self.state = "snapshot"
        source = self._index.begin(self.record.node_id)
        try:
            last = False
            while not last:
                head, data = await stream.next()
                frame = stream.event(head, data, Kind.SNAPSHOT, Snapshot)
                self._index.apply(source, frame.blocks)
                last, self._sequence = frame.last, frame.sequence
        except BaseException:  # whatever ended it, cancellation too: half a snapshot must not stay
            self._index.retire(source)
            raise
        self._epoch = epoch
        self.snapshots += 1
        self._live(source)  # retires the source before it
        log.info("snapshot read node=%s blocks=%d", self.record.node_id, self._index.copies(source))

    def _delta(self, delta: Delta) -> None:
        if not delta.events:
            return
        if delta.sequence != self._sequence + 1:
            raise _Gap
        if self._source is not None:
            self._index.apply(self._source, delta.events)
        self._sequence += len(delta.events)

    def _live(self, source: int) -> None:
        self._index.publish(source)
        self._source, self._hidden_at_s = source, None
        self.state, self.problem = "live", ""
        self._changed()

    def _broken(self, error: MooncakeError) -> None:
        now_s = self._clock.monotonic()
        if self._source is not None and self._hidden_at_s is None:
            self._index.hide(self._source)
            self._hidden_at_s = now_s
        if self._hidden_at_s is not None and now_s - self._hidden_at_s > KEEP_S:
            self.drop()
            self._epoch = self._hidden_at_s = None
        if str(error) != self.problem:
            log.warning(
                "node does not answer, its blocks count as gone node=%s cause=%s", self.record.node_id, error
            )
        self.state, self.problem = "away", str(error)
        self._changed()

    async def _pause(self, failures: int) -> None:
        longest_s = min(_PAUSE_S * 2.0 ** min(failures, 10), _PAUSE_MAX_S)
        try:
            async with asyncio.timeout(self._rng.uniform(longest_s / 2, longest_s)):
                await self._renewed.wait()
        except TimeoutError:
            return
        self._renewed.clear()
