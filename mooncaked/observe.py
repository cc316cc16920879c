"""What a node says of itself: whether it is ready, a line for systemd, /v1/status, and its metrics."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version

import msgspec

from mooncaked.child import ChildState, ConductorChild
from mooncaked.clock import Clock
from mooncaked.cluster.registry import Registration
from mooncaked.cluster.view import ClusterView
from mooncaked.errors import Unhealthy
from mooncaked.gpu.readings import readings as gpu_readings
from mooncaked.lifecycle import Heart
from mooncaked.metrics import Reading
from mooncaked.store import Store
from mooncaked.tiers import Opening, Tiers, TiersStatus, disk_problems, tiers_status
from mooncaked.tiers import readings as tiers_readings
from mooncaked.tiers.gpus import Gpus, GpusStatus
from mooncaked.types import NodePhase, NodeRecord, Tier
from mooncaked.units import format_size


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What of a node stays as it is while it runs."""

    node_id: str
    epoch: int  # random at each start
    started_at_s: float  # Unix time
    client_socket: str
    capacity_bytes: int
    ssd_bytes: int = 0  # that blocks may have on disks
    gpu_bytes: int = 0  # in the memory of GPUs


class NodeState:
    """What of a node changes while it runs; on the event loop."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.phase = NodePhase.STARTING
        self.labels = labels
        self.peer_address = ""  # "host:port" as others reach it, once it is bound
        self.http_address = ""
        self.prefaulted_bytes = 0  # written by the thread that takes the pool's memory
        self.capacity_bytes: int | None = None  # of the pool; None: as it began


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a node that there is something to say of."""

    clock: Clock
    identity: Identity
    state: NodeState
    store: Store
    registration: Registration
    view: ClusterView
    heart: Heart
    child: ConductorChild | None
    tiers: Tiers
    opening: Opening
    gpus: Gpus


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another node, as this one sees the cluster."""

    node_id: str
    phase: NodePhase
    peer_address: str


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/status."""

    schema: str = "mooncake.node-status/1"
    node: NodeRecord
    not_ready: list[str]  # reasons; empty: it is ready
    uptime_s: float
    pool: dict[str, float]  # see mooncaked.storestats
    tiers: TiersStatus
    gpus: GpusStatus
    etcd_connected: bool
    etcd_problem: str
    registered: bool
    lease_left_s: float
    leader: str  # candidate id; empty: none is known
    term: int | None
    peers: list[Peer]
    conductor: ChildState | None  # None: this node runs none
    loop_lag_s: float
    loop_lag_max_s: float


def node_record(identity: Identity, state: NodeState) -> NodeRecord:
    """The node's record in etcd, as of now."""
    return NodeRecord(
        node_id=identity.node_id,
        phase=state.phase,
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version("mooncaked"),
        peer_address=state.peer_address,
        http_address=state.http_address,
        client_socket=identity.client_socket,
        capacity_bytes=_capacities(identity, state),
        labels=state.labels,
        started_at_s=identity.started_at_s,
        epoch=identity.epoch,
    )


def _capacities(identity: Identity, state: NodeState) -> dict[str, int]:
    capacities = {Tier.DRAM.value: state.capacity_bytes or identity.capacity_bytes}
    others = {Tier.SSD.value: identity.ssd_bytes, Tier.GPU.value: identity.gpu_bytes}
    return capacities | {tier: size for tier, size in others.items() if size}


def not_ready(parts: Parts) -> list[str]:
    """Why new work should not come here; empty when it should."""
    reasons = []
    if parts.state.phase is NodePhase.STARTING:
        progress = [f"{_progress(parts)} of the pool's memory is taken", parts.opening.progress()]
        reasons.append(f"starting: {', '.join(filter(None, progress))}")
    if parts.state.phase is NodePhase.DRAINING:
        reasons.append("draining")
    if not parts.registration.registered:
        cause = parts.registration.problem or "the lease is not renewed"
        reasons.append(f"not registered in etcd: {cause}")
    if parts.heart.trouble:
        reasons.append(f"not working: {parts.heart.trouble}")
    return reasons


def _progress(parts: Parts) -> str:
    return f"{100 * parts.state.prefaulted_bytes // parts.identity.capacity_bytes} %"


def status_line(parts: Parts) -> str:
    """One line for people who look at `systemctl status`."""
    stats = parts.store.stats()
    used = f"{format_size(stats.used_bytes >> 20 << 20)} of {format_size(stats.capacity_bytes)}"
    line = f"{parts.state.phase}; {stats.blocks} blocks, {used} in use"
    reasons = [reason for reason in not_ready(parts) if reason != parts.state.phase]
    child = parts.child.state() if parts.child else None
    if child is not None and child.pid is None and child.last_exit is not None:
        reasons.append(f"the conductor ended with code {child.last_exit} and is started again")
    return "; ".join([line, *reasons, *disk_problems(parts.tiers.devices())])


def status(parts: Parts) -> NodeStatus:
    """Everything, for /v1/status."""
    view, leader = parts.view, parts.view.leader
    return NodeStatus(
        node=node_record(parts.identity, parts.state),
        not_ready=not_ready(parts),
        uptime_s=parts.clock.wall() - parts.identity.started_at_s,
        pool=msgspec.structs.asdict(parts.store.stats()),
        tiers=tiers_status(parts.tiers),
        gpus=parts.gpus.status(),
        etcd_connected=view.connected,
        etcd_problem=view.problem,
        registered=parts.registration.registered,
        lease_left_s=parts.registration.lease_left_s,
        leader=leader.record.candidate_id if leader else "",
        term=leader.term if leader else None,
        peers=[
            Peer(node_id=node.node_id, phase=node.phase, peer_address=node.peer_address)
            for node in view.nodes.values()
            if node.node_id != parts.identity.node_id
        ],
        conductor=parts.child.state() if parts.child else None,
        loop_lag_s=parts.heart.lag_s,
        loop_lag_max_s=parts.heart.lag_max_s,
    )


def check_store(store: Store) -> None:
    """For the beat: raises `Unhealthy` unless the store's lock can be had and its sums make sense."""
    stats = store.stats()
    if not 0 <= stats.used_bytes <= stats.capacity_bytes:
        cause = f"{stats.used_bytes} of {stats.capacity_bytes} bytes are in use"
        raise Unhealthy(what="the store", cause=cause)


def readings(parts: Parts) -> list[Reading]:
    """The node's metrics that are read at each scrape."""
    return [
        *_pool_readings(parts.store),
        *tiers_readings(parts.tiers),
        *(gpu_readings(parts.gpus.stats) if parts.gpus.capacity_bytes else []),
        *_cluster_readings(parts),
        *_process_readings(parts),
    ]


def _pool_readings(store: Store) -> list[Reading]:
    stats = store.stats

    def gauge(name: str, doc: str, field: str) -> Reading:
        return Reading(f"mooncaked_pool_{name}", "gauge", doc, lambda: getattr(stats(), field))

    def counter(name: str, doc: str, fields: dict[str, str]) -> Reading:
        def read() -> dict[str, float]:
            now = stats()
            return {value: getattr(now, field) for value, field in fields.items()}

        return Reading(f"mooncaked_{name}", "counter", doc, read, "result")

    puts = {
        "stored": "stored",
        "aborted": "aborted",
        "full": "refused_full",
        "too_large": "refused_too_large",
    }
    return [
        gauge("capacity_bytes", "Size of the pool.", "capacity_bytes"),
        gauge("used_bytes", "Bytes of the pool in use, rounded up to its grain.", "used_bytes"),
        gauge("largest_free_bytes", "The largest value that fits without eviction.", "largest_free_bytes"),
        gauge("pinned_bytes", "Bytes of blocks that are being read.", "pinned_bytes"),
        gauge("filling_bytes", "Bytes of blocks that are being written.", "filling_bytes"),
        gauge("blocks", "Readable blocks.", "blocks"),
        gauge("pinned_blocks", "Blocks that are being read.", "pinned"),
        gauge("filling_blocks", "Blocks that are being written.", "filling"),
        gauge("owners", "Connections and fetches that may hold blocks.", "owners"),
        counter("reads", "Keys asked for, by whether they were here.", {"hit": "hits", "miss": "misses"}),
        counter("puts", "Values brought, by what came of it.", puts),
        Reading("mooncaked_stored_bytes", "counter", "Bytes stored.", lambda: stats().stored_bytes),
        Reading("mooncaked_evicted_blocks", "counter", "Blocks evicted.", lambda: stats().evicted),
        Reading("mooncaked_evicted_bytes", "counter", "Bytes evicted.", lambda: stats().evicted_bytes),
        Reading(
            "mooncaked_evicted_idle_seconds",
            "counter",
            "Sum of the time since their last use, of evicted blocks.",
            lambda: stats().evicted_idle_s,
        ),
        Reading("mooncaked_removed_blocks", "counter", "Blocks removed on request.", lambda: stats().removed),
        gauge("unverified_blocks", "Blocks from before a restart, not compared yet.", "unverified"),
        Reading("mooncaked_restored_blocks", "counter", "Blocks taken over.", lambda: stats().restored),
        Reading(
            "mooncaked_damaged_blocks",
            "counter",
            "Blocks that did not agree with their checksum, and are misses since.",
            lambda: stats().damaged,
        ),
    ]


def _cluster_readings(parts: Parts) -> list[Reading]:
    view, registration = parts.view, parts.registration
    return [
        Reading(
            "mooncaked_etcd_connected",
            "gauge",
            "1: the view of the cluster is current.",
            lambda: float(view.connected),
        ),
        Reading(
            "mooncaked_etcd_view_stale_seconds",
            "gauge",
            "For how long the view of the cluster has not been current.",
            lambda: parts.clock.monotonic() - view.stale_since if view.stale_since is not None else 0.0,
        ),
        Reading(
            "mooncaked_registered",
            "gauge",
            "1: the node's record is in etcd, under a lease that holds.",
            lambda: float(registration.registered),
        ),
        Reading(
            "mooncaked_lease_left_seconds",
            "gauge",
            "For how long the node's lease holds if no keepalive succeeds any more.",
            lambda: registration.lease_left_s,
        ),
        Reading("mooncaked_cluster_nodes", "gauge", "Nodes registered.", lambda: len(view.nodes)),
        Reading("mooncaked_cluster_instances", "gauge", "Instances registered.", lambda: len(view.instances)),
    ]


def _process_readings(parts: Parts) -> list[Reading]:
    heart, child = parts.heart, parts.child
    result = [
        Reading("mooncaked_ready", "gauge", "1: the node is ready.", lambda: float(not not_ready(parts))),
        Reading("mooncaked_loop_lag_seconds", "gauge", "How late the loop ran last.", lambda: heart.lag_s),
        Reading(
            "mooncaked_loop_lag_max_seconds",
            "gauge",
            "How late the loop ran at most since the start.",
            lambda: heart.lag_max_s,
        ),
        Reading(
            "mooncaked_beat_age_seconds",
            "gauge",
            "Time since the last beat that succeeded.",
            lambda: parts.clock.monotonic() - heart.beaten_at_s,
        ),
    ]
    if child is not None:
        result += [
            Reading(
                "mooncaked_conductor_running",
                "gauge",
                "1: the conductor process runs.",
                lambda: float(child.state().pid is not None),
            ),
            Reading(
                "mooncaked_conductor_starts",
                "counter",
                "Times the conductor process was started.",
                lambda: child.state().starts,
            ),
        ]
    return result
