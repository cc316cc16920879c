"""What every eviction policy is told, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy reads and writes of a block. Hashed by identity."""

    namespace: str
    key: bytes  # among the known blocks of a namespace no other has it
    parent: bytes | None  # key of the block before it in its prefix chain
    size: int  # bytes
    pins: int  # reasons why it cannot go, e.g. readers
    children: int  # present blocks that name this one as their parent, whether the policy knows them or not
    touched: int  # set by the policy only: 0 for a block that it does not know
    policy: object | None  # read and written by the policy only


B = TypeVar("B", bound=Evictable)


class Policy(Protocol[B]):
    """Not thread-safe: its owner locks. A block is known from its first `touch` until `discard`. Time is
    counted in touches. A policy never names a block that is pinned or has a child."""

    def __len__(self) -> int:
        """Blocks that are known."""

    def touch(self, blocks: Iterable[B]) -> None:
        """`blocks`, a piece of a prefix chain root first, were used, or have just been stored if they are new
        to the policy. Blocks that are no chain are each taken for themselves."""

    def discard(self, block: B) -> None:
        """Forget a known block that was evicted or removed."""

    def released(self, block: B) -> None:
        """A pin on `block` or its last child has gone: it may be evictable again. It need not be known."""

    def victim(self) -> B | None:
        """The block to evict next, which is not pinned and has no child present, or None when there is no
        such block. It stays known until `discard`, and is named again until something changes."""

    def inner_victim(self) -> B | None:
        """To be asked when there is no `victim`: a block that is not pinned but has a child present (which is
        pinned or being written, or has such a child), or None."""

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every known block is in exactly one place. O(blocks)."""


class Names(Generic[B]):
    """Blocks by namespace and key, to find a block's parent."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[bytes, B]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def add(self, block: B) -> None:
        """Remember a block."""
        space = self._spaces.get(block.namespace)
        if space is None:
            space = self._spaces[block.namespace] = {}
        space[block.key] = block

    def remove(self, block: B) -> None:
        """Forget a block that was added."""
        space = self._spaces[block.namespace]
        del space[block.key]
        if not space:
            del self._spaces[block.namespace]

    def parent(self, block: B) -> B | None:
        """The block before `block` in its chain, where it is remembered."""
        if block.parent is None or (space := self._spaces.get(block.namespace)) is None:
            return None
        return space.get(block.parent)


class Aside(Generic[B]):
    """Blocks that came up for eviction when they were pinned or had a child, in the order in which they came.
    A policy looks at each of them again only when it is released, so that the many blocks inside of chains
    cost nothing while they are there."""

    def __init__(self) -> None:
        self._blocks: dict[B, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: B) -> bool:
        return block in self._blocks

    def put(self, block: B) -> None:
        """Set a block aside."""
        self._blocks[block] = None

    def take(self, block: B) -> bool:
        """Take a block out again; whether it was set aside."""
        if block not in self._blocks:
            return False
        del self._blocks[block]
        return True

    def take_released(self, block: B) -> bool:
        """Take a block out if it may go now; whether it was."""
        return not block.pins and not block.children and self.take(block)

    def inner(self) -> B | None:
        """The first that is not pinned."""
        return next((block for block in self._blocks if not block.pins), None)


def free(block: Evictable) -> bool:
    """Whether a block may go: nobody reads it, and no block that is present needs it."""
    return not block.pins and not block.children


def follows(block: Evictable, before: Evictable) -> bool:
    """Whether `before` is the parent of `block`."""
    return block.parent == before.key and block.namespace == before.namespace
