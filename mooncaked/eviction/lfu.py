"""Least frequently used first, with aging."""

from __future__ import annotations

from mooncaked.eviction.base import B
from mooncaked.eviction.ranked import Rank, RankedPolicy


class LfuPolicy(RankedPolicy[B]):
    """A block's credit is its uses plus the credit of the last victim at its last touch. So a block that was
    popular once loses to new ones as victims with ever higher credit go. Of equal credits the older goes."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[B, int] = {}
        self._level = 0  # credit of the last victim

    def _rank(self, block: B, before: B | None) -> Rank:
        uses = self._uses[block] = self._uses.get(block, 0) + 1
        return (self._level + uses,)

    def _left(self, block: B, rank: Rank, evicted: bool) -> None:
        del self._uses[block]
        if evicted:
            self._level = max(self._level, rank[0])
