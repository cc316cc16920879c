"""Where each block of a device lies. Pure; its owner holds a lock around changes.

A dict per namespace from key to a number (segment slot and place in the segment), and columns per segment for
the rest: a block costs about 200 bytes of memory, its key and parent included, and nothing of it is tracked
by the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncaked.errors import IntegrityError

ORDINAL_BITS = 24
ORDINALS_MAX = 1 << ORDINAL_BITS  # blocks in one segment


class Removal(NamedTuple):
    """A block that ceased to be there when `before` blocks of the segment had been written."""

    before: int
    namespace: str
    key: bytes


@dataclass(slots=True)
class SegmentBlocks:
    """What was written into a segment, in order; the place of a block in these columns is its ordinal."""

    names: list[str] = field(default_factory=list)  # namespaces
    name_of: array[int] = field(default_factory=lambda: array("I"))  # index into names
    keys: list[bytes] = field(default_factory=list)
    parents: list[bytes | None] = field(default_factory=list)
    metas: dict[int, bytes] = field(default_factory=dict)  # by ordinal, of those that have one
    sizes: array[int] = field(default_factory=lambda: array("I"))  # bytes
    offsets: array[int] = field(default_factory=lambda: array("I"))  # bytes, in the segment
    checksums: array[int] = field(default_factory=lambda: array("Q"))  # XXH3-64
    removals: list[Removal] = field(default_factory=list)
    used: bytearray = field(default_factory=bytearray)  # 1: was read since it was written; by ordinal
    live_blocks: int = 0
    live_bytes: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def name_number(self, namespace: str) -> int:
        """Index of the namespace in `names`, where it is put when it is new."""
        try:
            return self.names.index(namespace)  # a segment has few
        except ValueError:
            self.names.append(namespace)
            return len(self.names) - 1

    def append(
        self,
        namespace: str,
        key: bytes,
        parent: bytes | None,
        meta: bytes,
        size: int,
        offset: int,
        checksum: int,
    ) -> int:
        """Note a block; returns its ordinal."""
        ordinal = len(self.keys)
        self.name_of.append(self.name_number(namespace))
        self.keys.append(key)
        self.parents.append(parent)
        if meta:
            self.metas[ordinal] = meta
        self.sizes.append(size)
        self.offsets.append(offset)
        self.checksums.append(checksum)
        self.used.append(0)
        return ordinal

    def share_parents(self) -> None:
        """Let parents that are keys of this segment be the same objects."""
        own = dict(zip(self.keys, self.keys, strict=True))
        self.parents = [parent if parent is None else own.get(parent, parent) for parent in self.parents]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the columns fit together."""
        count = len(self.keys)
        columns = (self.name_of, self.parents, self.sizes, self.offsets, self.checksums)
        if any(len(column) != count for column in columns) or len(self.used) not in (0, count):
            raise IntegrityError(what="a segment's blocks", detail=f"columns differ from {count} keys")
        if any(number >= len(self.names) for number in self.name_of):
            raise IntegrityError(what="a segment's blocks", detail="a block has no namespace")
        before = [0, *(removal.before for removal in self.removals), count]
        if before != sorted(before):
            raise IntegrityError(what="a segment's blocks", detail="removals are out of order")
        if any(not 0 <= ordinal < count for ordinal in self.metas):
            raise IntegrityError(what="a segment's blocks", detail="meta of a block that is not there")


class Index:
    """All blocks of a device that can be read. `find` and `has` need no lock."""

    def __init__(self) -> None:
        self._names: dict[str, dict[bytes, int]] = {}
        self._segments: dict[int, SegmentBlocks] = {}  # by slot

    def __len__(self) -> int:
        return sum(map(len, self._names.values()))

    def has(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are there."""
        known = self._names.get(namespace)
        return [key in known for key in keys] if known else [False] * len(keys)

    def find(self, namespace: str, key: bytes) -> int | None:
        """The location of a block."""
        known = self._names.get(namespace)
        return known.get(key) if known else None

    def blocks_at(self, location: int) -> tuple[SegmentBlocks, int]:
        """The columns and the ordinal that a location stands for."""
        return self._segments[location >> ORDINAL_BITS], location & (ORDINALS_MAX - 1)

    def blocks_of(self, slot: int) -> SegmentBlocks:
        """The columns of a segment; raises `KeyError` where it has none."""
        return self._segments[slot]

    def begin(self, slot: int, blocks: SegmentBlocks | None = None) -> SegmentBlocks:
        """Take a segment in: an empty one, or `blocks` that were read back, which come after all others."""
        if blocks is None:
            blocks = SegmentBlocks()
            self._segments[slot] = blocks
            return blocks
        blocks.used = bytearray(len(blocks))
        self._segments[slot] = blocks
        self._replay(slot, blocks)
        return blocks

    def _replay(self, slot: int, blocks: SegmentBlocks) -> None:
        blocks.live_blocks, blocks.live_bytes = len(blocks), sum(blocks.sizes)
        start = 0
        for removal in blocks.removals:
            self._replay_range(slot, blocks, range(start, removal.before))
            self.remove(removal.namespace, removal.key)
            start = removal.before
        self._replay_range(slot, blocks, range(start, len(blocks)))

    def _replay_range(self, slot: int, blocks: SegmentBlocks, ordinals: range) -> None:
        """A million times at a start, so with as little as possible for each."""
        dicts = [self._names.setdefault(name, {}) for name in blocks.names]
        keys, name_of, base = blocks.keys, blocks.name_of, slot << ORDINAL_BITS
        for ordinal in ordinals:
            known, key = dicts[name_of[ordinal]], keys[ordinal]
            old = known.get(key)
            known[key] = base | ordinal
            if old is not None:
                self._forget(old)

    def put(self, slot: int, namespace: str, key: bytes, ordinal: int) -> None:
        """A block of a segment is readable, in place of an older one of that name."""
        known = self._names.setdefault(namespace, {})
        old = known.get(key)
        known[key] = (slot << ORDINAL_BITS) | ordinal
        blocks = self._segments[slot]
        blocks.live_blocks += 1
        blocks.live_bytes += blocks.sizes[ordinal]
        if old is not None:
            self._forget(old)

    def remove(self, namespace: str, key: bytes) -> int | None:
        """A block is not readable any more; returns where it was."""
        known = self._names.get(namespace)
        location = known.pop(key, None) if known else None
        if location is not None:
            self._forget(location)
        return location

    def _forget(self, location: int) -> None:
        blocks, ordinal = self.blocks_at(location)
        blocks.live_blocks -= 1
        blocks.live_bytes -= blocks.sizes[ordinal]

    def live(self, slot: int) -> Iterator[int]:
        """Ordinals of the blocks of a segment that are readable."""
        blocks = self._segments[slot]
        dicts = [self._names.get(name, {}) for name in blocks.names]
        base = slot << ORDINAL_BITS
        for ordinal, (key, name) in enumerate(zip(blocks.keys, blocks.name_of, strict=True)):
            if dicts[name].get(key) == base | ordinal:
                yield ordinal

    def end(self, slot: int) -> None:
        """Forget a segment, of which no block is readable any more; raises `IntegrityError` if one is."""
        blocks = self._segments[slot]
        if blocks.live_blocks:
            detail = f"segment {slot} ends with {blocks.live_blocks} blocks"
            raise IntegrityError(what="the SSD index", detail=detail)
        del self._segments[slot]
        self._names = {name: known for name, known in self._names.items() if known}

    def clear(self) -> None:
        """Forget everything."""
        self._names, self._segments = {}, {}

    def live_bytes(self) -> int:
        """Bytes of all values that are readable."""
        return sum(blocks.live_bytes for blocks in self._segments.values())

    def slots(self) -> list[int]:
        """Segments that were taken in."""
        return list(self._segments)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless dicts and segments agree."""
        for slot, blocks in self._segments.items():
            blocks.check_integrity()
            ordinals = list(self.live(slot))
            found = (len(ordinals), sum(blocks.sizes[ordinal] for ordinal in ordinals))
            if found != (blocks.live_blocks, blocks.live_bytes):
                detail = f"segment {slot} counts {blocks.live_blocks, blocks.live_bytes}, has {found}"
                raise IntegrityError(what="the SSD index", detail=detail)
        total = sum(blocks.live_blocks for blocks in self._segments.values())
        if total != len(self):
            detail = f"{len(self)} names for {total} blocks"
            raise IntegrityError(what="the SSD index", detail=detail)
