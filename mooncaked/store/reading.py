"""Reading: pins, questions that pin nothing, and the memory itself."""

from __future__ import annotations

from collections.abc import Sequence

from mooncaked.api.protocol import PinnedBlock
from mooncaked.block import as_pinned
from mooncaked.errors import InvalidRequest
from mooncaked.store.books import PINS_PER_OWNER_MAX, BlockInfo, Books


class Reading(Books):
    """What readers ask."""

    def pin(
        self, owner: int, namespace: str, keys: Sequence[bytes], *, count: bool = True
    ) -> list[PinnedBlock | None]:
        """Protect blocks while they are read; `keys` of a prefix chain root first. None per key that is not
        here, or must be brought up first (see `below`). A use of the blocks, the first key's most of all.
        `count`: see `StoreStats`; without it, nobody has used the blocks again. Raises `InvalidRequest` when
        the owner has ended or would hold more than `PINS_PER_OWNER_MAX`."""
        with self._lock:
            table, now = self._table, self._clock.monotonic()
            if table.read_count(owner) + len(keys) > PINS_PER_OWNER_MAX:
                problem = f"one connection can hold {PINS_PER_OWNER_MAX} pins; unpin some first"
                raise InvalidRequest(problem=problem)
            visible = table.visible(namespace)
            found = [visible.get(key) for key in keys]
            if self._unverified or self._expiries:
                found = [b if b and not b.unverified and b.expires_at_s > now else None for b in found]
            blocks = [block for block in found if block is not None]
            pins = iter(table.pin(owner, blocks))
            for block in blocks:
                block.used_at_s = now
                if count:
                    self._count_use(block)
            self._room.touch(blocks)
            if count:
                self._counters.hits += len(blocks)
                self._counters.misses += len(keys) - len(blocks)
            return [None if block is None else as_pinned(next(pins), block) for block in found]

    def unpin(self, owner: int, pins: Sequence[int]) -> None:
        """End reads. Raises `InvalidRequest`, before anything is done, when a pin is not one of this owner or
        comes twice."""
        with self._lock:
            self._release(self._table.unpin(owner, pins))

    def exists(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` this node has now, in whichever tier. Protects nothing and is no use of them."""
        with self._lock:
            visible = self._table.visible(namespace)
            found = [key in visible for key in keys]
            if self._lower is None or all(found):
                return found
            return [here or below for here, below in zip(found, self._below(namespace, keys), strict=True)]

    def prefix_match(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many of `keys`, a chain root first, this node has without a gap. Protects nothing, but what
        lies below is brought up when there is time."""
        with self._lock:
            visible = self._table.visible(namespace)
            matched = next((n for n, key in enumerate(keys) if key not in visible), len(keys))
            lower = self._lower
            if lower is None or (matched == len(keys) and not self._unverified):
                return matched
            below = self._below(namespace, keys[matched:])
            rest = (n for n, key in enumerate(keys[matched:]) if not below[n] and key not in visible)
            matched += next(rest, len(keys) - matched)
            blocks = ((key, visible.get(key)) for key in keys[:matched])
            needed = [key for key, block in blocks if block is None or block.unverified]
        if needed:
            lower.needed(namespace, needed)
        return matched

    def below(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` cannot be pinned now, but could be after they were brought up: from a lower tier,
        or by comparing them with their checksum after a restart."""
        with self._lock:
            if not self._unverified and self._lower is None:
                return [False] * len(keys)
            visible = self._table.visible(namespace)
            here = [visible.get(key) for key in keys]
            below = self._below(namespace, keys)
            return [low if b is None else b.unverified for b, low in zip(here, below, strict=True)]

    def block_info(self, namespace: str, key: bytes) -> BlockInfo | None:
        """What is known of a readable block in memory, None when there is none."""
        with self._lock:
            block = self._table.visible(namespace).get(key)
            return None if block is None else self._info(block)

    def pinned_info(self, owner: int, pins: Sequence[int]) -> list[BlockInfo]:
        """What is known of blocks that `owner` has pinned, also when they were removed since. Raises
        `InvalidRequest` as `unpin` does."""
        with self._lock:
            return [self._info(block) for block in self._table.reads(owner, pins)]

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """The pool's memory from `offset` on, `size` bytes, writable, without a copy. Only for who has that
        place by a slot or a pin. Raises `InvalidRequest` when it is not inside the pool."""
        view = self._views.get(region)
        if view is None or not 0 <= offset <= offset + size <= len(view):
            problem = f"region {region}, {offset}+{size} bytes is not memory of this node's pool"
            raise InvalidRequest(problem=problem)
        return view[offset : offset + size]
