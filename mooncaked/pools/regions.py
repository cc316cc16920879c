"""The regions that a node's pool consists of at the moment, and how they change for another size."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncaked.pools.dram import DramPool
from mooncaked.pools.memory import round_up


class Regions:
    """The regions that clients may map. Changed in one thread, read in any."""

    def __init__(self, pools: Sequence[DramPool] = ()) -> None:
        self._pools: tuple[DramPool, ...] = tuple(pools)
        self.version = 1  # grows with each change

    def live(self) -> Sequence[DramPool]:
        """The regions now, those that are being emptied as well; the tuple itself never changes."""
        return self._pools

    def add(self, pool: DramPool) -> None:
        """Before anything is placed in it."""
        self._pools = (*self._pools, pool)
        self.version += 1

    def remove(self, region: int) -> None:
        """After everything in it is gone."""
        self._pools = tuple(pool for pool in self._pools if pool.region != region)
        self.version += 1

    @property
    def size(self) -> int:
        """Bytes of all together."""
        return sum(pool.size for pool in self._pools)


class Shape(msgspec.Struct, frozen=True):
    """A region, for planning."""

    region: int
    size: int  # bytes


class ResizePlan(msgspec.Struct, frozen=True):
    """What to do to a pool: first add regions of these sizes, then empty those."""

    add: list[int]
    retire: list[int]  # region numbers


def split(size: int, step: int, huge_pages: str) -> list[int]:
    """Sizes of regions, about equal and at most `step` (rounded up to whole pages), for a pool of `size`."""
    if size <= 0:
        return []
    count = -(-size // step)
    each = round_up(-(-size // count), huge_pages)
    sizes = []
    while size > 0:
        sizes.append(min(each, round_up(size, huge_pages)))
        size -= each
    return sizes


def adoptable(kept: Sequence[Shape], wanted: int) -> list[Shape]:
    """Which regions from before a restart a pool of `wanted` bytes begins with: the oldest, as far as they
    fit into it whole."""
    chosen, total = [], 0
    for shape in sorted(kept, key=lambda shape: shape.region):
        if total + shape.size <= wanted:
            chosen.append(shape)
            total += shape.size
    return chosen


def plan_resize(regions: Sequence[Shape], wanted: int, step: int, huge_pages: str) -> ResizePlan:
    """How to get from these regions to `wanted` bytes. The newest go first; where no number of whole regions
    makes the difference, a smaller one takes the place of one more."""
    total = sum(shape.size for shape in regions)
    if wanted >= total:
        return ResizePlan(split(wanted - total, step, huge_pages), [])
    retire = []
    left = sorted(regions, key=lambda shape: shape.region)
    while total - left[-1].size >= wanted:
        shape = left.pop()
        retire.append(shape.region)
        total -= shape.size
    if total == wanted:
        return ResizePlan([], retire)
    replaced = left[-1]
    return ResizePlan([replaced.size - (total - wanted)], [*retire, replaced.region])
