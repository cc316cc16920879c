"""Which blocks are worth a place on a disk. Pure.

Most blocks are used once: somebody computes them for a prompt that nobody repeats. Written to a disk, they
would wear it out and push off it what is asked for again. So a block is admitted when it has proved its
worth: it was read since it is here, or it was here lately, had to go, and has come again.
"""

from __future__ import annotations

from math import inf

from mooncaked.block import Block

REUSED = "reused"
ALL = "all"
KEPT_MAX = 1 << 17  # names in each of two generations: 20 MB at most


class Admission:
    """Remembers which blocks had to go, for as long as `kept_max` more took after them, or twice as many.
    Not thread-safe. `mode` is REUSED or ALL."""

    def __init__(self, mode: str = REUSED, kept_max: int = KEPT_MAX) -> None:
        self._all = mode == ALL
        self._kept_max = kept_max
        self._young: set[int] = set()  # hashes of names: one that is taken for another costs one write
        self._old: set[int] = set()

    def evicted(self, namespace: str, key: bytes) -> None:
        """A block is gone from this node, for want of room."""
        if self._all:
            return
        self._young.add(hash((namespace, key)))
        if len(self._young) >= self._kept_max:
            self._old, self._young = self._young, set()

    def admits(self, block: Block) -> bool:
        """Whether to keep a block on disk when it has to leave memory. One with a time to live is not, since
        it would outlive that there."""
        if block.expires_at_s != inf:
            return False
        if self._all or block.uses:
            return True
        name = hash((block.namespace, block.key))
        return name in self._young or name in self._old

    def __len__(self) -> int:
        """Names that are remembered."""
        return len(self._young) + len(self._old)
