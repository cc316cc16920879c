"""The allocator against a model that tries every place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.pools.allocator import PAGE, SMALL_MAX, UNIT, Allocator

PAGES = 24
SIZES = st.one_of(
    st.integers(0, SMALL_MAX),
    st.sampled_from([64, 65, 640, 1365, 2048, 2049, 4095, 4096, 4097, 8192]),
    st.integers(1, 12).map(lambda pages: pages * PAGE),
    st.integers(SMALL_MAX + 1, (PAGES + 2) * PAGE),
)


def longest_run(busy: set[int]) -> int:
    """Pages of the longest run without a busy one, page by page."""
    longest = run = 0
    for page in range(PAGES):
        run = 0 if page in busy else run + 1
        longest = max(longest, run)
    return longest


class AllocatorMachine(RuleBasedStateMachine):
    """The model knows only which bytes each block was given."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(PAGES * PAGE)
        self.blocks: dict[int, int] = {}  # offset -> size

    def busy_pages(self, offsets: list[int]) -> set[int]:
        return {
            page
            for offset in offsets
            for page in range(offset // PAGE, (offset + max(1, self.blocks[offset]) - 1) // PAGE + 1)
        }

    @rule(size=SIZES)
    def allocate(self, size: int) -> None:
        fits = size <= self.allocator.largest_free()
        free_pages = longest_run(self.busy_pages(list(self.blocks)))
        offset = self.allocator.allocate(size)
        assert (offset is not None) == fits
        if offset is None:
            assert free_pages * PAGE < max(1, size), (
                "refused although there is a long enough run of free pages"
            )
            return
        assert offset % (PAGE if size >= PAGE else UNIT) == 0
        assert 0 <= offset <= offset + size <= self.allocator.capacity
        end = offset + max(1, size)
        assert all(end <= other or other + max(1, taken) <= offset for other, taken in self.blocks.items())
        self.blocks[offset] = size

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.blocks)))
        self.allocator.free(offset)
        del self.blocks[offset]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def widest_gap(self, data: st.DataObject) -> None:
        kept = data.draw(st.lists(st.sampled_from(sorted(self.blocks)), unique=True))
        assert self.allocator.widest_gap(kept) == longest_run(self.busy_pages(kept)) * PAGE

    @rule()
    def start_again(self) -> None:
        """A new allocator takes over what the old one gave out, in whatever order it is told."""
        successor = Allocator(PAGES * PAGE)
        extents = sorted(self.blocks.items(), key=lambda extent: extent[0] % 7)
        assert sorted(successor.adopt(extents)) == sorted(self.blocks.items())
        self.allocator = successor

    @invariant()
    def agrees(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.offsets() == set(self.blocks)
        assert self.allocator.used_bytes == len(self.busy_pages(list(self.blocks))) * PAGE
        longest = longest_run(self.busy_pages(list(self.blocks)))
        assert self.allocator.largest_free() == longest * PAGE or longest == 0


TestAllocator = pytest.mark.timeout(600)(AllocatorMachine.TestCase)  # a failure takes long to shrink
TestAllocator.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
