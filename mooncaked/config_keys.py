"""Every key of the configuration: its meaning, unit, default, and whether it applies live.

`etc/mooncaked.toml`, `--print-config` and docs/configuration.md are made from these structs. How they are
loaded and checked is in `mooncaked.config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from mooncaked.settings import Key, Section

REGIONS_MAX = 128  # of a pool: clients get a descriptor for each, and systemd keeps one for each
POLICIES = ("algorithm1", "random", "round-robin", "least-load", "prefix-only")
ADMISSIONS = ("off", "baseline", "early", "predicted")
SSD_ADMISSIONS = ("reused", "all")
EVICTIONS = ("prefix-aware", "lru", "lfu", "length-aware", "s3fifo", "sieve")


class NodeConfig(Section, frozen=True, kw_only=True):
    """Who this node is."""

    id: Annotated[
        str, Key(kind="text", doc="Name of the node. Empty: made once and kept in state_dir/node-id.")
    ] = ""
    state_dir: Annotated[Path, Key(kind="path", doc="Where the node keeps what must survive a restart.")] = (
        Path("/var/lib/mooncaked")
    )
    labels: Annotated[
        dict[str, str],
        Key(
            kind="table",
            live=True,
            doc='Free labels for placement, for example { zone = "a", rack = "r12" }.',
        ),
    ] = msgspec.field(default_factory=dict)
    advertise_host: Annotated[
        str, Key(kind="text", doc="Host name or address that other nodes reach this one by. Empty: guessed.")
    ] = ""
    drain_timeout: Annotated[
        float,
        Key(
            kind="duration",
            live=True,
            low=0,
            high=3600,
            doc="How long SIGTERM waits for readers and transfers that are under way, before it ends them.",
        ),
    ] = 5.0


class ListenConfig(Section, frozen=True, kw_only=True):
    """Where the node listens."""

    client_socket: Annotated[Path, Key(kind="path", doc="Unix socket for the engines on this node.")] = Path(
        "/run/mooncaked/client.sock"
    )
    peer: Annotated[
        str, Key(kind="text", doc="host:port for other nodes and conductors. Port 0: any free one.")
    ] = "0.0.0.0:7801"
    http: Annotated[
        str, Key(kind="text", doc="host:port of /livez, /readyz, /healthz, /metrics and /v1/status.")
    ] = "127.0.0.1:7802"
    token_file: Annotated[
        Path | None,
        Key(
            kind="path",
            doc="File with the secret that peers and clients must show, one for the cluster. Empty: none.",
        ),
    ] = None


class DramConfig(Section, frozen=True, kw_only=True):
    """The pool of host memory that blocks live in."""

    size: Annotated[
        int,
        Key(
            kind="size",
            low=1 << 20,
            doc="Memory of the pool, taken and touched at start. Units: B KiB MiB GiB TiB.",
        ),
    ] = 4 << 30
    high_watermark: Annotated[
        float,
        Key(
            kind="number",
            live=True,
            low=0.01,
            high=1,
            doc="Share of the pool in use at which eviction starts.",
        ),
    ] = 0.95
    low_watermark: Annotated[
        float,
        Key(
            kind="number",
            live=True,
            low=0.01,
            high=1,
            doc="Share of the pool in use at which eviction stops.",
        ),
    ] = 0.90
    prefault_threads: Annotated[
        int, Key(kind="count", low=1, high=256, doc="Threads that touch the pool's pages at start.")
    ] = 4
    huge_pages: Annotated[
        str,
        Key(
            kind="text",
            choices=("off", "transparent", "2MiB", "1GiB"),
            doc="Pages of the pool. 2MiB and 1GiB are to be reserved beforehand (vm.nr_hugepages); where too "
            "few are, it is transparent, where the kernel does so for shared memory.",
        ),
    ] = "transparent"
    numa: Annotated[
        str,
        Key(
            kind="text",
            doc='NUMA nodes that the memory comes from, "0" or "0-1", in turn where there are several. '
            "Empty: as the kernel likes.",
        ),
    ] = ""
    region_size: Annotated[
        int,
        Key(
            kind="size",
            low=1 << 20,
            doc="Largest piece of the pool (more where there would be over 128). A value fits into one; a "
            "pool that shrinks gives up whole ones.",
        ),
    ] = 16 << 30
    warm_restart: Annotated[
        str,
        Key(
            kind="text",
            choices=("auto", "shm", "off"),
            doc="What keeps the pool while the daemon starts again. auto: systemd where it does so, else "
            "files in shm_dir; shm: files; off: nothing.",
        ),
    ] = "auto"
    shm_dir: Annotated[
        Path,
        Key(kind="path", doc="Where a pool is kept without systemd: memory, in a directory for each node."),
    ] = Path("/dev/shm")
    eviction: Annotated[
        str,
        Key(kind="text", choices=EVICTIONS, doc="What is evicted first; all go leaf before root."),
    ] = "prefix-aware"
    clients: Annotated[
        str,
        Key(
            kind="text",
            choices=("read-write", "read-only"),
            doc="How engines on the node map the pool. read-only: writes go through the socket, and no "
            "engine can damage what another one stored.",
        ),
    ] = "read-write"
    index_entries: Annotated[
        int,
        Key(
            kind="count",
            low=0,
            high=1 << 28,
            doc="Entries of the index that engines on the node read directly, 64 bytes each. 0: by the "
            "pool's size.",
        ),
    ] = 0


class SsdConfig(Section, frozen=True, kw_only=True):
    """Disks that keep blocks for which the pool of host memory has no room."""

    devices: Annotated[
        dict[str, str],
        Key(
            kind="table",
            doc="A directory on each disk, and the size that the node may use there, for example "
            '{ "/mnt/nvme0" = "1TiB" }. Empty: no disks.',
        ),
    ] = msgspec.field(default_factory=dict)
    segment_size: Annotated[
        int,
        Key(
            kind="size",
            low=64 << 10,
            high=2 << 30,
            doc="Size of the files on a disk, whole pages of 4 KiB. No value is larger; a disk takes four at "
            "least, and gives up blocks by whole files.",
        ),
    ] = 256 << 20
    admission: Annotated[
        str,
        Key(
            kind="text",
            choices=SSD_ADMISSIONS,
            doc="What is written when it has to leave memory: reused (what was read again, or had to leave "
            "lately and came again), or all.",
        ),
    ] = "reused"
    write_bandwidth: Annotated[
        int,
        Key(
            kind="size",
            live=True,
            low=0,
            doc="Bytes that may be written to all disks together in a second. 0B: no limit.",
        ),
    ] = 0


class NamespacesConfig(Section, frozen=True, kw_only=True):
    """Limits for single namespaces (tenant and model)."""

    quotas: Annotated[
        dict[str, str],
        Key(
            kind="table",
            live=True,
            doc="Largest size in the pool of host memory, by namespace, for example "
            '{ "tenant/model" = "10GiB" }. At its quota a namespace makes room among its own blocks.',
        ),
    ] = msgspec.field(default_factory=dict)
    ttls: Annotated[
        dict[str, str],
        Key(
            kind="table",
            live=True,
            doc="How long blocks stay where their writer does not say, by namespace, for example "
            '{ "tenant/model" = "1h" }.',
        ),
    ] = msgspec.field(default_factory=dict)


class EtcdConfig(Section, frozen=True, kw_only=True):
    """The etcd cluster that nodes, instances and the leader are recorded in."""

    endpoints: Annotated[
        list[str],
        Key(
            kind="texts",
            doc="Members of the etcd cluster, each host:port. TLS with ca_file or https://host:port.",
        ),
    ] = msgspec.field(default_factory=lambda: ["127.0.0.1:2379"])
    prefix: Annotated[
        str, Key(kind="text", doc="Where in etcd this cluster lives. Two clusters need two prefixes.")
    ] = "/mooncake"
    ca_file: Annotated[
        Path | None, Key(kind="path", doc="CA certificate (PEM) that etcd's certificate is checked against.")
    ] = None
    cert_file: Annotated[
        Path | None, Key(kind="path", doc="Client certificate (PEM) shown to etcd. Needs key_file.")
    ] = None
    key_file: Annotated[Path | None, Key(kind="path", doc="Private key (PEM) of cert_file.")] = None
    user: Annotated[str, Key(kind="text", doc="etcd user. Needs password_file. Empty: no log-in.")] = ""
    password_file: Annotated[Path | None, Key(kind="path", doc="File with the password of user.")] = None
    lease_ttl: Annotated[
        float,
        Key(
            kind="duration",
            low=2,
            high=3600,
            doc="How long after its last sign of life a node counts as lost. Whole seconds.",
        ),
    ] = 10.0
    request_timeout: Annotated[
        float,
        Key(
            kind="duration",
            low=0.1,
            high=60,
            doc="Limit of one request to etcd. Under 7/15 of lease_ttl: a slow grant still leaves a lease.",
        ),
    ] = 3.0


class ConductorConfig(Section, frozen=True, kw_only=True):
    """The conductor candidate of this node: scheduler and OpenAI-compatible gateway."""

    enabled: Annotated[
        bool, Key(kind="flag", doc="Run a candidate, in a process of its own, beside the node.")
    ] = True
    listen: Annotated[
        str, Key(kind="text", doc="host:port of the gateway and the scheduling API. Port 0: any free one.")
    ] = "0.0.0.0:7803"
    lease_ttl: Annotated[
        float,
        Key(
            kind="duration",
            low=2,
            high=60,
            doc="How long after its last sign of life a leader is replaced. Whole seconds.",
        ),
    ] = 2.0
    policy: Annotated[
        str, Key(kind="text", choices=POLICIES, doc="How instances are chosen for a request.")
    ] = "algorithm1"
    balancing_threshold: Annotated[
        float,
        Key(
            kind="number",
            low=1,
            doc="algorithm1: pull from a peer whose prefix is longer than the local one by this factor.",
        ),
    ] = 4.0
    admission: Annotated[
        str,
        Key(
            kind="text",
            choices=ADMISSIONS,
            doc="Refuse at arrival: off, baseline (queue limits), early (load now), predicted (load then).",
        ),
    ] = "predicted"
    slo_ttft: Annotated[
        float, Key(kind="duration", live=True, low=0.001, doc="Promise: time to the first token.")
    ] = 30.0
    slo_tbt: Annotated[
        float, Key(kind="duration", live=True, low=0.001, doc="Promise: time between two tokens.")
    ] = 0.1
    body_max: Annotated[
        int, Key(kind="size", low=1 << 10, high=1 << 30, doc="Largest request body that the gateway reads.")
    ] = 16 << 20
    request_timeout: Annotated[
        float, Key(kind="duration", low=1, doc="Limit of one request, from arrival to its last token.")
    ] = 600.0
    index_blocks_max: Annotated[
        int, Key(kind="count", low=1000, doc="Blocks that the prefix index remembers; about 100 bytes each.")
    ] = 10_000_000


class LogConfig(Section, frozen=True, kw_only=True):
    """The log, on standard error."""

    level: Annotated[
        str,
        Key(
            kind="text",
            live=True,
            choices=("debug", "info", "warning", "error"),
            doc="Least serious line to log.",
        ),
    ] = "info"
    format: Annotated[
        str,
        Key(
            kind="text",
            live=True,
            choices=("text", "json"),
            doc="text (key=value) or json (one object a line).",
        ),
    ] = "text"


class GpuConfig(Section, frozen=True, kw_only=True):
    """Copies of the blocks that are read most, in GPU memory. Needs torch (the extra `gpu`)."""

    devices: Annotated[
        list[str],
        Key(
            kind="texts",
            doc='Devices that give memory, for example ["cuda:0"]; "cpu" is a stand-in for tests. '
            "Empty: none, and torch is not loaded.",
        ),
    ] = msgspec.field(default_factory=list)
    size: Annotated[
        int,
        Key(kind="size", low=1 << 20, doc="Memory that each of the devices gives. A multiple of 4 KiB."),
    ] = 1 << 30
    promote_uses: Annotated[
        int,
        Key(kind="count", low=1, doc="Reads of a block after which it gets a copy in GPU memory."),
    ] = 2
    page_lock: Annotated[
        bool,
        Key(
            kind="flag",
            doc="Page-lock the pool's host memory, so that copies between it and the GPUs need no detour.",
        ),
    ] = True
    in_flight_max: Annotated[
        int,
        Key(kind="size", low=1 << 20, doc="Bytes that are on the way into GPU memory at the same time."),
    ] = 256 << 20


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `Config()` is the defaults."""

    node: NodeConfig = NodeConfig()
    listen: ListenConfig = ListenConfig()
    dram: DramConfig = DramConfig()
    ssd: SsdConfig = SsdConfig()
    gpu: GpuConfig = GpuConfig()
    namespaces: NamespacesConfig = NamespacesConfig()
    etcd: EtcdConfig = EtcdConfig()
    conductor: ConductorConfig = ConductorConfig()
    log: LogConfig = LogConfig()
