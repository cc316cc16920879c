"""One group written into a segment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from mooncaked.failpoints import failpoint
from mooncaked.pools.ssd.aligned import PAGE, Staging, is_aligned, pages_up
from mooncaked.pools.ssd.books import Books, Segment
from mooncaked.pools.ssd.disk import IOV_MAX, write_all
from mooncaked.pools.ssd.index import Removal
from mooncaked.pools.ssd.layout import (
    BlockRow,
    GroupTable,
    RemovalRow,
    encode_header,
    is_packed,
    place,
    row_bound,
)
from mooncaked.pools.ssd.model import SsdItem

_STAGING_KEEP = 32 << 20  # bytes of memory that are kept for the next group
_ZEROS = memoryview(bytes(PAGE))


class GroupWriter:
    """Writes groups; for one thread at a time."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._staging = Staging(_STAGING_KEEP)

    def write(
        self, segment: Segment, items: Sequence[SsdItem], removals: Sequence[tuple[str, bytes]]
    ) -> list[int]:
        """Write a group at the segment's end and sync it; returns where in the segment each value lies. Items
        have their checksums. Raises `OSError`, and the segment is then as before."""
        table, offsets, payload_bytes, packed_at = _table(items, removals)
        header = encode_header(
            self._books.owner, segment.generation, segment.groups, segment.end, payload_bytes, table
        )
        self._staging.reset()
        buffers = [self._staged(header), *self._payload(items, offsets, packed_at, payload_bytes)]
        try:
            with self._books.files.use(segment.slot) as fd:
                failpoint("ssd.commit.before_write")
                self._write(fd, buffers, segment.end)
                failpoint("ssd.commit.before_sync")
                self._books.files.disk.fdatasync(fd)
        except OSError:
            segment.failures += 1
            self._blot(segment)
            raise
        failpoint("ssd.commit.before_publish")
        at = segment.end + len(header)
        segment.end = at + payload_bytes
        segment.groups += 1
        self._books.counters.device_written_bytes += len(header) + payload_bytes
        return [at + offset for offset in offsets]

    def _write(self, fd: int, buffers: list[memoryview], at: int) -> None:
        """In as few calls as there can be, header first: a group counts only when all of it is there."""
        for start in range(0, len(buffers), IOV_MAX):
            if start:
                failpoint("ssd.commit.between_writes")
            at += write_all(self._books.files.disk, fd, buffers[start : start + IOV_MAX], at)

    def _blot(self, segment: Segment) -> None:
        """Let the place of a failed group hold no header, if the disk still lets us."""
        with suppress(OSError), self._books.files.use(segment.slot) as fd:
            self._staging.reset()
            write_all(self._books.files.disk, fd, [self._staged(bytes(PAGE))], segment.end)
            self._books.files.disk.fdatasync(fd)

    def _staged(self, data: bytes) -> memoryview:
        piece = self._staging.take(len(data))
        piece[: len(data)] = data
        return piece[: len(data)]

    def _payload(
        self, items: Sequence[SsdItem], offsets: Sequence[int], packed_at: int, payload_bytes: int
    ) -> list[memoryview]:
        """The values in whole pages, in the order in which they lie: from the caller's memory where O_DIRECT
        takes that, from copies of ours otherwise."""
        buffers: list[memoryview] = []
        packed = self._staging.take(payload_bytes - packed_at) if payload_bytes > packed_at else None
        for item, offset in zip(items, offsets, strict=True):
            size, data = item.data.nbytes, item.data
            if packed is not None and is_packed(size):
                packed[offset - packed_at : offset - packed_at + size] = data
                continue
            whole = size - size % PAGE if is_aligned(data) else 0
            if whole:
                buffers.append(data[:whole])
            if rest := size - whole:
                piece = self._staging.take(rest)
                piece[:rest] = data[whole:]
                piece[rest:] = _ZEROS[: len(piece) - rest]
                buffers.append(piece)
        return buffers if packed is None else [*buffers, packed[: pages_up(payload_bytes - packed_at)]]

    def note(
        self,
        segment: Segment,
        items: Sequence[SsdItem],
        removals: Sequence[tuple[str, bytes]],
        offsets: Sequence[int],
    ) -> list[int]:
        """Take a group that is durable into the segment's columns; returns the ordinals of its blocks. Under
        the books' lock."""
        if self._books.segments.get(segment.slot) is not segment:
            return [0] * len(items)  # the device was taken out meanwhile
        blocks = self._books.index.blocks_of(segment.slot)
        blocks.removals += [Removal(len(blocks), *name) for name in removals]
        segment.rows_bound += sum(row_bound(*name, None, b"") for name in removals)
        segment.rows_bound += sum(row_bound(i.namespace, i.key, i.parent, i.meta) for i in items)
        return [
            blocks.append(i.namespace, i.key, i.parent, i.meta, i.data.nbytes, offset, i.checksum or 0)
            for i, offset in zip(items, offsets, strict=True)
        ]


def _table(
    items: Sequence[SsdItem], removals: Sequence[tuple[str, bytes]]
) -> tuple[GroupTable, list[int], int, int]:
    """The table of a group, the offsets of its values, the bytes of its payload, and where those begin that
    share pages."""
    numbers: dict[str, int] = {}
    placed = place([item.data.nbytes for item in items])
    gone = [RemovalRow(numbers.setdefault(name, len(numbers)), key) for name, key in removals]
    rows = [
        BlockRow(
            name=numbers.setdefault(item.namespace, len(numbers)),
            key=item.key,
            parent=item.parent,
            meta=item.meta,
            size=item.data.nbytes,
            checksum=item.checksum or 0,
            offset=offset,
        )
        for item, offset in zip(items, placed.offsets, strict=True)
    ]
    return GroupTable(list(numbers), gone, rows), placed.offsets, placed.payload_bytes, placed.packed_at
