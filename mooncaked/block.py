"""One block of a node: what it is called, where it lies, and what the books note about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import inf

import msgspec

from mooncaked.api.protocol import PinnedBlock
from mooncaked.keys import show_key


class BlockState(IntEnum):
    """Where in its life a block is."""

    ALLOCATED = 0  # has room in the pool, no writer yet
    FILLING = 1  # a writer puts its bytes in place
    COMPLETE = 2  # readable; the only visible state
    EVICTING = 3  # no longer visible, waits for its last reader
    GONE = 4  # its room is free


class Hold(IntEnum):
    """How firmly its owner asked for a block to stay."""

    NONE = 0
    SOFT = 1  # goes only when nothing else can
    HARD = 2  # goes only when it is removed, or its time is over


class Extent(msgspec.Struct, frozen=True):
    """A piece of a pool."""

    region: int
    offset: int  # bytes
    size: int  # bytes that were asked for; the allocator may have rounded up


@dataclass(slots=True, eq=False)
class Block:
    """One block. Everything but the counters, the state and what `complete` sets is fixed from the start."""

    namespace: str
    key: bytes
    size: int  # bytes of the value
    parent: bytes | None  # key of the block before it in its prefix chain
    meta: bytes
    offset: int  # bytes, in its region
    region: int = 0
    state: BlockState = BlockState.ALLOCATED
    checksum: int | None = None  # XXH3-64 of the value; None: not computed yet
    unverified: bool = False  # came back after a restart, and was not compared with its checksum yet
    pins: int = 0  # reasons why it cannot be evicted: reads in progress, and a hold
    reads: int = 0  # reads in progress
    children: int = 0  # present blocks that name this one as their parent
    touched: int = 0  # belongs to the eviction policy
    policy: object | None = None  # belongs to the eviction policy
    hold: Hold = Hold.NONE
    hold_asked: Hold = Hold.NONE  # comes into force when it is readable
    uses: int = 0  # reads since it is here
    used_at_s: float = 0.0  # monotonic time of its last use
    expires_at_s: float = inf  # monotonic time at which it ceases to be readable
    saved: bool = False  # a lower tier has it too

    def __repr__(self) -> str:
        return f"<block {self.namespace}/{show_key(self.key)} {self.state.name} pins={self.pins}>"

    @property
    def extent(self) -> Extent:
        """Where it lies."""
        return Extent(self.region, self.offset, self.size)


def as_pinned(pin: int, block: Block) -> PinnedBlock:
    """How a reader learns of a block that it has pinned."""
    return PinnedBlock(
        pin=pin,
        region=block.region,
        offset=block.offset,
        size=block.size,
        checksum=block.checksum,
        meta=block.meta,
    )
