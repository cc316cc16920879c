"""The table of a whole segment, so that a restart reads two pieces of each instead of every header. Pure.

By columns, which decode many times faster than rows: a million blocks are back in about a second.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import NamedTuple

import msgspec
import xxhash

from mooncaked.errors import IntegrityError
from mooncaked.pools.ssd.aligned import PAGE, pages_up
from mooncaked.pools.ssd.index import Removal, SegmentBlocks
from mooncaked.pools.ssd.layout import FORMAT

TRAILER_MAGIC = b"MCSSDEND"
_NO_PARENT, _FOREIGN_PARENT = -1, -2

# magic, format, owner, generation, position and bytes of the table, end of the groups, groups, table's
# checksum
_TRAILER = struct.Struct("<8sI16sQQQQQQ")
_SUM = struct.Struct("<Q")


class Removals(msgspec.Struct, frozen=True, array_like=True):
    """A removal, and how many blocks of the segment were written before it."""

    before: int
    namespace: str
    key: bytes


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a segment in the order in which they were written. Numbers are little-endian."""

    names: list[str]  # namespaces
    name_of: bytes  # u32: index into names
    key_lengths: bytes  # u16
    keys: bytes
    parent_of: bytes  # i32: the block of this segment that is the parent, or -1 none, -2 the next of:
    foreign_parents: list[bytes]
    metas: dict[int, bytes]  # of the blocks that have one
    sizes: bytes  # u32
    offsets: bytes  # u32
    checksums: bytes  # u64
    removals: list[Removals]


class Trailer(NamedTuple):
    """Where the table of a segment is."""

    generation: int
    table_at: int  # bytes, in the segment
    table_bytes: int
    end: int  # of the last group, bytes
    groups: int
    checksum: int  # XXH3-64 of the table


_decoder = msgspec.msgpack.Decoder(Columns)


def encode_table(blocks: SegmentBlocks) -> bytes:
    """The table of `blocks`."""
    own = {key: number for number, key in enumerate(blocks.keys)}
    parent_of = array("i")
    foreign: list[bytes] = []
    for parent in blocks.parents:
        number = _NO_PARENT if parent is None else own.get(parent, _FOREIGN_PARENT)
        if number == _FOREIGN_PARENT and parent is not None:
            foreign.append(parent)
        parent_of.append(number)
    columns = Columns(
        names=blocks.names,
        name_of=_out(blocks.name_of),
        key_lengths=_out(array("H", map(len, blocks.keys))),
        keys=b"".join(blocks.keys),
        parent_of=_out(parent_of),
        foreign_parents=foreign,
        metas=blocks.metas,
        sizes=_out(blocks.sizes),
        offsets=_out(blocks.offsets),
        checksums=_out(blocks.checksums),
        removals=[Removals(r.before, r.namespace, r.key) for r in blocks.removals],
    )
    return msgspec.msgpack.encode(columns)


def decode_table(data: bytes | memoryview, trailer: Trailer) -> SegmentBlocks | None:
    """The blocks of a table; None where it is not what was written."""
    if len(data) != trailer.table_bytes or xxhash.xxh3_64_intdigest(data) != trailer.checksum:
        return None
    try:
        columns = _decoder.decode(data)
        return _rebuild(columns, trailer.end)
    except (msgspec.DecodeError, UnicodeDecodeError, IntegrityError, ValueError):
        return None  # the checksum holds, so another program wrote it; the groups' headers decide


def _rebuild(columns: Columns, end: int) -> SegmentBlocks:
    keys = _cut(columns.keys, _in("H", columns.key_lengths))
    foreign = iter(columns.foreign_parents)
    parents: list[bytes | None] = [
        keys[ref] if ref >= 0 else None if ref == _NO_PARENT else next(foreign, None)
        for ref in _in("i", columns.parent_of)
    ]
    blocks = SegmentBlocks(
        names=columns.names,
        name_of=_in("I", columns.name_of),
        keys=keys,
        parents=parents,
        metas=columns.metas,
        sizes=_in("I", columns.sizes),
        offsets=_in("I", columns.offsets),
        checksums=_in("Q", columns.checksums),
        removals=[Removal(r.before, r.namespace, r.key) for r in columns.removals],
    )
    blocks.check_integrity()
    if any(offset + size > end for offset, size in zip(blocks.offsets, blocks.sizes, strict=True)):
        raise IntegrityError(what="a segment's table", detail=f"a block ends after the groups, at {end}")
    return blocks


def _cut(data: bytes, lengths: array[int]) -> list[bytes]:
    if lengths and min(lengths) == max(lengths):
        step = lengths[0]
        return [data[at : at + step] for at in range(0, len(data), step)]
    keys, at = [], 0
    for length in lengths:
        keys.append(data[at : at + length])
        at += length
    return keys


def _out(column: array[int]) -> bytes:
    if sys.byteorder != "little":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def _in(kind: str, data: bytes) -> array[int]:
    column: array[int] = array(kind)
    column.frombytes(data)
    if sys.byteorder != "little":
        column.byteswap()
    return column


def footer_bound(rows_bound: int) -> int:
    """Bytes to keep for table and trailer, where the rows need at most `rows_bound`."""
    return pages_up(rows_bound + 1024) + PAGE


def encode_footer(owner: bytes, generation: int, end: int, groups: int, table: bytes, room: int) -> bytes:
    """Table and trailer, in whole pages, to be written so that they end with the segment of `room` bytes."""
    table_pages = pages_up(len(table))
    at = room - PAGE - table_pages
    head = _TRAILER.pack(
        TRAILER_MAGIC,
        FORMAT,
        owner,
        generation,
        at,
        len(table),
        end,
        groups,
        xxhash.xxh3_64_intdigest(table),
    )
    trailer = head + _SUM.pack(xxhash.xxh3_64_intdigest(head))
    return table.ljust(table_pages, b"\0") + trailer.ljust(PAGE, b"\0")


def decode_trailer(page: bytes | memoryview, owner: bytes, segment_bytes: int) -> Trailer | None:
    """The trailer in a segment's last page; None for what is not, to the last bit, one of this owner."""
    if len(page) < _TRAILER.size + _SUM.size:
        return None
    magic, version, found, *rest = _TRAILER.unpack_from(page)
    (stored,) = _SUM.unpack_from(page, _TRAILER.size)
    if (magic, version, found) != (TRAILER_MAGIC, FORMAT, owner):
        return None
    if stored != xxhash.xxh3_64_intdigest(bytes(page[: _TRAILER.size])):
        return None
    trailer = Trailer(*rest)
    end = trailer.table_at + pages_up(trailer.table_bytes)
    return trailer if trailer.end <= trailer.table_at and end == segment_bytes - PAGE else None
