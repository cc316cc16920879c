"""Records that cross module borders or live in etcd. All immutable; units are in the names."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where on a node a block lies."""

    GPU = "gpu"
    DRAM = "dram"
    SSD = "ssd"


class Role(StrEnum):
    """What an engine instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class NodePhase(StrEnum):
    """What a node says of itself in its record."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One `mooncaked`, at `<prefix>/nodes/<node_id>` under the node's lease."""

    node_id: str
    phase: NodePhase
    host: str
    pid: int
    version: str
    peer_address: str  # "host:port" of the TCP listener for peers and conductors, after binding
    http_address: str  # "host:port" of /healthz, /readyz, /metrics, /v1/status
    client_socket: str  # path of the unix socket for engines on the node
    capacity_bytes: dict[str, int]  # by tier name
    labels: dict[str, str] = {}  # e.g. zone, rack
    started_at_s: float  # Unix time
    epoch: int  # random at each start: tells a conductor that a node began anew


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One engine instance, at `<prefix>/instances/<instance_id>`, under the engine's own lease, or without
    a lease when an operator added it (`mooncakectl instance add`)."""

    instance_id: str
    url: str  # base of its OpenAI API, "http://host:port"
    role: Role
    model: str  # the name that requests use
    engine: str  # "reference", "vllm", ...
    node_id: str | None  # the node whose daemon holds its KV; None: it has no store
    namespace: str  # namespace of its blocks; equal for engines that can use each other's KV
    hash_name: str  # how keys are made from tokens, see mooncaked.keys
    block_tokens: int
    kv_bytes_per_token: int
    context_tokens: int  # longest prompt plus answer
    kv_capacity_tokens: int  # KV room for running requests
    batch_max: int
    pid: int
    started_at_s: float
    static: bool = False  # added by an operator, has no lease


class CandidateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One conductor that stands for election; the one whose key was created first leads, and that
    create revision is its term."""

    candidate_id: str  # the node id, or a name of its own for a conductor without a node
    gateway_url: str  # base of its OpenAI and scheduling API
    host: str
    pid: int
    version: str
    started_at_s: float


class TermRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the leader history, at `<prefix>/history/<term>`."""

    term: int
    candidate_id: str
    elected_at_s: float


class BlockEvent(msgspec.Struct, frozen=True, array_like=True):
    """A block became readable on a node, or ceased to be."""

    stored: bool
    namespace: str
    key: bytes
    parent: bytes | None
    size: int  # bytes
    tier: Tier


class GpuHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How another process of this node reaches the memory of a GPU pool; see `mooncaked.client.gpu`."""

    device: str  # "GPU-<uuid>" as nvidia-smi writes it, or "cpu" for the stand-in
    size: int  # bytes of the pool
    offset: int  # bytes between the start of what `token` names and the pool
    token: bytes  # a CUDA IPC handle; for "cpu" the path of the shared memory
