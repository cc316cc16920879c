"""Least recently used first.

Touching a block costs one move to the end of an ordered dict. The order is kept for all blocks alike; one
that may not go (pinned, or with a child present) is set aside when it comes to the front, and comes back
with its old place when that changes. So each block is passed over at most once between two touches, and
naming a victim costs O(log n) amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import Generic

from mooncaked.errors import IntegrityError
from mooncaked.eviction.base import B


class LruPolicy(Generic[B]):
    """See `Policy`. `touched` of a block grows with each of its touches."""

    def __init__(self) -> None:
        self._touches = 0
        self._recent: OrderedDict[B, None] = OrderedDict()  # by last touch, oldest first
        self._held: set[B] = set()  # set aside: pinned
        self._inner: OrderedDict[B, None] = OrderedDict()  # set aside: a child is present
        self._back: list[tuple[int, B]] = []  # heap by touch: was set aside and may go again
        self._back_count = 0  # live entries of _back; others are stale, their block was touched or discarded

    def __len__(self) -> int:
        return len(self._recent) + len(self._held) + len(self._inner) + self._back_count

    def touch(self, blocks: Iterable[B]) -> None:
        """Make `blocks`, a piece of a prefix chain root first, the most recent, the root most of all."""
        recent = self._recent
        for block in reversed(list(blocks)):
            if block in recent:
                recent.move_to_end(block)
            else:
                self._leave_aside(block)
                recent[block] = None
            self._touches += 1
            block.touched = self._touches

    def discard(self, block: B) -> None:
        """Forget a block that was evicted or removed."""
        if block in self._recent:
            del self._recent[block]
        else:
            self._leave_aside(block)
        block.touched = 0

    def released(self, block: B) -> None:
        """A pin on `block` or its last child has gone: it may be evictable again."""
        if block in self._held:
            self._held.remove(block)
        elif block in self._inner:
            del self._inner[block]
        else:
            return
        self._set_aside(block)

    def victim(self) -> B | None:
        """The least recently touched block that is not pinned and has no child present, or None. It stays
        known until `discard`."""
        while (block := self._oldest()) is not None:
            if not block.pins and not block.children:
                return block
            self._take_oldest(block)
            self._set_aside(block)
        return None

    def inner_victim(self) -> B | None:
        """To be asked when there is no `victim`: a block that is not pinned but has a child present (which is
        pinned or being written, or has such a child). About the least recently touched one, or None."""
        return next((block for block in self._inner if not block.pins), None)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block is in one place and the order is by touch."""
        stamps = [block.touched for block in self._recent]
        if any(a >= b for a, b in pairwise(stamps)):
            raise IntegrityError(what="eviction order", detail=f"touches are not in order: {stamps[:20]}")
        live = [block for stamp, block in self._back if self._is_live(stamp, block)]
        places = [*self._recent, *self._held, *self._inner, *live]
        if len(set(places)) != len(places) or len(live) != self._back_count:
            detail = (
                f"{len(places)} places for {len(set(places))} blocks, {len(live)} of {self._back_count} back"
            )
            raise IntegrityError(what="eviction order", detail=detail)

    def _oldest(self) -> B | None:
        while self._back and not self._is_live(*self._back[0]):
            heappop(self._back)
        first = next(iter(self._recent), None)
        if self._back and (first is None or self._back[0][0] < first.touched):
            return self._back[0][1]
        return first

    def _take_oldest(self, block: B) -> None:
        if block in self._recent:
            del self._recent[block]
        else:
            heappop(self._back)
            self._back_count -= 1

    def _set_aside(self, block: B) -> None:
        if block.pins:
            self._held.add(block)
        elif block.children:
            self._inner[block] = None
        else:
            heappush(self._back, (block.touched, block))
            self._back_count += 1

    def _leave_aside(self, block: B) -> None:
        """Forget where `block`, which is not in `_recent`, was; for a new block that is nowhere."""
        if block in self._held:
            self._held.remove(block)
        elif block in self._inner:
            del self._inner[block]
        elif block.touched:
            self._back_count -= 1  # its entry in _back is stale as soon as `touched` changes

    def _is_live(self, stamp: int, block: B) -> bool:
        return block.touched == stamp
