"""What callers of the SSD pool see: items to write, entries that are there, results and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec


class SsdItem(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A block to be written. `data` must stay as it is until `write` returns; 4096-aligned memory is written
    from where it lies."""

    namespace: str
    key: bytes
    data: memoryview  # the value: bytes, contiguous
    parent: bytes | None = None
    meta: bytes = b""
    checksum: int | None = None  # XXH3-64 of the value; None: computed by `write`


class SsdEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A block that is there, and where. It stays true until the block is lost or removed; reading it then
    gives `ReadStatus.GONE`, never other bytes."""

    namespace: str
    key: bytes
    parent: bytes | None
    meta: bytes
    size: int  # bytes
    checksum: int  # XXH3-64
    device: int  # index into the pool's devices
    location: int  # in the device's index
    generation: int  # of the segment; no two that a device ever wrote have the same
    offset: int  # bytes, in the segment


class WriteStatus(StrEnum):
    """What became of an item."""

    STORED = "stored"  # durable and readable
    EXISTS = "exists"  # it was there already; nothing was written
    REMOVED = "removed"  # somebody removed it while it was being written
    TOO_LARGE = "too_large"  # no segment can hold it
    FULL = "full"  # the file system has no room for a single segment
    FAILED = "failed"  # an error of the device, or the device takes no writes


class ReadStatus(StrEnum):
    """What became of a read. The destination's content counts only with OK."""

    OK = "ok"
    GONE = "gone"  # lost or removed in the meantime
    CORRUPT = "corrupt"  # did not match its checksum, and is gone now
    FAILED = "failed"  # the device could not read it, and it is gone now


class LostReason(StrEnum):
    """Why a block ceased to be readable without anybody asking for it."""

    RECLAIMED = "reclaimed"  # its segment was needed for newer blocks
    CORRUPT = "corrupt"  # its bytes did not match its checksum
    UNREADABLE = "unreadable"  # the device reported an error for its place
    DEVICE = "device"  # the whole device was taken out


class DeviceState(StrEnum):
    """What a device does."""

    CLOSED = "closed"
    ACTIVE = "active"
    READ_ONLY = "read_only"  # took itself out for writes; its blocks can be read
    FAILED = "failed"  # took itself out; it holds nothing


class DeviceStats(msgspec.Struct, frozen=True, kw_only=True):
    """One device now. Counters count from the start of the process."""

    name: str  # its directory
    state: DeviceState
    reason: str  # why it is not active; empty: it is
    direct: bool  # O_DIRECT is in use
    capacity_bytes: int  # that its files may have
    allocated_bytes: int  # that its files have
    used_bytes: int  # of segments that hold groups
    live_bytes: int  # of blocks that can be read
    blocks: int  # that can be read
    segments: int
    segments_free: int
    queued_bytes: int  # waiting to be written
    written_bytes: int  # of values, by callers
    device_written_bytes: int  # in all: values, tables, padding, what was carried over
    read_bytes: int  # of values, checked
    stored_total: int
    read_total: int
    carried_total: int  # blocks that were carried over to a newer segment
    carried_bytes: int
    lost: dict[str, int]  # blocks, by LostReason
    errors: dict[str, int]  # by kind
    write_amplification: float  # device_written_bytes / written_bytes; 1.0 before the first write


Lost = Callable[[Sequence[SsdEntry], LostReason], None]
"""Told of blocks that are lost, in batches, after they ceased to be found. Called from whatever thread
noticed; it may look up and remove, but must neither write, nor wait for a write, nor raise."""

Keep = Callable[[Sequence[SsdEntry]], Sequence[bool]]
"""Asked which blocks of a segment that is reclaimed are worth being carried over. The same rules as for
`Lost`."""

Progress = Callable[[int, int], None]
"""Told of segments done and segments in all, while a device is opened."""
