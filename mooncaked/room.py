"""Room in the pool for new blocks: allocator, block table and eviction policy taken together. Pure.

A full pool refuses nothing that eviction could make room for. Free memory may be in pieces, so eviction goes
on until one piece is large enough, and only what is pinned or being written can stop it. Where evicting one
block is not certain to be enough, it is worked out first whether evicting all of them would be, so that a
value that fits nowhere between pinned blocks does not empty the cache in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncaked.blocks import Block, BlockTable
from mooncaked.errors import IntegrityError
from mooncaked.eviction import LruPolicy
from mooncaked.pools.allocator import SMALL_MAX, Allocator


class Room:
    """Places and frees blocks. `evicted` is called with each block that had to make room. Not thread-safe."""

    def __init__(self, capacity: int, blocks_max: int, evicted: Callable[[Block], None]) -> None:
        self.allocator = Allocator(capacity)
        self.policy: LruPolicy[Block] = LruPolicy()
        self.table = BlockTable(self.policy.released)
        self._blocks_max = blocks_max
        self._evicted = evicted
        self._impossible: int | None = None  # bytes; from this size on nothing fits until `loosened`

    def place(self, size: int, chain: Chain) -> int | None:
        """An offset for `size` bytes, after evicting what is in the way; None when what is pinned or being
        written leaves no room. Blocks in `chain` go last."""
        if self._impossible is not None and size >= self._impossible:
            return None
        while self.table.count >= self._blocks_max:
            if (block := self._next(chain)) is None:
                return None
            self._evict(block)
        can_fit = size <= SMALL_MAX
        while (offset := self.allocator.allocate(size)) is None:
            block = self._next(chain)
            can_fit = can_fit or (block is not None and (block.size >= size or self._can_fit(size)))
            if block is None or not can_fit:
                self._impossible = size
                return None
            self._evict(block)
        return offset

    def free(self, blocks: Iterable[Block]) -> None:
        """Give back the memory of blocks that are GONE."""
        for block in blocks:
            self.allocator.free(block.offset)

    def loosened(self) -> None:
        """A block ceased to be pinned or written: what did not fit before may fit now."""
        self._impossible = None

    def hide(self, block: Block) -> bool:
        """Take a readable block away; whether its memory is free already, or waits for its last reader."""
        gone = self.table.hide(block)
        self.policy.discard(block)
        if gone:
            self.allocator.free(block.offset)
        return gone

    def shrink(self, goal: int, blocks_max: int) -> tuple[int, bool]:
        """Evict blocks that are neither pinned nor have a child, until at most `goal` bytes are used; at most
        `blocks_max` of them. How many, and whether there is more to do."""
        for count in range(blocks_max):
            if self.allocator.used_bytes <= goal or (block := self.policy.victim()) is None:
                return count, False
            self._evict(block)
        return blocks_max, True

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless table, policy and allocator agree on what is where. O(blocks)."""
        self.allocator.check_integrity()
        self.policy.check_integrity()
        self.table.check_integrity()
        blocks = self.table.all_blocks()
        offsets = {block.offset for block in blocks}
        if len(offsets) != len(blocks) or offsets != self.allocator.offsets():
            detail = (
                f"{len(blocks)} blocks at {len(offsets)} offsets, {len(self.allocator.offsets())} allocated"
            )
            raise IntegrityError(what="room", detail=detail)
        known = sum(1 for block in blocks if block.touched)
        if not known == len(self.policy) == self.table.visible_count:
            detail = f"{self.table.visible_count} readable, {known} touched, {len(self.policy)} in the order"
            raise IntegrityError(what="room", detail=detail)

    def _can_fit(self, size: int) -> bool:
        return self.allocator.widest_gap(block.offset for block in self.table.held()) >= size

    def _next(self, chain: Chain) -> Block | None:
        block = self.policy.victim()
        if block is None:
            self.policy.touch(chain.take())
            block = self.policy.victim() or self.policy.inner_victim()
        return block

    def _evict(self, block: Block) -> None:
        if not self.hide(block):
            raise IntegrityError(what="room", detail=f"{block!r} was evicted while it is read")
        self._evicted(block)


class Chain:
    """The readable blocks above a batch of new ones in their prefix chains. Walked only when it comes to
    evicting blocks with children, and only once."""

    def __init__(self, table: BlockTable, namespace: str, parents: Iterable[bytes | None]) -> None:
        self._table = table
        self._namespace = namespace
        self._parents: Iterable[bytes | None] = parents

    def take(self) -> list[Block]:
        """The blocks, root first, at the first call; nothing at later ones."""
        parents, self._parents = self._parents, ()
        return self._table.ancestors(self._namespace, parents)
