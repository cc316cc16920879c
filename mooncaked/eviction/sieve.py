"""SIEVE: one queue, and a hand that goes from the oldest block to the newest, again and again.

The hand evicts what was not used since it last came by and spares the rest, where they are. So new blocks
are looked at soon, while those that have proved themselves stay behind the hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from mooncaked.errors import IntegrityError
from mooncaked.eviction.base import Aside, B, free


class _Node(Generic[B]):
    """A place in the queue."""

    __slots__ = ("block", "newer", "older", "used")

    def __init__(self, block: B) -> None:
        self.block = block
        self.newer: _Node[B] | None = None
        self.older: _Node[B] | None = None
        self.used = False  # since the hand last came by


class SievePolicy(Generic[B]):
    """See `Policy`."""

    def __init__(self) -> None:
        self._known: dict[B, _Node[B]] = {}
        self._aside: Aside[B] = Aside()  # these have a node, but no place in the queue
        self._newest: _Node[B] | None = None
        self._oldest: _Node[B] | None = None
        self._hand: _Node[B] | None = None  # None: at the oldest

    def __len__(self) -> int:
        return len(self._known)

    def touch(self, blocks: Iterable[B]) -> None:
        """See `Policy`."""
        for block in reversed(list(blocks)):
            node = self._known.get(block)
            if node is not None:
                node.used = True
                continue
            node = self._known[block] = _Node(block)
            block.touched = 1
            self._link(node, None)

    def discard(self, block: B) -> None:
        """See `Policy`."""
        node = self._known.pop(block)
        block.touched = 0
        if not self._aside.take(block):
            self._unlink(node)

    def released(self, block: B) -> None:
        """See `Policy`."""
        if self._aside.take_released(block):  # the hand has been there: it is the next one
            node = self._known[block]
            self._link(node, self._hand or self._oldest)
            self._hand = node

    def victim(self) -> B | None:
        """See `Policy`."""
        while (node := self._hand or self._oldest) is not None:
            if not free(node.block):
                self._unlink(node)
                self._aside.put(node.block)
            elif node.used:
                node.used = False
                self._hand = node.newer
            else:
                self._hand = node
                return node.block
        return None

    def inner_victim(self) -> B | None:
        """See `Policy`."""
        return self._aside.inner()

    def check_integrity(self) -> None:
        """See `Policy`."""
        queue: list[B] = []
        node, older, hands = self._oldest, None, 0
        while node is not None and len(queue) <= len(self._known):
            if node.older is not older or self._known.get(node.block) is not node:
                raise IntegrityError(what="eviction order", detail=f"broken queue at {node.block!r}")
            queue.append(node.block)
            hands += node is self._hand
            node, older = node.newer, node
        aside = [block for block in self._known if block in self._aside]
        if self._newest is not older or hands != (self._hand is not None):
            raise IntegrityError(what="eviction order", detail="the queue's end or the hand is not in it")
        if len(queue) + len(aside) != len(self._known) or len(aside) != len(self._aside):
            detail = f"{len(self._known)} blocks, {len(queue)} in the queue, {len(self._aside)} set aside"
            raise IntegrityError(what="eviction order", detail=detail)

    def _link(self, node: _Node[B], newer: _Node[B] | None) -> None:
        """Put a node before `newer`, or at the new end."""
        node.newer, node.older = newer, self._newest if newer is None else newer.older
        if node.older is None:
            self._oldest = node
        else:
            node.older.newer = node
        if newer is None:
            self._newest = node
        else:
            newer.older = node

    def _unlink(self, node: _Node[B]) -> None:
        if node is self._hand:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older
