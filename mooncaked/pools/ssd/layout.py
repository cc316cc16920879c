"""How a segment looks on disk. Pure: bytes in, structs out, and back.

A segment is a preallocated file. Groups follow each other from its start; each is a header of whole pages and
then its payload, and was written and synced as one before the next began:

    page 0       a group's header, or a mark that the segment is free
    ...          that group's payload; the next group; ...
    ...          room that is left (zeros, or what an earlier use of the file left behind)
    table        once it is full: the headers of all groups in one (mooncaked.pools.ssd.footer)
    last page    the trailer: where that table is

A header is there twice, one after the other, so that a damaged page costs no more than the blocks in it.
Whatever an earlier use left behind has another generation in its header, and is not mistaken for a group.
A header carries its owner, its own position and a checksum of itself, so that it counts only where it was
written; each block has a checksum of its own. The owner is a random number out of the manifest, which
nobody who stores blocks can know: so no value can be made to look like a header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from mooncaked.pools.ssd.aligned import PAGE, pages_up

FORMAT = 1
GROUP_MAGIC = b"MCSSDGRP"
FREE_MAGIC = b"MCSSDFRE"
GROUP_BLOCKS_MAX = 8192
TABLE_BYTES_MAX = 2 << 20  # of one group
PACKED_BYTES_MAX = 32 << 10  # blocks below this that fill no whole pages share pages with others
_PACKED_ALIGN = 16

# magic, format, header pages, owner, generation, group, position, payload bytes, table bytes, blocks
_HEAD = struct.Struct("<8sII16sQQQQII")
_SUM = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SUM.size


class BlockRow(msgspec.Struct, frozen=True, array_like=True):
    """A block in a group's table."""

    name: int  # index into the table's namespaces
    key: bytes
    parent: bytes | None
    meta: bytes
    size: int  # bytes
    checksum: int  # XXH3-64 of the value
    offset: int  # bytes, from the start of the payload


class RemovalRow(msgspec.Struct, frozen=True, array_like=True):
    """A block that ceased to be there before this group: whatever older groups say of it counts no more."""

    name: int
    key: bytes


class GroupTable(msgspec.Struct, frozen=True, array_like=True):
    """What a group holds. Removals come before blocks."""

    names: list[str]  # namespaces
    removals: list[RemovalRow]
    blocks: list[BlockRow]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group as its header describes it."""

    generation: int  # of the segment
    number: int  # of the group in the segment, from 0
    position: int  # bytes, of its header in the segment
    header_bytes: int  # of both copies
    payload_bytes: int
    table: GroupTable

    @property
    def payload_at(self) -> int:
        """Where in the segment the payload begins."""
        return self.position + self.header_bytes

    @property
    def end(self) -> int:
        """Where in the segment the next group may begin."""
        return self.payload_at + self.payload_bytes


class Head(NamedTuple):
    """The fixed part of a header, not checked yet beyond its magic and format."""

    pages: int
    owner: bytes
    generation: int
    number: int
    position: int
    payload_bytes: int
    table_bytes: int
    blocks: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupTable)


def is_packed(size: int) -> bool:
    """Whether a block of that size shares pages with others."""
    return (size % PAGE != 0 and size < PACKED_BYTES_MAX) or size == 0


class Placed(NamedTuple):
    """Where the blocks of a group come to lie."""

    offsets: list[int]  # bytes, from the start of the payload, in the order of the sizes
    packed_at: int  # bytes: where the pages that are shared begin
    payload_bytes: int  # whole pages


def place(sizes: Sequence[int]) -> Placed:
    """Lay blocks of those sizes out: those with pages of their own first, then those that share."""
    offsets = [0] * len(sizes)
    end = 0
    for number, size in enumerate(sizes):
        if not is_packed(size):
            offsets[number] = end
            end += pages_up(size)
    packed_at = end
    for number, size in enumerate(sizes):
        if is_packed(size):
            offsets[number] = end
            end += -(-size // _PACKED_ALIGN) * _PACKED_ALIGN
    return Placed(offsets, packed_at, pages_up(end))


def payload_bound(size: int) -> int:
    """Bytes that a block of that size adds to a payload at most, beside one page for the group."""
    return -(-size // _PACKED_ALIGN) * _PACKED_ALIGN if is_packed(size) else pages_up(size)


def row_bound(namespace: str, key: bytes, parent: bytes | None, meta: bytes) -> int:
    """Bytes that a block or removal adds to a table at most, be it a group's or a segment's."""
    return len(key) + len(parent or b"") + len(meta) + 4 * len(namespace) + 80


def encode_header(
    owner: bytes, generation: int, number: int, position: int, payload_bytes: int, table: GroupTable
) -> bytes:
    """The header of a group in whole pages, twice."""
    body = _encoder.encode(table)
    pages = pages_up(HEAD_BYTES + len(body)) // PAGE
    blocks = len(table.blocks)
    head = _HEAD.pack(
        GROUP_MAGIC, FORMAT, pages, owner, generation, number, position, payload_bytes, len(body), blocks
    )
    return 2 * (head + _SUM.pack(_sum(head, body)) + body).ljust(pages * PAGE, b"\0")


def find_header(data: memoryview, owner: bytes, position: int, segment_bytes: int) -> Group | None:
    """The group at `position`, from where `data` was read; by the header's copy where the first is
    damaged."""
    if (group := decode_header(data, owner, position, segment_bytes)) is not None:
        return group
    for page in range(1, len(data) // PAGE):
        copy = data[page * PAGE :]
        if (head := peek(copy)) is not None and (head.pages, head.position) == (page, position):
            return decode_header(copy, owner, position, segment_bytes)
    return None


def peek(page: bytes | memoryview) -> Head | None:
    """The fixed part of a header of this format; None where there is none, or its lengths cannot be."""
    if len(page) < HEAD_BYTES:
        return None
    magic, version, pages, *rest = _HEAD.unpack_from(page)
    head = Head(pages, *rest)
    if magic != GROUP_MAGIC or version != FORMAT or head.table_bytes > TABLE_BYTES_MAX:
        return None
    return head if pages_up(HEAD_BYTES + head.table_bytes) == pages * PAGE else None


def decode_header(data: bytes | memoryview, owner: bytes, position: int, segment_bytes: int) -> Group | None:
    """The group whose header `data` (whole pages from `position` on) starts with; None for anything that is
    not, to the last bit, what this owner wrote there."""
    head = peek(data)
    if head is None or head.owner != owner or head.position != position:
        return None
    if head.pages * PAGE > len(data):
        return None
    body = bytes(data[HEAD_BYTES : HEAD_BYTES + head.table_bytes])
    (stored,) = _SUM.unpack_from(data, _HEAD.size)
    if stored != _sum(bytes(data[: _HEAD.size]), body):
        return None
    try:
        table = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    group = Group(
        generation=head.generation,
        number=head.number,
        position=position,
        header_bytes=2 * head.pages * PAGE,
        payload_bytes=head.payload_bytes,
        table=table,
    )
    return group if _is_sound(group, head.blocks, segment_bytes) else None


def _is_sound(group: Group, blocks: int, segment_bytes: int) -> bool:
    names = len(group.table.names)
    return (
        len(group.table.blocks) == blocks
        and group.payload_bytes % PAGE == 0
        and group.end <= segment_bytes - PAGE
        and all(0 <= row.name < names for row in group.table.removals)
        and all(
            0 <= row.name < names and row.offset >= 0 and 0 <= row.size <= group.payload_bytes - row.offset
            for row in group.table.blocks
        )
    )


def encode_free(owner: bytes, generation: int) -> bytes:
    """The page that marks a segment as free; `generation` was its last use."""
    head = _HEAD.pack(FREE_MAGIC, FORMAT, 1, owner, generation, 0, 0, 0, 0, 0)
    return (head + _SUM.pack(_sum(head, b""))).ljust(PAGE, b"\0")


def decode_free(page: bytes | memoryview, owner: bytes) -> int | None:
    """The generation in a mark that the segment is free; None for anything else."""
    if len(page) < HEAD_BYTES:
        return None
    magic, version, _, found, generation, *_ = _HEAD.unpack_from(page)
    (stored,) = _SUM.unpack_from(page, _HEAD.size)
    if (magic, version, found) != (FREE_MAGIC, FORMAT, owner):
        return None
    return int(generation) if stored == _sum(bytes(page[: _HEAD.size]), b"") else None


def _sum(head: bytes, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=xxhash.xxh3_64_intdigest(head))
