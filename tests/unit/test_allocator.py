"""The allocator by examples; tests/property has it against a naive model."""

from __future__ import annotations

import pytest

from mooncaked.errors import IntegrityError, InvalidRequest
from mooncaked.pools.allocator import PAGE, SMALL_MAX, UNIT, Allocator


def fill(allocator: Allocator, size: int) -> list[int]:
    """Allocate blocks of `size` until there is no room."""
    offsets = []
    while (offset := allocator.allocate(size)) is not None:
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize("size", [4096, 5000, 65536, 3 * PAGE + 1])
def test_large_blocks_start_on_pages(size: int) -> None:
    allocator = Allocator(1 << 20)
    allocator.allocate(100)  # a small block before them changes nothing
    assert all(offset % PAGE == 0 for offset in fill(allocator, size))


@pytest.mark.parametrize("size", [0, 1, 64, 65, 100, 1000, SMALL_MAX])
def test_small_blocks_share_pages_and_start_on_units(size: int) -> None:
    allocator = Allocator(4 * PAGE)
    offsets = fill(allocator, size)
    assert all(offset % UNIT == 0 for offset in offsets)
    slot = max(1, -(-size // UNIT)) * UNIT
    assert len(set(offsets)) == len(offsets) == 4 * (PAGE // slot)
    allocator.check_integrity()


def test_every_byte_of_a_pool_can_hold_equal_blocks() -> None:
    allocator = Allocator(100 * 65536)
    assert len(fill(allocator, 65536)) == 100
    assert (allocator.free_bytes, allocator.largest_free()) == (0, -1)


def test_freed_neighbours_join_in_any_order() -> None:
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [2, 1, 0]):
        allocator = Allocator(3 * PAGE)
        offsets = fill(allocator, PAGE)
        for index in order:
            allocator.free(offsets[index])
        assert allocator.largest_free() == 3 * PAGE
        allocator.check_integrity()


def test_the_best_fitting_gap_is_used() -> None:
    allocator = Allocator(16 * PAGE)
    blocks = [allocator.allocate(count * PAGE) for count in (4, 1, 2, 1, 3, 1)]
    for index in (0, 2, 4):  # gaps of 4, 2 and 3 pages, and 4 pages at the end
        offset = blocks[index]
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(2 * PAGE) == blocks[2]
    assert allocator.allocate(3 * PAGE) == blocks[4]


def test_a_page_of_small_blocks_comes_back_when_the_last_one_goes() -> None:
    allocator = Allocator(PAGE)
    offsets = fill(allocator, 1000)
    for offset in offsets[1:]:
        allocator.free(offset)
    assert allocator.allocate(PAGE) is None
    allocator.free(offsets[0])
    assert allocator.allocate(PAGE) == 0


def test_a_small_block_takes_a_larger_slot_when_no_page_is_left() -> None:
    allocator = Allocator(PAGE)
    kept, given = allocator.allocate(2000), allocator.allocate(2000)
    assert given is not None
    allocator.free(given)
    assert allocator.largest_free() == 2048
    assert allocator.allocate(10) == given
    assert allocator.largest_free() == -1
    assert kept != given
    allocator.check_integrity()


def test_used_bytes_count_whole_pages() -> None:
    allocator = Allocator(10 * PAGE)
    allocator.allocate(1)
    allocator.allocate(PAGE + 1)
    assert (allocator.used_bytes, allocator.free_bytes) == (3 * PAGE, 7 * PAGE)


@pytest.mark.parametrize("offset", [0, 64, 4096, 8192, 1 << 40, -64])
def test_freeing_what_is_not_allocated_is_refused(offset: int) -> None:
    allocator = Allocator(4 * PAGE)
    small, large = allocator.allocate(100), allocator.allocate(PAGE)
    assert (small, large) == (0, PAGE)
    allocator.free(0)
    allocator.free(PAGE)
    with pytest.raises(IntegrityError):
        allocator.free(offset)
    allocator.check_integrity()


def test_freeing_the_middle_of_a_block_is_refused() -> None:
    allocator = Allocator(4 * PAGE)
    allocator.allocate(4 * PAGE)
    for offset in (PAGE, 64):
        with pytest.raises(IntegrityError):
            allocator.free(offset)


def test_a_pool_needs_a_page_and_ignores_a_part_of_one() -> None:
    with pytest.raises(InvalidRequest):
        Allocator(PAGE - 1)
    assert Allocator(3 * PAGE + 7).capacity == 3 * PAGE


def test_the_widest_gap_is_what_freeing_the_rest_would_give() -> None:
    allocator = Allocator(10 * PAGE)
    offsets = fill(allocator, PAGE)
    assert allocator.widest_gap([]) == 10 * PAGE
    assert allocator.widest_gap([offsets[3]]) == 6 * PAGE
    assert allocator.widest_gap([offsets[3], offsets[7], offsets[3]]) == 3 * PAGE
    assert allocator.widest_gap(offsets) == 0


def test_a_hundred_thousand_blocks_are_allocated_and_freed() -> None:
    allocator = Allocator(100_000 * 65536)
    offsets = fill(allocator, 65536)
    assert len(offsets) == 100_000
    for offset in offsets[::2] + offsets[1::2]:
        allocator.free(offset)
    assert allocator.largest_free() == allocator.capacity
    allocator.check_integrity()


def test_extents_that_cannot_have_been_given_out_are_not_adopted() -> None:
    allocator = Allocator(8 * PAGE)
    good = [(0, 3 * PAGE), (4 * PAGE, 64), (4 * PAGE + 128, 100)]
    bad = [
        (PAGE, 2 * PAGE),  # inside another one
        (7 * PAGE, 2 * PAGE),  # over the end
        (5 * PAGE + 64, 2 * PAGE),  # not at a page
        (6 * PAGE + 32, 10),  # not at a slot
    ]
    assert sorted(allocator.adopt([*good, *bad])) == good
    assert allocator.offsets() == {offset for offset, _ in good}
    allocator.check_integrity()


def test_only_an_untouched_allocator_adopts() -> None:
    allocator = Allocator(8 * PAGE)
    allocator.allocate(PAGE)
    with pytest.raises(IntegrityError, match="1 pages are taken already"):
        allocator.adopt([(PAGE, PAGE)])
