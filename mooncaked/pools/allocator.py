"""Where in a pool the next block goes. Pure: numbers in, numbers out, no memory is touched.

Two layers. `PageAllocator` hands out runs of 4 KiB pages by best fit and joins free neighbours at once.
`Allocator` takes whole runs from it for sizes of 4 KiB and more, and cuts single pages into equal slots for
smaller ones, so that a value of 100 bytes neither costs a page nor splits the pages' alignment.

Best fit needs the smallest free run that is long enough: the distinct lengths of free runs are kept in a
sorted list. Its length is at most the square root of twice the pool's pages (that many runs of different
lengths fill the pool), which keeps insertion cheap: a binary search and a short memmove.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from mooncaked.errors import IntegrityError, InvalidRequest

UNIT = 64  # bytes; every offset is a multiple of it
PAGE = 4096  # bytes; offsets of blocks of at least this size are multiples of it
_UNITS_PER_PAGE = PAGE // UNIT
# Slot sizes in units: for each number of slots that a page can hold, the largest slot that gives it.
_SLOT_UNITS = sorted({_UNITS_PER_PAGE // n for n in range(2, _UNITS_PER_PAGE + 1)})
SMALL_MAX = _SLOT_UNITS[-1] * UNIT  # bytes; larger blocks take whole pages


class PageAllocator:
    """Runs of pages out of `pages`, by best fit, with immediate joining of free neighbours."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.used = 0  # pages
        self._taken: dict[int, int] = {}  # first page of a taken run -> its length
        self._free: dict[int, int] = {}  # first page of a free run -> its length
        self._free_ends: dict[int, int] = {}  # page after a free run -> its first page
        self._by_length: dict[int, dict[int, None]] = {}  # length -> first pages, as an ordered set
        self._lengths: list[int] = []  # the keys of _by_length, sorted
        if pages:
            self._file(0, pages)

    def take(self, count: int) -> int | None:
        """First page of a run of `count` pages, or None when no free run is that long."""
        at = bisect_left(self._lengths, count)
        if at == len(self._lengths):
            return None
        length = self._lengths[at]
        starts = self._by_length[length]
        start, _ = starts.popitem()
        if not starts:
            self._drop_length(length)
        del self._free[start]
        if length > count:
            self._file(start + count, length - count)  # the same end, so _free_ends is right again by this
        else:
            del self._free_ends[start + length]
        self._taken[start] = count
        self.used += count
        return start

    def adopt(self, runs: Iterable[tuple[int, int]]) -> set[int]:
        """Take exactly these runs (first page, length), sorted; the first pages of those that could be taken.
        Raises `IntegrityError` when something was taken before."""
        if self.used:
            self._broken(f"{self.used} pages are taken already")
        if self.pages:
            self._unfile(0)
            self._free_ends.clear()
        position = 0
        for start, count in runs:
            if start < position or count < 1 or start + count > self.pages:
                continue
            if start > position:
                self._file(position, start - position)
            self._taken[start] = count
            self.used += count
            position = start + count
        if position < self.pages:
            self._file(position, self.pages - position)
        return set(self._taken)

    def give(self, start: int) -> None:
        """Free the run that `take` returned; raises `IntegrityError` when no taken run starts there."""
        count = self._taken.pop(start, None)
        if count is None:
            raise IntegrityError(
                what="page allocator", detail=f"page {start} is freed but starts no taken run"
            )
        self.used -= count
        end = start + count
        before = self._free_ends.pop(start, None)
        if before is not None:
            self._unfile(before)
            start = before
        if end in self._free:
            end += self._unfile(end)
        self._file(start, end - start)

    def length(self, start: int) -> int:
        """Pages of the taken run that starts at `start`."""
        return self._taken[start]

    def starts(self) -> Iterable[int]:
        """First pages of the taken runs."""
        return self._taken.keys()

    def longest(self) -> int:
        """Pages of the longest free run."""
        return self._lengths[-1] if self._lengths else 0

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless free and taken runs tile the pool and the indexes agree with them."""
        position, last_free = 0, False
        for start, count, free in sorted(self._runs()):
            if start != position or count < 1:
                self._broken(f"run {start}+{count} follows page {position}")
            if free and last_free:
                self._broken(f"free run {start} was not joined with the one before it")
            position, last_free = start + count, free
        if position != self.pages:
            self._broken(f"runs end at page {position} of {self.pages}")
        if self.used != sum(self._taken.values()):
            self._broken(f"used is {self.used}, the runs have {sum(self._taken.values())}")
        if self._free_ends != {start + count: start for start, count in self._free.items()}:
            self._broken("the index of free ends is off")
        indexed = {start: length for length, starts in self._by_length.items() for start in starts}
        if indexed != self._free or self._lengths != sorted(self._by_length):
            self._broken("the index of free lengths is off")

    def _runs(self) -> Iterable[tuple[int, int, bool]]:
        yield from ((start, count, False) for start, count in self._taken.items())
        yield from ((start, count, True) for start, count in self._free.items())

    def _broken(self, detail: str) -> None:
        raise IntegrityError(what="page allocator", detail=detail)

    def _file(self, start: int, length: int) -> None:
        """Enter a free run into all indexes."""
        self._free[start] = length
        self._free_ends[start + length] = start
        starts = self._by_length.get(length)
        if starts is None:
            self._by_length[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None

    def _unfile(self, start: int) -> int:
        """Take a free run out of the indexes, but for its end in `_free_ends`, where a longer run will end or
        has been taken out already; its length."""
        length = self._free.pop(start)
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            self._drop_length(length)
        return length

    def _drop_length(self, length: int) -> None:
        del self._by_length[length]
        del self._lengths[bisect_left(self._lengths, length)]


class _SlotPage:
    """One page cut into slots of `units` units."""

    __slots__ = ("free", "page", "slots", "units")

    def __init__(self, page: int, units: int) -> None:
        self.page = page
        self.units = units
        self.slots = _UNITS_PER_PAGE // units
        self.free = list(range(self.slots - 1, -1, -1))  # slot numbers; the lowest is taken first


class Allocator:
    """Offsets for blocks in a pool of `capacity` bytes (a part of a page at its end is not used).

    `allocate(size)` succeeds if and only if `size <= largest_free()`. Not thread-safe: its owner locks.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < PAGE:
            raise InvalidRequest(problem=f"a pool has at least {PAGE} bytes, not {capacity}")
        self._pages = PageAllocator(capacity // PAGE)
        self.capacity = self._pages.pages * PAGE  # bytes
        self._slot_pages: dict[int, _SlotPage] = {}  # page -> its slots
        self._open: dict[int, dict[int, _SlotPage]] = {units: {} for units in _SLOT_UNITS}  # with a free slot
        self._slots_taken: set[int] = set()  # offsets

    def allocate(self, size: int) -> int | None:
        """Offset in bytes for `size` bytes, or None when nothing free is large enough.

        A multiple of 4 KiB for sizes of 4 KiB and more, of 64 B for smaller ones. A size of 0 takes a slot
        too, so that every block has an offset of its own."""
        if size > SMALL_MAX:
            start = self._pages.take(-(-size // PAGE))
            return None if start is None else start * PAGE
        return self._allocate_slot(max(1, -(-size // UNIT)))

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned; raises `IntegrityError` when nothing is allocated there."""
        if offset not in self._slots_taken:
            if offset % PAGE or offset // PAGE in self._slot_pages:
                raise IntegrityError(what="allocator", detail=f"offset {offset} is freed but not allocated")
            self._pages.give(offset // PAGE)
            return
        self._slots_taken.remove(offset)
        page = self._slot_pages[offset // PAGE]
        page.free.append(offset % PAGE // (page.units * UNIT))
        if len(page.free) == page.slots:
            self._open[page.units].pop(page.page, None)
            del self._slot_pages[page.page]
            self._pages.give(page.page)
        else:
            self._open[page.units][page.page] = page

    def adopt(self, extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take exactly these (offset, size), which an allocator of this capacity once gave out; those that
        could be taken. One that reaches over the end, over another one, or into a page whose slots do not fit
        it is left out. Only for an allocator from which nothing was taken yet."""
        small: dict[int, list[tuple[int, int]]] = {}  # page -> its extents
        large: dict[int, tuple[int, int]] = {}  # page -> the extent that starts there
        for offset, size in extents:
            if size <= SMALL_MAX:
                small.setdefault(offset // PAGE, []).append((offset, size))
            elif offset % PAGE == 0:
                large.setdefault(offset // PAGE, (offset, size))
        runs = {page: -(-size // PAGE) for page, (_, size) in large.items()}
        for page in small:
            runs.setdefault(page, 1)
        taken = self._pages.adopt(sorted(runs.items()))
        found = [extent for page, extent in large.items() if page in taken]
        for page in small.keys() - large.keys():
            if page in taken:
                found += self._adopt_slots(page, small[page])
        return found

    def _adopt_slots(self, number: int, extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Cut page `number`, which is taken, so that its extents are slots; those that became one."""
        offsets = {offset for offset, _ in extents}
        widest = max(size for _, size in extents)
        fitting = (
            units
            for units in _SLOT_UNITS
            if units * UNIT >= widest
            and all(at % PAGE % (units * UNIT) == 0 and at % PAGE + units * UNIT <= PAGE for at in offsets)
        )
        units = next(fitting, None)
        if units is None or len(offsets) != len(extents):
            self._pages.give(number)
            return []
        page = self._slot_pages[number] = _SlotPage(number, units)
        page.free = [n for n in page.free if number * PAGE + n * units * UNIT not in offsets]
        if page.free:
            self._open[units][number] = page
        self._slots_taken |= offsets
        return extents

    @property
    def used_bytes(self) -> int:
        """Bytes that hold blocks, rounded up to pages; a page of slots counts whole."""
        return self._pages.used * PAGE

    @property
    def free_bytes(self) -> int:
        """Bytes in free pages, in runs of any length."""
        return self.capacity - self.used_bytes

    def largest_free(self) -> int:
        """The largest size in bytes that `allocate` would place now; -1 when not even 0 bytes would fit."""
        if longest := self._pages.longest():
            return longest * PAGE
        return max((units * UNIT for units, pages in self._open.items() if pages), default=-1)

    def widest_gap(self, kept: Iterable[int]) -> int:
        """Bytes of the longest run of pages that is free, or would be if all blocks but those at the offsets
        `kept` were freed: what eviction can make room for at most."""
        position, widest = 0, 0
        for page in sorted({offset // PAGE for offset in kept}):
            widest = max(widest, page - position)
            position = page + (1 if page in self._slot_pages else self._pages.length(page))
        return max(widest, self._pages.pages - position) * PAGE

    def offsets(self) -> set[int]:
        """Where blocks are."""
        runs = {page * PAGE for page in self._pages.starts() if page not in self._slot_pages}
        return runs | self._slots_taken

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless pages, slots and counters agree."""
        self._pages.check_integrity()
        slots_taken = 0
        for number, page in self._slot_pages.items():
            taken = [
                n for n in range(page.slots) if number * PAGE + n * page.units * UNIT in self._slots_taken
            ]
            slots_taken += len(taken)
            if sorted(taken + page.free) != list(range(page.slots)) or not taken:
                raise IntegrityError(
                    what="allocator", detail=f"slots of page {number} are taken {taken}, free {page.free}"
                )
            if bool(page.free) != (number in self._open[page.units]):
                raise IntegrityError(
                    what="allocator", detail=f"page {number} with {len(page.free)} free slots is misfiled"
                )
            if self._pages.length(number) != 1:
                raise IntegrityError(
                    what="allocator", detail=f"slot page {number} is {self._pages.length(number)} pages"
                )
        open_pages = sum(len(pages) for pages in self._open.values())
        if slots_taken != len(self._slots_taken) or open_pages > len(self._slot_pages):
            raise IntegrityError(
                what="allocator", detail=f"{len(self._slots_taken)} slots taken, {slots_taken} found"
            )

    def _allocate_slot(self, units: int) -> int | None:
        page = self._page_with_slot(bisect_left(_SLOT_UNITS, units))
        if page is None:
            return None
        slot = page.free.pop()
        if not page.free:
            del self._open[page.units][page.page]
        offset = page.page * PAGE + slot * page.units * UNIT
        self._slots_taken.add(offset)
        return offset

    def _page_with_slot(self, own: int) -> _SlotPage | None:
        """A page with a free slot of size class `own`, else a new page, else one of a larger class."""
        if (page := self._open_page(own)) is not None:
            return page
        if (page := self._new_slot_page(_SLOT_UNITS[own])) is not None:
            return page
        larger = (self._open_page(index) for index in range(own + 1, len(_SLOT_UNITS)))
        return next((page for page in larger if page is not None), None)

    def _open_page(self, index: int) -> _SlotPage | None:
        return next(iter(self._open[_SLOT_UNITS[index]].values()), None)

    def _new_slot_page(self, units: int) -> _SlotPage | None:
        number = self._pages.take(1)
        if number is None:
            return None
        page = self._slot_pages[number] = _SlotPage(number, units)
        self._open[units][number] = page
        return page
