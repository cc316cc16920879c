"""The cluster as one process sees it: live tables of nodes, instances and the leader, fed by watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from mooncaked.clock import Clock, SystemClock
from mooncaked.cluster import keys
from mooncaked.cluster.kv import Etcd
from mooncaked.cluster.records import Decoded, ElectionTable, Leader
from mooncaked.cluster.watch import View, watch_prefix
from mooncaked.errors import DeadlineExceeded
from mooncaked.types import CandidateRecord, InstanceRecord, NodeRecord

log = logging.getLogger(__name__)


class ClusterView:
    """What is registered in the cluster, kept current by `run`. While etcd is away the last view stays, and
    `stale_since` says since when. The dicts are replaced, never changed, so whoever holds one may iterate."""

    def __init__(self, etcd: Etcd, prefix: str, *, clock: Clock | None = None) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.instances: dict[str, InstanceRecord] = {}
        self.candidates: list[CandidateRecord] = []  # the leader first
        self.leader: Leader | None = None
        self.stale_since: float | None = None  # monotonic; None: current, or never yet complete
        self._etcd = etcd
        self._clock = clock or SystemClock()
        self._election_table = ElectionTable(prefix)
        nodes, instances = keys.nodes_prefix(prefix), keys.instances_prefix(prefix)
        election = self._election_table.prefix
        self._views = {nodes: View(), instances: View(), election: View()}
        self._node_records = Decoded(NodeRecord, nodes)
        self._instance_records = Decoded(InstanceRecord, instances)
        self._apply = {nodes: self._nodes, instances: self._instances, election: self._election}
        self._callbacks: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether everything has been read at least once."""
        return all(view.complete for view in self._views.values())

    @property
    def connected(self) -> bool:
        """Whether the view is current as far as this process can tell."""
        return all(view.complete and view.connected for view in self._views.values())

    @property
    def problem(self) -> str:
        """Why it is not connected; "" when it is."""
        causes = (view.cause or "not yet read" for view in self._views.values() if not view.connected)
        return next(causes, "")

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each change, on the event loop of `run`. Returns what undoes that."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def run(self) -> None:
        """Follow etcd until cancelled; failures only make the view stale."""
        async with asyncio.TaskGroup() as group:
            for prefix in self._views:
                group.create_task(self._follow(prefix), name=f"view-{prefix}")

    async def wait_for(self, predicate: Callable[[ClusterView], bool], timeout_s: float) -> None:
        """Wait until `predicate(self)` holds; raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self):
                    await self._changed.wait()
        except TimeoutError:
            operation = f"waiting for a state of the cluster ({self.problem or 'etcd is reachable'})"
            raise DeadlineExceeded(operation=operation, limit_ms=round(timeout_s * 1000)) from None

    async def _follow(self, prefix: str) -> None:
        async with aclosing(watch_prefix(self._etcd, prefix, self._clock)) as views:
            async for view in views:
                self._views[prefix] = view
                self._apply[prefix](view)
                self._note_staleness()
                self._tell()

    def _nodes(self, view: View) -> None:
        self.nodes = self._node_records.records(view.items)

    def _instances(self, view: View) -> None:
        self.instances = self._instance_records.records(view.items)

    def _election(self, view: View) -> None:
        standings = self._election_table.read(view.items.values())
        self.leader, self.candidates = standings.leader, standings.candidates

    def _note_staleness(self) -> None:
        if self.connected:
            if self.stale_since is not None:
                log.info("view of the cluster is current again")
            self.stale_since = None
        elif self.complete and self.stale_since is None:
            self.stale_since = self._clock.monotonic()
            log.warning("etcd cannot be reached, the last view of the cluster stays cause=%s", self.problem)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # those who wait now wait for the next change
        for callback in list(self._callbacks):
            callback()
