"""Whose order decides: the learnt one, or least recently used.

Where the cache holds all that comes back soon, nothing is better than evicting what was used longest ago,
and whatever was learnt before a change of load can only do harm. So a shadow notes which blocks a cache of
the same size would hold under LRU. The learnt order begins to decide when enough of what is used was known
but gone from the shadow, which is what it may win; it ends when it has lost more blocks to the shadow than
it won, by a small share of all that were used, and after each end it takes more of a promise to begin
again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from mooncaked.eviction.base import B

_SHARE = 1024  # a loss of one block in so many is borne
_LOSS_MIN = 32  # blocks; a loss that is borne always
_LOSS_MAX_SHARE = 16  # a loss of one in so many of the capacity is not borne
_CAUTION_MAX = 64  # times the loss that is borne: what may be won, for the learnt order to begin again


class Duel(Generic[B]):
    """The shadow: names of as many blocks as there are."""

    def __init__(self) -> None:
        self.learnt = False  # whether the learnt order decides
        self._shadow: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # least recently used first
        self._balance = 0  # blocks won, or that may be won
        self._caution = 1

    def use(self, blocks: Sequence[B], capacity: int) -> int:
        """Blocks, a piece of a chain root first, are used; how many of them the shadow had."""
        shadow, had = self._shadow, 0
        for block in reversed(blocks):
            name = (block.namespace, block.key)
            if name in shadow:
                had += 1
                shadow.move_to_end(name)
            else:
                shadow[name] = None
        while len(shadow) > capacity:
            shadow.popitem(last=False)
        return had

    def score(self, ours: int, shadows: int, known: int, seen: int, capacity: int) -> bool:
        """Of `known` blocks that were used before and are used again, `ours` were there, and `shadows` in the
        shadow; `seen` have been used in all. Whether another order decides now."""
        borne = max(_LOSS_MIN, min(seen // _SHARE, capacity // _LOSS_MAX_SHARE))
        if not self.learnt:
            self._balance += known - shadows
            if self._balance <= borne * self._caution:
                return False
        else:
            self._balance = min(borne, self._balance + ours - shadows)
            if self._balance >= -borne:
                return False
            self._caution = min(_CAUTION_MAX, 2 * self._caution)
        self.learnt = not self.learnt
        self._balance = 0
        return True
