"""S3-FIFO: three queues, so that what is used once is gone soon.

New blocks enter a small queue, a tenth of all. What was used again by the time it comes out goes on to the
main queue; what was not is evicted, and its name kept in a ghost queue. What comes back while its name is
there enters the main queue at once. The main queue gives a block another round for each use, up to three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic

from mooncaked.errors import IntegrityError
from mooncaked.eviction.base import Aside, B, free

_USES_MAX = 3
_SMALL_SHARE = 10  # the small queue is one in so many


class _Queue(Generic[B]):
    """First in, first out, and the blocks that could not go when they came out."""

    def __init__(self) -> None:
        self.order: OrderedDict[B, None] = OrderedDict()
        self.aside: Aside[B] = Aside()

    def __len__(self) -> int:
        return len(self.order) + len(self.aside)

    def first(self) -> B | None:
        """The oldest of those that may go."""
        while (block := next(iter(self.order), None)) is not None and not free(block):
            del self.order[block]
            self.aside.put(block)
        return block

    def remove(self, block: B) -> bool:
        """Take a block out; whether it was here."""
        if block not in self.order:
            return self.aside.take(block)
        del self.order[block]
        return True

    def released(self, block: B) -> None:
        """A block that may go now has had its turn already: it is the next one."""
        if self.aside.take_released(block):
            self.order[block] = None
            self.order.move_to_end(block, last=False)


class S3FifoPolicy(Generic[B]):
    """See `Policy`. Ghosts: as many names as there are blocks."""

    def __init__(self) -> None:
        self._uses: dict[B, int] = {}  # of known blocks since they came, at most `_USES_MAX`
        self._small: _Queue[B] = _Queue()
        self._main: _Queue[B] = _Queue()
        self._ghosts: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._named: B | None = None  # the last victim

    def __len__(self) -> int:
        return len(self._uses)

    def touch(self, blocks: Iterable[B]) -> None:
        """See `Policy`."""
        for block in reversed(list(blocks)):
            uses = self._uses.get(block)
            if uses is not None:
                self._uses[block] = min(_USES_MAX, uses + 1)
                continue
            name = (block.namespace, block.key)
            queue = self._main if name in self._ghosts else self._small
            self._ghosts.pop(name, None)
            queue.order[block] = None
            self._uses[block] = 0
            block.touched = 1

    def discard(self, block: B) -> None:
        """See `Policy`."""
        if not self._main.remove(block):
            self._small.remove(block)
            if block is self._named:
                self._ghosts[block.namespace, block.key] = None
        self._named = None
        del self._uses[block]
        block.touched = 0
        while len(self._ghosts) > len(self._uses):
            self._ghosts.popitem(last=False)

    def released(self, block: B) -> None:
        """See `Policy`."""
        self._small.released(block)
        self._main.released(block)

    def victim(self) -> B | None:
        """See `Policy`."""
        self._named = self._next()
        return self._named

    def _next(self) -> B | None:
        small, main, uses = self._small, self._main, self._uses
        while True:
            young, old = small.first(), main.first()
            if young is not None and (old is None or len(small) * _SMALL_SHARE >= len(uses)):
                if not uses[young]:
                    return young
                small.remove(young)
                main.order[young] = None
                uses[young] = 0
            elif old is None or not uses[old]:
                return old
            else:
                uses[old] -= 1
                main.order.move_to_end(old)

    def inner_victim(self) -> B | None:
        """See `Policy`."""
        return self._small.aside.inner() or self._main.aside.inner()

    def check_integrity(self) -> None:
        """See `Policy`."""
        places = len(self._small) + len(self._main)
        found = sum(
            (block in q.order) + (block in q.aside) for block in self._uses for q in (self._small, self._main)
        )
        if not places == found == len(self._uses):
            detail = f"{len(self._uses)} blocks, {found} of them found in {places} places"
            raise IntegrityError(what="eviction order", detail=detail)
        if len(self._ghosts) > len(self._uses):
            detail = f"{len(self._ghosts)} ghosts of {len(self._uses)} blocks"
            raise IntegrityError(what="eviction order", detail=detail)
