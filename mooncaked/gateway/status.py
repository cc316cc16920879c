"""What a candidate says of itself: /v1/conductor, readiness, and the metrics that are read when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from mooncaked.clock import Clock
from mooncaked.conductor.core import Conductor
from mooncaked.conductor.cost import InstanceEstimate
from mooncaked.conductor.fleet import Site
from mooncaked.conductor.subscriber import Subscriber, SubscriptionState
from mooncaked.gateway.dispatch import LeaderView
from mooncaked.metrics import Reading
from mooncaked.types import CandidateRecord, Role


class ClusterState(LeaderView, Protocol):
    """What is asked of the cluster view."""

    stale_since: float | None

    @property
    def complete(self) -> bool: ...
    @property
    def problem(self) -> str: ...


class IndexStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix index."""

    blocks: int
    blocks_max: int
    refused: int  # blocks turned away because it was full


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as this candidate sees it: its load counts only what was decided here."""

    instance_id: str
    model: str
    role: Role
    node_id: str | None
    fit: bool  # its node is there and ready
    failed: bool  # it failed a moment ago, others are preferred
    queued: int  # prefills reserved and not done
    queued_tokens: int  # that they have to compute
    queue_ms: float  # predicted, until those are done
    running: int  # decodes reserved and running
    kv_tokens: int  # reserved
    kv_capacity_tokens: int
    estimate: InstanceEstimate


class ConductorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/conductor"""

    candidate_id: str
    leading: bool
    term: int | None  # of the leader
    leader: CandidateRecord | None
    policy: str
    admission: str
    slo_ttft_ms: float
    slo_tbt_ms: float
    etcd: str  # "connected", or why not
    etcd_stale_s: float | None  # for how long the view of the cluster has not been renewed
    index: IndexStatus
    sources: list[SubscriptionState]
    instances: list[InstanceStatus]
    reservations: int
    in_flight: int
    prediction_errors: dict[str, dict[str, float | None]]  # by model: of TTFT and TBT, 0 exact to 1


class Status:
    """Reads everything when it is asked for."""

    def __init__(
        self,
        conductor: Conductor,
        subscriber: Subscriber,
        view: ClusterState,
        term: Callable[[], int | None],
        candidate_id: str,
        in_flight: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._conductor = conductor
        self._subscriber = subscriber
        self._view = view
        self._term = term
        self._candidate_id = candidate_id
        self._in_flight = in_flight
        self._clock = clock

    def conductor(self) -> ConductorStatus:
        """The whole picture."""
        conductor, view = self._conductor, self._view
        now_ms = self._clock.monotonic() * 1000.0
        term = self._term()
        leader = view.leader
        failed = set(conductor.fleet.failed(now_ms))
        limits = conductor.settings.limits
        stale_since = view.stale_since
        return ConductorStatus(
            candidate_id=self._candidate_id,
            leading=term is not None,
            term=term if term is not None else (leader.term if leader else None),
            leader=leader.record if leader else None,
            policy=conductor.scheduler.policy.name,
            admission=conductor.settings.admission,
            slo_ttft_ms=limits.slo_ttft_ms,
            slo_tbt_ms=limits.slo_tbt_ms,
            etcd="connected" if view.connected else view.problem or "not yet read",
            etcd_stale_s=None if stale_since is None else now_ms / 1000.0 - stale_since,
            index=IndexStatus(
                blocks=conductor.index.blocks,
                blocks_max=conductor.index.blocks_max,
                refused=conductor.index.refused,
            ),
            sources=self._subscriber.states(),
            instances=[self._instance(site, failed, now_ms) for site in conductor.fleet.sites.values()],
            reservations=len(conductor.ledger),
            in_flight=self._in_flight(),
            prediction_errors={name: conductor.estimators.errors(name) for name in conductor.fleet.models()},
        )

    def _instance(self, site: Site, failed: set[str], now_ms: float) -> InstanceStatus:
        load, record = self._conductor.ledger.load(site.instance_id), site.record
        return InstanceStatus(
            instance_id=site.instance_id,
            model=record.model,
            role=record.role,
            node_id=record.node_id,
            fit=site.fit,
            failed=site.instance_id in failed,
            queued=len(load.prefill),
            queued_tokens=load.prefill_tokens,
            queue_ms=load.queue_ms(now_ms),
            running=sum(1 for entry in load.decode.values() if entry.decoding_since_ms is not None),
            kv_tokens=load.kv_tokens,
            kv_capacity_tokens=record.kv_capacity_tokens,
            estimate=site.models.estimate(),
        )

    def not_ready(self) -> list[str]:
        """Why requests should go elsewhere; empty when this gateway serves. Without etcd or a leader it goes
        on serving with what it knows, so that is no reason."""
        if not self._view.complete:
            return [f"the cluster has not been read yet: {self._view.problem or 'etcd is being asked'}"]
        if not self._subscriber.settled():
            waiting = [s.node_id for s in self._subscriber.states() if s.state not in ("live", "away")]
            return [f"the index waits for snapshots of nodes {', '.join(waiting)}"]
        return []

    def readings(self) -> list[Reading]:
        """The metrics whose values are kept elsewhere."""
        index = self._conductor.index

        def reading(
            name: str, doc: str, read: Callable[[], float | Mapping[str, float]], label: str = ""
        ) -> Reading:
            return Reading(f"mooncaked_conductor_{name}", "gauge", doc, read, label)

        return [
            reading("leader", "1 while this candidate leads.", lambda: float(self._term() is not None)),
            reading("term", "Term of the leader as known here.", lambda: float(self._known_term())),
            reading("index_blocks", "Distinct blocks in the index.", lambda: float(index.blocks)),
            Reading(
                "mooncaked_conductor_index_refused_blocks",
                "counter",
                "Blocks not remembered because the index was full.",
                lambda: float(index.refused),
            ),
            reading("sources", "Subscriptions to nodes, by state.", self._sources, "state"),
            reading(
                "instances", "Engine instances registered.", lambda: float(len(self._conductor.fleet.sites))
            ),
            reading(
                "reservations", "Requests with reservations.", lambda: float(len(self._conductor.ledger))
            ),
            reading(
                "etcd_connected", "1 while the view of etcd is current.", lambda: float(self._view.connected)
            ),
        ]

    def _known_term(self) -> int:
        leader = self._view.leader
        return self._term() or (leader.term if leader else 0)

    def _sources(self) -> dict[str, float]:
        counts = dict.fromkeys(("connecting", "snapshot", "live", "away"), 0.0)
        for state in self._subscriber.states():
            counts[state.state] += 1
        return counts
