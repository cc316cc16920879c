"""What lies in a segment, byte by byte."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mooncaked.pools.ssd.aligned import PAGE
from mooncaked.pools.ssd.footer import decode_table, decode_trailer, encode_footer, encode_table
from mooncaked.pools.ssd.index import Removal, SegmentBlocks
from mooncaked.pools.ssd.layout import (
    BlockRow,
    GroupTable,
    RemovalRow,
    decode_free,
    decode_header,
    encode_free,
    encode_header,
    find_header,
    is_packed,
    place,
)

OWNER, OTHER = bytes(range(16)), bytes(16)
SEGMENT = 64 * PAGE
TABLE = GroupTable(
    names=["a", "tenant/модель"],
    removals=[RemovalRow(1, b"gone")],
    blocks=[
        BlockRow(0, b"k1", None, b"", 4096, 2**64 - 1, 0),
        BlockRow(1, b"k2", b"k1", b"meta", 0, 7, 4096),
    ],
)


def header(position: int = 8 * PAGE) -> bytes:
    return encode_header(OWNER, 5, 3, position, 2 * PAGE, TABLE)


def test_a_header_comes_back_as_it_was_written() -> None:
    group = decode_header(header(), OWNER, 8 * PAGE, SEGMENT)
    assert group is not None
    assert (group.generation, group.number, group.table) == (5, 3, TABLE)
    assert (group.header_bytes, group.payload_at, group.end) == (2 * PAGE, 10 * PAGE, 12 * PAGE)


@pytest.mark.parametrize(
    ("owner", "position", "segment"),
    [(OTHER, 8 * PAGE, SEGMENT), (OWNER, 9 * PAGE, SEGMENT), (OWNER, 8 * PAGE, 12 * PAGE)],
)
def test_a_header_counts_only_where_it_was_written(owner: bytes, position: int, segment: int) -> None:
    assert decode_header(header(), owner, position, segment) is None


def test_any_flipped_bit_in_a_header_is_seen_and_the_copy_counts() -> None:
    whole = header()
    used = next(n for n in range(PAGE, 0, -1) if whole[n - 1])
    for at in range(used):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        assert decode_header(damaged, OWNER, 8 * PAGE, SEGMENT) is None
        assert find_header(memoryview(damaged), OWNER, 8 * PAGE, SEGMENT) is not None
        damaged[PAGE + at] ^= 1
        assert find_header(memoryview(damaged), OWNER, 8 * PAGE, SEGMENT) is None


def test_blocks_of_whole_pages_are_aligned_and_small_ones_share_pages() -> None:
    sizes = [100, 8192, 0, 5000, 4096, 40_000]
    placed = place(sizes)
    extents = sorted((o, o + s) for o, s in zip(placed.offsets, sizes, strict=True))
    assert all(end <= start for (_, end), (start, _) in pairwise(extents))
    assert [o % PAGE for o, s in zip(placed.offsets, sizes, strict=True) if not is_packed(s)] == [0, 0, 0]
    assert placed.payload_bytes == placed.packed_at + 2 * PAGE == (2 + 1 + 10 + 2) * PAGE


def test_a_mark_of_a_free_segment() -> None:
    page = encode_free(OWNER, 9)
    assert decode_free(page, OWNER) == 9
    assert decode_free(page, OTHER) is None
    assert decode_free(bytes(PAGE), OWNER) is None
    assert decode_header(page, OWNER, 0, SEGMENT) is None


def blocks() -> SegmentBlocks:
    made = SegmentBlocks()
    made.append("a", b"k1", None, b"", 4096, 4096, 1)
    made.append("b", b"longer key", b"k1", b"meta", 17, 8192, 2**64 - 1)
    made.append("a", b"k3", b"elsewhere", b"", 0, 8300, 3)
    made.removals.append(Removal(1, "b", b"gone"))
    return made


def test_a_segments_table_comes_back_as_it_was_written() -> None:
    footer = encode_footer(OWNER, 5, 3 * PAGE, 2, encode_table(blocks()), SEGMENT)
    trailer = decode_trailer(footer[-PAGE:], OWNER, SEGMENT)
    assert trailer is not None
    assert trailer.table_at == SEGMENT - len(footer)
    assert (trailer.generation, trailer.end, trailer.groups) == (5, 3 * PAGE, 2)
    assert decode_trailer(footer[-PAGE:], OTHER, SEGMENT) is None
    back = decode_table(footer[: trailer.table_bytes], trailer)
    assert back is not None
    expected = blocks()
    for column in (
        "names",
        "name_of",
        "keys",
        "parents",
        "metas",
        "sizes",
        "offsets",
        "checksums",
        "removals",
    ):
        assert getattr(back, column) == getattr(expected, column)


def test_any_flipped_bit_in_a_segments_table_is_seen() -> None:
    footer = encode_footer(OWNER, 5, 3 * PAGE, 2, encode_table(blocks()), SEGMENT)
    trailer = decode_trailer(footer[-PAGE:], OWNER, SEGMENT)
    assert trailer is not None
    for at in range(trailer.table_bytes):
        damaged = bytearray(footer[: trailer.table_bytes])
        damaged[at] ^= 1 << at % 8
        assert decode_table(damaged, trailer) is None
    for at in range(100):
        page = bytearray(footer[-PAGE:])
        page[at] ^= 1 << at % 8
        assert at >= 84 or decode_trailer(page, OWNER, SEGMENT) is None
