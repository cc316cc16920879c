"""Policies that give each block a rank when it is touched and evict the lowest: a heap by rank.

A heap entry is stale when its block was touched or discarded since; stale ones are dropped when they come
to the top, or all at once when they are the majority. So a touch and a victim cost O(log n) amortised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic

from mooncaked.errors import IntegrityError
from mooncaked.eviction.base import Aside, B, free

Rank = tuple[int, ...]
_SLACK = 64  # stale entries that are not worth a clean-up


class RankedPolicy(ABC, Generic[B]):
    """See `Policy`. A rank never changes but by a touch; of equal ranks the older goes first."""

    def __init__(self) -> None:
        self._touches = 0
        self._known: dict[B, Rank] = {}
        self._heap: list[tuple[Rank, int, B]] = []  # rank, touch, block; the touch makes each entry unique
        self._aside: Aside[B] = Aside()
        self._named: B | None = None  # the last victim

    @abstractmethod
    def _rank(self, block: B, before: B | None) -> Rank:
        """The rank of a block that is being touched, after `before` in its chain piece."""

    @abstractmethod
    def _left(self, block: B, rank: Rank, evicted: bool) -> None:
        """A block was discarded: because it was the victim, or for another reason."""

    def __len__(self) -> int:
        return len(self._known)

    def touch(self, blocks: Iterable[B]) -> None:
        """See `Policy`."""
        piece: list[tuple[B, Rank]] = []
        before: B | None = None
        for block in blocks:
            piece.append((block, self._rank(block, before)))
            before = block
        for block, rank in reversed(piece):
            self._touches += 1
            block.touched = self._touches
            self._known[block] = rank
            self._aside.take(block)
            heappush(self._heap, (rank, block.touched, block))
        self._clean()

    def discard(self, block: B) -> None:
        """See `Policy`."""
        rank = self._known.pop(block)
        self._aside.take(block)
        block.touched = 0
        self._left(block, rank, block is self._named)
        self._named = None

    def released(self, block: B) -> None:
        """See `Policy`."""
        if self._aside.take_released(block):
            heappush(self._heap, (self._known[block], block.touched, block))

    def victim(self) -> B | None:
        """The block of the lowest rank that may go."""
        heap = self._heap
        while heap:
            _, touch, block = heap[0]
            if block.touched == touch and free(block):
                self._named = block
                return block
            heappop(heap)
            if block.touched == touch:
                self._aside.put(block)
        return None

    def inner_victim(self) -> B | None:
        """See `Policy`."""
        return self._aside.inner()

    def check_integrity(self) -> None:
        """See `Policy`."""
        live = [block for rank, touch, block in self._heap if block.touched == touch]
        aside = [block for block in self._known if block in self._aside]
        if len(aside) != len(self._aside) or {*live, *aside} != set(self._known):
            detail = f"{len(self._known)} blocks, {len(live)} in the heap, {len(self._aside)} set aside"
            raise IntegrityError(what="eviction order", detail=detail)
        if len(live) + len(aside) != len(self._known):
            raise IntegrityError(what="eviction order", detail="a block is in more than one place")

    def _clean(self) -> None:
        if len(self._heap) > 2 * len(self._known) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].touched == entry[1]]
            heapify(self._heap)
