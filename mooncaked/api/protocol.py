"""The wire: one frame format for engines (unix socket), peers and conductors (TCP).

A frame is a fixed header, a msgpack header (one struct below), then `payload_len` raw bytes that the
reader receives straight into their destination:

    magic u16 | version u8 | kind u8 | request_id u32 | header_len u32 | payload_len u64     little-endian

A reply repeats the request's kind and id with `REPLY` set in kind; an error reply has kind `ERROR`.
The first frame on a connection is `Hello`, which offers a range of versions; all later frames carry the
version that the reply chose. Each reply names the request that it answers: most come in order, but a `Pin`
that waits for a fetch lets later requests pass it.
Every length is checked against the caps here before anything is allocated for it.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TypeVar

import msgspec

from mooncaked.errors import MooncakeError, ProtocolError, VersionMismatch, from_wire
from mooncaked.types import BlockEvent, GpuHandle

MAGIC = 0x4B4D  # "MK"
VERSION_MIN = 1
VERSION_MAX = 1
REPLY = 0x80
HEADER = struct.Struct("<HBBIIQ")
HEADER_BYTES_MAX = 16 << 20  # of the msgpack header
PAYLOAD_BYTES_MAX = 1 << 30
BATCH_KEYS_MAX = 16384  # keys in one request
META_BYTES_MAX = 1024  # opaque bytes that a writer keeps beside a value, e.g. a tensor's shape and dtype
GPU_REGION = 1 << 20  # number of the first region in GPU memory; those of host memory count from 0
FETCH_BYTES_TARGET = 32 << 20  # a fetch reply stops adding blocks after this many bytes


class Kind(IntEnum):
    """What a frame is. The comment says who sends it."""

    HELLO = 1  # whoever connects
    PUT_BEGIN = 2  # engine
    PUT_COMMIT = 3  # engine
    PUT_ABORT = 4  # engine
    PIN = 5  # engine
    UNPIN = 6  # engine; one way, no reply
    EXISTS = 7  # engine, peer
    PREFIX_MATCH = 8  # engine, peer
    REMOVE = 9  # engine
    OPEN = 10  # engine
    RESERVE = 11  # engine
    PUT_STORED = 12  # engine; one way, no reply
    PUT_DATA = 13  # engine; one way, the only request with a payload
    FETCH = 20  # peer
    SUBSCRIBE = 21  # conductor; answered by SNAPSHOT frames, then DELTA frames without end
    SNAPSHOT = 22  # node
    DELTA = 23  # node
    ORDER = 24  # conductor
    ERROR = 127


class Side(IntEnum):
    """Who the connecting side is."""

    ENGINE = 1
    PEER = 2
    CONDUCTOR = 3


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every message: encoded as a map, so that fields can be added without a new version."""


# --- every connection --------------------------------------------------------------------------------


class Hello(Struct, frozen=True):
    version_min: int
    version_max: int
    side: Side
    name: str  # for logs: program and pid
    node_id: str | None = None  # of a peer
    token: str | None = None  # shared secret, where one is configured
    direct: bool = False  # of an engine: it can read through the shared index, see `mooncaked.api.shm`


class RegionInfo(Struct, frozen=True):
    region: int
    size: int  # bytes


class GpuRegionInfo(Struct, frozen=True):
    """A pool in the memory of a GPU, which a client opens by its handle (`mooncaked.client.gpu`)."""

    region: int
    handle: GpuHandle


class DirectInfo(Struct, frozen=True):
    """What a client needs for reading without asking. Behind those of the regions come the memfds of the
    index, the page of this connection, and, if it can post, that of the words `posted`."""

    index_bytes: int
    page_bytes: int
    posted_bytes: int = 0
    slot: int | None = None  # its word in `posted` and `applied`; None: it cannot post


class HelloReply(Struct, frozen=True):
    version: int
    node_id: str
    epoch: int  # random at each start of the daemon
    regions: list[RegionInfo] = []  # on the unix socket; a memfd for each comes with this frame by SCM_RIGHTS
    writable: bool = True  # whether the regions may be written through these memfds; if not, see `PutData`
    direct: DirectInfo | None = None  # to who asked for it, if the node has it
    gpus: list[GpuRegionInfo] = []  # on the unix socket; empty also until they are open


class ErrorReply(Struct, frozen=True):
    code: str
    message: str
    fields: dict[str, str | int | float | bool | None] = {}


# --- engine and daemon ---------------------------------------------------------------------------------


class PutItem(Struct, frozen=True):
    key: bytes
    size: int  # bytes
    parent: bytes | None = None  # key of the block before it in its prefix chain
    meta: bytes = b""
    ttl_ms: int = 0  # from when it is readable until it no longer is; 0: what the namespace is configured to
    hold: str = ""  # "soft": goes only when nothing else can; "hard": not evicted; the node limits both


class PutBegin(Struct, frozen=True):
    """Ask for room. The writer then fills each slot through its mapping, and commits or aborts.
    A writer that disconnects aborts what it had begun."""

    namespace: str
    items: list[PutItem]


class PutSlot(Struct, frozen=True):
    status: str  # "ok" | "exists" (complete) | "busy" (another writer fills it) | "full" | "too_large"
    token: int = 0  # names this write in commit and abort
    region: int = 0
    offset: int = 0


class PutBeginReply(Struct, frozen=True):
    slots: list[PutSlot]  # one per item, in order


class PutCommit(Struct, frozen=True):
    tokens: list[int]
    checksums: list[int | None]  # XXH3-64 of each value; None: the node works it out soon


class PutCommitReply(Struct, frozen=True):
    stored: list[bool]


class PutAbort(Struct, frozen=True):
    tokens: list[int]


class PutAbortReply(Struct, frozen=True):
    aborted: int


class PutData(Struct, frozen=True):
    """The bytes of a value that was begun follow as payload, as many as were announced. For who cannot write
    into the pool; to be committed afterwards."""

    token: int


class Reserve(Struct, frozen=True):
    """Take room ahead of time, for `PutStored`. The node bounds what a connection can hold, and takes it back
    when it is not used for a while (`mooncaked.api.shm`). `PutAbort` gives it back."""

    sizes: list[int]  # bytes


class ReserveReply(Struct, frozen=True):
    slots: list[PutSlot]  # "ok" or "full", one per size, in order


class StoredItem(Struct, frozen=True, omit_defaults=True):
    token: int  # of the reserved room in which the value lies
    key: bytes
    size: int  # bytes
    parent: bytes | None = None
    meta: bytes = b""
    checksum: int | None = None  # XXH3-64; None: the node works it out soon
    ttl_ms: int = 0
    hold: str = ""


class PutStored(Struct, frozen=True):
    """Name values that lie in reserved room; they are readable once the node has read this. No reply: where
    a key has a value already, or somebody is just writing one, that one stays. Who sends this counts it in
    its word `posted`, and others do not take a miss for an answer until the node has got that far."""

    namespace: str
    items: list[StoredItem]


class Open(Struct, frozen=True):
    """Ask how a namespace's keys are hashed in the shared index."""

    namespace: str


class OpenReply(Struct, frozen=True):
    seed1: int  # of XXH3-64
    seed2: int


class Pin(Struct, frozen=True):
    """Make the values readable in the mapping until `Unpin` or disconnect.

    Keys that this node lacks are fetched from `sources` (node ids, tried in order) and, if `locate`, from
    whichever node the conductor's index names. What is not there by the deadline is a miss."""

    namespace: str
    keys: list[bytes]
    sources: list[str] = []
    locate: bool = False
    deadline_ms: int = 10_000
    tier: str = ""  # "gpu": pin there what lies in GPU memory, and the rest as usual


class PinnedBlock(Struct, frozen=True):
    pin: int  # names this pin in Unpin; below 0 in GPU memory
    region: int  # from `GPU_REGION` on in GPU memory
    offset: int
    size: int
    checksum: int | None  # XXH3-64; None: the node has not worked it out yet
    meta: bytes = b""
    source: str = ""  # "" was here already, else the node id that it was fetched from


class PinReply(Struct, frozen=True):
    blocks: list[PinnedBlock | None]  # one per key, in order; None is a miss


class Unpin(Struct, frozen=True):
    pins: list[int]


class Exists(Struct, frozen=True):
    namespace: str
    keys: list[bytes]


class ExistsReply(Struct, frozen=True):
    found: list[bool]


class PrefixMatch(Struct, frozen=True):
    """How many of `keys` (a chain, root first) are here without a gap. Pins nothing, protects nothing."""

    namespace: str
    keys: list[bytes]


class PrefixMatchReply(Struct, frozen=True):
    matched: int


class Remove(Struct, frozen=True):
    namespace: str
    keys: list[bytes]


class RemoveReply(Struct, frozen=True):
    removed: list[bool]  # False: it was not there, or it is pinned and goes when its last reader ends


# --- node and node, conductor and node ------------------------------------------------------------------


class Fetch(Struct, frozen=True):
    namespace: str
    keys: list[bytes]


class FetchedBlock(Struct, frozen=True):
    size: int
    checksum: int
    parent: bytes | None = None
    meta: bytes = b""


class FetchReply(Struct, frozen=True):
    """The found blocks' bytes follow as payload, one after the other in order. `blocks` may be shorter than
    the keys asked for (a reply stops at `FETCH_BYTES_TARGET`): ask again for the rest. None is a miss."""

    blocks: list[FetchedBlock | None]


class Subscribe(Struct, frozen=True):
    epoch: int | None = None  # resume: the epoch and last sequence number seen
    sequence: int = 0


class SubscribeReply(Struct, frozen=True):
    epoch: int
    resumed: bool  # True: deltas go on after `sequence`; False: a snapshot comes first


class Snapshot(Struct, frozen=True):
    sequence: int  # deltas after this snapshot start at sequence + 1
    blocks: list[BlockEvent]
    last: bool  # a snapshot comes in several frames


class Delta(Struct, frozen=True):
    sequence: int  # of the first event; the others follow one by one. An empty delta is a heartbeat.
    events: list[BlockEvent]


class Order(Struct, frozen=True):
    """What a conductor tells a node to do. A node refuses a term lower than the highest it has obeyed.

    "fetch" brings blocks here from another node; "prefetch" brings them into memory from this node's own
    disks when there is time, and done means that they are there or noted; "drop" forgets them."""

    term: int
    action: str  # "fetch" | "prefetch" | "drop"
    namespace: str
    keys: list[bytes]
    source: str = ""  # node id, for fetch
    deadline_ms: int = 10_000


class OrderReply(Struct, frozen=True):
    done: list[bool]


REQUESTS: dict[Kind, type[Struct]] = {
    Kind.HELLO: Hello,
    Kind.PUT_BEGIN: PutBegin,
    Kind.PUT_COMMIT: PutCommit,
    Kind.PUT_ABORT: PutAbort,
    Kind.PIN: Pin,
    Kind.UNPIN: Unpin,
    Kind.EXISTS: Exists,
    Kind.PREFIX_MATCH: PrefixMatch,
    Kind.REMOVE: Remove,
    Kind.OPEN: Open,
    Kind.RESERVE: Reserve,
    Kind.PUT_STORED: PutStored,
    Kind.PUT_DATA: PutData,
    Kind.FETCH: Fetch,
    Kind.SUBSCRIBE: Subscribe,
    Kind.SNAPSHOT: Snapshot,
    Kind.DELTA: Delta,
    Kind.ORDER: Order,
}
REPLIES: dict[Kind, type[Struct]] = {
    Kind.HELLO: HelloReply,
    Kind.PUT_BEGIN: PutBeginReply,
    Kind.PUT_COMMIT: PutCommitReply,
    Kind.PUT_ABORT: PutAbortReply,
    Kind.PIN: PinReply,
    Kind.EXISTS: ExistsReply,
    Kind.PREFIX_MATCH: PrefixMatchReply,
    Kind.REMOVE: RemoveReply,
    Kind.OPEN: OpenReply,
    Kind.RESERVE: ReserveReply,
    Kind.FETCH: FetchReply,
    Kind.SUBSCRIBE: SubscribeReply,
    Kind.ORDER: OrderReply,
    Kind.ERROR: ErrorReply,
}

M = TypeVar("M", bound=Struct)
_encoder = msgspec.msgpack.Encoder()
_decoders = {cls: msgspec.msgpack.Decoder(cls) for cls in {*REQUESTS.values(), *REPLIES.values()}}


class FrameHead(msgspec.Struct, frozen=True):
    """The fixed header of a frame, already checked against the caps."""

    version: int
    kind: Kind
    reply: bool
    request_id: int
    header_len: int
    payload_len: int


def encode_frame(
    kind: Kind,
    request_id: int,
    body: Struct,
    *,
    payload_len: int = 0,
    reply: bool = False,
    version: int = VERSION_MAX,
) -> bytes:
    """The fixed and the msgpack header; the caller sends `payload_len` bytes of payload right after it."""
    header = _encoder.encode(body)
    code = kind | REPLY if reply else int(kind)
    return HEADER.pack(MAGIC, version, code, request_id, len(header), payload_len) + header


def encode_error(request_id: int, error: MooncakeError, *, version: int = VERSION_MAX) -> bytes:
    """An error as a reply frame; fields that are no plain values travel as text."""
    fields = error.fields.items()
    plain = {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in fields}
    body = ErrorReply(code=error.code, message=str(error), fields=plain)
    return encode_frame(Kind.ERROR, request_id, body, reply=True, version=version)


def decode_head(data: bytes | bytearray | memoryview, peer: str) -> FrameHead:
    """Decode the first `HEADER.size` bytes of a frame; raises `ProtocolError` on anything out of bounds."""
    magic, version, code, request_id, header_len, payload_len = HEADER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError(peer=peer, problem=f"a frame starts with {magic:#06x}, not {MAGIC:#06x}")
    if header_len > HEADER_BYTES_MAX or payload_len > PAYLOAD_BYTES_MAX:
        problem = f"a frame of {header_len} + {payload_len} bytes is over the limits"
        raise ProtocolError(peer=peer, problem=problem)
    try:
        kind = Kind(code & ~REPLY)
    except ValueError as error:
        raise ProtocolError(peer=peer, problem=f"unknown frame kind {code}") from error
    return FrameHead(version, kind, bool(code & REPLY), request_id, header_len, payload_len)


def decode_body(data: bytes | bytearray | memoryview, cls: type[M], peer: str) -> M:
    """Decode a msgpack header into `cls`; raises `ProtocolError` when it does not fit."""
    try:
        return _decoders[cls].decode(data)  # type: ignore[return-value]
    except msgspec.MsgspecError as error:
        raise ProtocolError(peer=peer, problem=f"{cls.__name__}: {error}") from error


def decode_request(head: FrameHead, data: bytes | bytearray | memoryview, peer: str) -> Struct:
    """Decode the body of a request or event frame by its kind."""
    if head.reply or head.kind not in REQUESTS:
        raise ProtocolError(peer=peer, problem=f"{head.kind.name} is no request")
    return decode_body(data, REQUESTS[head.kind], peer)


def decode_reply(head: FrameHead, data: bytes | bytearray | memoryview, cls: type[M], peer: str) -> M:
    """Decode a reply of type `cls`; raises the error that the peer sent instead, rebuilt by its code."""
    if head.kind is Kind.ERROR:
        error = decode_body(data, ErrorReply, peer)
        raise from_wire(error.code, dict(error.fields), error.message, peer)
    if not head.reply or REPLIES.get(head.kind) is not cls:
        raise ProtocolError(peer=peer, problem=f"{head.kind.name} came where {cls.__name__} was due")
    return decode_body(data, cls, peer)


def choose_version(hello: Hello, peer: str) -> int:
    """The highest version that both sides speak; raises `VersionMismatch` when there is none."""
    version = min(hello.version_max, VERSION_MAX)
    if version < max(hello.version_min, VERSION_MIN):
        theirs, ours = f"{hello.version_min}-{hello.version_max}", f"{VERSION_MIN}-{VERSION_MAX}"
        raise VersionMismatch(peer=peer, theirs=theirs, ours=ours)
    return version


def check_batch(count: int, peer: str) -> None:
    """Raise `ProtocolError` when a request names more keys than a batch may."""
    if count > BATCH_KEYS_MAX:
        raise ProtocolError(peer=peer, problem=f"{count} keys in one request, the limit is {BATCH_KEYS_MAX}")
