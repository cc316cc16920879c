"""What the GPU tier tells and is told, and what its thread has in hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from mooncaked.block import Block
from mooncaked.errors import GpuFailed
from mooncaked.gpu.books import Placed, Source
from mooncaked.pools.gpu_device import Copy
from mooncaked.types import BlockEvent, Tier

_STALL_S = 60.0  # a device that takes longer for a batch has failed


class GpuTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """The tier at one moment; counters since its start."""

    capacity_bytes: int
    used_bytes: int
    blocks: int
    pinned_blocks: int
    queued_blocks: int
    in_flight_bytes: int
    hits: int
    misses: int
    promoted: int
    promoted_bytes: int
    evicted: int
    refused: Mapping[str, int]  # promotions by reason, see `mooncaked.gpu.books`; "busy": the queue was full
    failure: str  # why the tier is out of use; empty: it works


class Batch:
    """One call of `promote`."""

    def __init__(self, mark: int, count: int, release: Callable[[], None]) -> None:
        self.mark = mark
        self.left = count  # sources whose bytes are still needed
        self.release = release


class Item(msgspec.Struct, frozen=True):
    batch: Batch
    source: Source


class Flight(msgspec.Struct, frozen=True):
    """Copies that were started together."""

    items: list[tuple[Item, Placed]]
    copies: list[tuple[str, Copy]]  # by device
    bytes: int


def await_copy(device: str, copy: Copy) -> None:
    """Wait until a copy is over; raises `GpuFailed`, also when it takes far too long."""
    if not copy.wait(_STALL_S):
        cause = f"it has not ended in {_STALL_S:.0f} s"
        raise GpuFailed(device=device, operation="copying", cause=cause)


def as_event(block: Block, *, stored: bool) -> BlockEvent:
    """A block came into GPU memory, or went."""
    return BlockEvent(stored, block.namespace, block.key, block.parent, block.size, Tier.GPU)
