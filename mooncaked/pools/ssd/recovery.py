"""What a directory holds, read back after a restart or a crash at any point.

Of a full segment, two pieces are read: the trailer and the table. Of one that was still being written, the
headers of its groups, one after the other. Only its last group may be torn, since each was synced before the
next began; so the values of that one are compared with their checksums here, those of others when they are
read.

A segment that cannot be made sense of is given up. Blocks that were removed by a group that is lost with it
may come back, with the bytes that they had.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from mooncaked.pools.ssd.aligned import PAGE, aligned_buffer
from mooncaked.pools.ssd.books import Books, Segment
from mooncaked.pools.ssd.disk import read_all
from mooncaked.pools.ssd.files import SegmentFiles
from mooncaked.pools.ssd.footer import Trailer, decode_table, decode_trailer
from mooncaked.pools.ssd.health import FAILURES_MAX
from mooncaked.pools.ssd.index import Removal, SegmentBlocks
from mooncaked.pools.ssd.layout import (
    TABLE_BYTES_MAX,
    Group,
    decode_free,
    find_header,
    row_bound,
)
from mooncaked.pools.ssd.model import Progress

_THREADS = 4
_HEADER_BYTES = 64 << 10  # read where a header begins: both copies of nearly all of them
_HEADER_BYTES_MAX = 2 * (TABLE_BYTES_MAX + PAGE)


@dataclass(slots=True)
class Found:
    """What a segment file holds."""

    slot: int
    generation: int = 0  # 0: it was never written
    blocks: SegmentBlocks | None = None  # None: it is free
    end: int = 0  # bytes: of its last group
    groups: int = 0
    sealed: bool = False  # has a table of its own
    damaged: int = 0  # tables and segments that cannot be read
    torn: bool = False  # its last group was not whole
    error: OSError | None = None  # why it could not be read
    unusable: bool = False  # cannot be read, or does not say which generation it is of


def recover(books: Books, slots: Sequence[int], progress: Progress) -> list[Found]:
    """Read all segments into the books' index; returns what was found, oldest first. Raises `OSError`."""
    scanner = Scanner(books.files, books.owner)
    found: list[Found] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ssd-open") as threads:
        for one in threads.map(scanner.try_read, slots):
            found.append(one)
            progress(len(found), len(slots))
    errors = [one.error for one in found if one.error is not None]
    if errors and (len(errors) == len(found) or len(errors) >= FAILURES_MAX):
        raise errors[0]
    for error in errors:
        books.health.note(
            "read_error", str(error), "check the disk (dmesg, smartctl); the segment is given up"
        )
    found.sort(key=lambda one: one.generation)
    for one in found:
        books.generation = max(books.generation, one.generation)
        if one.blocks is None:
            if not one.unusable:
                books.free.append(one.slot)
            continue
        segment = Segment(one.slot, one.generation, one.end, one.groups)
        if not one.sealed:
            segment.rows_bound = _rows_bound(one.blocks)
            one.blocks.share_parents()
        books.segments[one.slot] = segment
        books.index.begin(one.slot, one.blocks)
    return found


def _rows_bound(blocks: SegmentBlocks) -> int:
    rows = zip(blocks.name_of, blocks.keys, blocks.parents, strict=True)
    bound = sum(row_bound(blocks.names[name], key, parent, b"") for name, key, parent in rows)
    bound += sum(map(len, blocks.metas.values()))
    return bound + sum(row_bound(removal.namespace, removal.key, None, b"") for removal in blocks.removals)


class Scanner:
    """Reads segments of one directory; for any number of threads."""

    def __init__(self, files: SegmentFiles, owner: bytes) -> None:
        self._files = files
        self._owner = owner
        self._size = files.segment_bytes

    def try_read(self, slot: int) -> Found:
        """What a segment file holds, or why that is not known."""
        try:
            return self.read(slot)
        except OSError as error:
            return Found(slot, damaged=1, error=error, unusable=True)

    def read(self, slot: int) -> Found:
        """What a segment file holds; raises `OSError`."""
        with self._files.use(slot) as fd:
            first = self._at(fd, 0, PAGE)
            if (generation := decode_free(first, self._owner)) is not None:
                return Found(slot, generation)
            group = self._group(fd, 0)
            last = self._at(fd, self._size - PAGE, PAGE)
            trailer = decode_trailer(last, self._owner, self._size)
            if trailer is not None and (group is None or group.generation == trailer.generation):
                return self._sealed(fd, slot, trailer)
            if group is None:
                return Found(slot, unusable=any(first))
            return self._scan(fd, slot, group.generation)

    def _sealed(self, fd: int, slot: int, trailer: Trailer) -> Found:
        blocks = decode_table(self._at(fd, trailer.table_at, trailer.table_bytes), trailer)
        if blocks is None:
            found = self._scan(fd, slot, trailer.generation)
            found.damaged += 1
            return found
        return Found(slot, trailer.generation, blocks, trailer.end, trailer.groups, sealed=True)

    def _scan(self, fd: int, slot: int, generation: int) -> Found:
        """Read a segment by the headers of its groups."""
        found = Found(slot, generation, SegmentBlocks())
        last: Group | None = None
        while (group := self._group(fd, last.end if last else 0)) is not None:
            if (group.generation, group.number) != (generation, last.number + 1 if last else 0):
                break
            if last is not None:
                self._take(found, last, [True] * len(last.table.blocks))
            last = group
        if last is not None:
            self._take_last(fd, found, last)
        return found

    def _take_last(self, fd: int, found: Found, group: Group) -> None:
        """Take the group that may be torn: what of it is whole."""
        payload = self._at(fd, group.payload_at, group.payload_bytes)
        whole = [
            xxhash.xxh3_64_intdigest(payload[row.offset : row.offset + row.size]) == row.checksum
            for row in group.table.blocks
        ]
        found.torn = not all(whole)
        if any(whole) or not whole:
            self._take(found, group, whole)

    def _take(self, found: Found, group: Group, whole: Sequence[bool]) -> None:
        blocks, table = found.blocks, group.table
        if blocks is None:
            return
        blocks.removals += [Removal(len(blocks), table.names[row.name], row.key) for row in table.removals]
        for row, good in zip(table.blocks, whole, strict=True):
            if good:
                offset = group.payload_at + row.offset
                name = table.names[row.name]
                blocks.append(name, row.key, row.parent, row.meta, row.size, offset, row.checksum)
        found.end, found.groups = group.end, group.number + 1

    def _group(self, fd: int, at: int) -> Group | None:
        """The group that begins at `at`. Nearly all headers are short; the end of the groups looks like a
        damaged one, so its copy is looked for as far as the longest may reach."""
        for size in (_HEADER_BYTES, _HEADER_BYTES_MAX):
            data = self._at(fd, at, min(size, self._size - at))
            if (group := find_header(data, self._owner, at, self._size)) is not None:
                return group
        return None

    def _at(self, fd: int, at: int, size: int) -> memoryview:
        """Bytes of the file; fewer where it ends."""
        buffer = aligned_buffer(size)
        if not read_all(self._files.disk, fd, [buffer], at):
            return buffer[:0]
        return buffer[:size]
