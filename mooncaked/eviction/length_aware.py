"""Like least frequently used, but of blocks with equal credit the one that is later in its requests goes."""

from __future__ import annotations

from mooncaked.eviction.base import B, Names, follows
from mooncaked.eviction.lfu import LfuPolicy
from mooncaked.eviction.ranked import Rank


class LengthAwarePolicy(LfuPolicy[B]):
    """The LengthAwareCache of the Mooncake paper. How late a block is in its requests is its depth in its
    chain, counted from the first block that was known when it came."""

    def __init__(self) -> None:
        super().__init__()
        self._names: Names[B] = Names()
        self._depth: dict[B, int] = {}

    def _rank(self, block: B, before: B | None) -> Rank:
        if block not in self._depth:
            if before is None or not follows(block, before):
                before = self._names.parent(block)
            self._names.add(block)
            self._depth[block] = 0 if before is None else self._depth[before] + 1
        return (*super()._rank(block, before), -self._depth[block])

    def _left(self, block: B, rank: Rank, evicted: bool) -> None:
        super()._left(block, rank, evicted)
        self._names.remove(block)
        del self._depth[block]
