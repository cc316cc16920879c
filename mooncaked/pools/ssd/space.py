"""Which segment is written next, and what is lost or carried over for it.

The device keeps one free segment in reserve, so that blocks can be carried over from the segment that is
reclaimed next: oldest first, or one of which nothing is left to read. What was read since it was written
(or what `keep` says) is carried over, up to half of what the segment held, so that the disk writes at most
about twice what is stored; the rest is lost, and reported.

All of it is for the one who has the turn to write.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mooncaked.failpoints import failpoint
from mooncaked.pools.ssd.aligned import PAGE, aligned_buffer, pages_up
from mooncaked.pools.ssd.books import Books, Segment
from mooncaked.pools.ssd.disk import write_all
from mooncaked.pools.ssd.footer import encode_footer, encode_table
from mooncaked.pools.ssd.grouping import GroupRoom
from mooncaked.pools.ssd.groups import GroupWriter
from mooncaked.pools.ssd.health import is_full
from mooncaked.pools.ssd.layout import encode_free
from mooncaked.pools.ssd.model import LostReason, ReadStatus, SsdEntry, SsdItem
from mooncaked.pools.ssd.reading import Reader

log = logging.getLogger(__name__)

CARRY_SHARE = 0.5  # of what a segment held: what is carried over from it at most
_CARRIED_AT_ONCE = 64  # blocks


class NoRoom(Exception):
    """Not a single segment fits into the file system."""


class Space:
    """The segments of one device."""

    def __init__(self, books: Books, writer: GroupWriter, reader: Reader, group_bytes: int) -> None:
        self._books = books
        self._files = books.files
        self._writer = writer
        self._reader = reader
        self._group_bytes = group_bytes

    def roll(self, need: int) -> Segment:
        """Seal the active segment and begin another, in which `need` bytes are left. Raises `OSError`, and
        `NoRoom`; nothing is active then."""
        if self._books.active is not None:
            self.seal(self._books.active)
        segment = self._begin(self._free_slot())
        self.keep_reserve(segment, need)
        return segment

    def _begin(self, slot: int) -> Segment:
        failpoint("ssd.segment.before_open")
        with self._books.lock:
            self._books.generation += 1
            segment = Segment(slot, self._books.generation)
            self._books.index.begin(slot)
            self._books.segments[slot] = segment
            self._books.active = segment
        return segment

    def _free_slot(self) -> int:
        """A slot to be written, at the cost of blocks where there is no other way."""
        if not self._books.free and self.may_create():
            self._create()
        if not self._books.free and (victim := self._victim()) is not None:
            self.reclaim(victim, None, 0)
            if not self._books.free and self.may_create():
                self._create()  # it could not be marked, and was deleted
        with self._books.lock:
            if not self._books.free or self._books.dead:
                raise NoRoom
            return self._books.free.popleft()

    def may_create(self) -> bool:
        """Whether capacity and file system have room for another segment file."""
        if len(self._books.segments) + len(self._books.free) >= self._books.slots_max:
            return False
        try:
            return self._files.disk.free_bytes(self._files.directory) >= self._files.segment_bytes
        except OSError:
            return False  # if it is more than that, the next write meets it too

    def _create(self) -> None:
        """Another segment file, where the file system has room; raises `OSError` for other errors."""
        used = {*self._books.segments, *self._books.free}
        slot = next(slot for slot in range(self._books.slots_max) if slot not in used)
        try:
            self._files.create(slot)
        except OSError as error:
            if not is_full(error):
                raise
            self._books.health.note(
                "disk_full", str(error), "free room in the file system, or lower its size in ssd.devices"
            )
        else:
            self._books.add_free(slot)

    # --- sealing ----------------------------------------------------------------------------------------

    def seal(self, segment: Segment) -> None:
        """Write no more into a segment, and put a table at its end. Without one, because the disk did not
        take it, a restart reads the headers of its groups instead."""
        with self._books.lock:
            if self._books.active is segment:
                self._books.active = None
            if self._books.segments.get(segment.slot) is not segment:
                return
            blocks = self._books.index.blocks_of(segment.slot)
            blocks.share_parents()
        footer = encode_footer(
            self._books.owner,
            segment.generation,
            segment.end,
            segment.groups,
            encode_table(blocks),
            self._files.segment_bytes,
        )
        try:
            self._write(segment.slot, footer, self._files.segment_bytes - len(footer), "ssd.seal")
        except OSError as error:
            self._books.health.write_failed(error)
        else:
            failpoint("ssd.seal.after_sync")
            self._books.counters.device_written_bytes += len(footer)

    def _write(self, slot: int, data: bytes, at: int, step: str) -> None:
        buffer = aligned_buffer(len(data))
        buffer[: len(data)] = data
        with self._files.use(slot) as fd:
            failpoint(f"{step}.before_write")
            write_all(self._files.disk, fd, [buffer[: len(data)]], at)
            failpoint(f"{step}.before_sync")
            self._files.disk.fdatasync(fd)

    # --- reclaiming -------------------------------------------------------------------------------------

    def keep_reserve(self, active: Segment, need: int) -> None:
        """See to a free segment: reclaim one, if there is none and none can be made. What is worth it goes to
        `active`, of which `need` bytes stay."""
        if not self._books.free and not self.may_create() and (victim := self._victim()) is not None:
            self.reclaim(victim, active, need)

    def _victim(self) -> Segment | None:
        """The segment to give up: one with nothing left to read, as long as it records no removals, which
        must outlive the older segments that they speak of; otherwise the oldest."""
        with self._books.lock:
            full = [segment for segment in self._books.segments.values() if segment is not self._books.active]
            for segment in full:
                blocks = self._books.index.blocks_of(segment.slot)
                if not blocks.live_blocks and not blocks.removals:
                    return segment
        return min(full, key=lambda segment: segment.generation, default=None)

    def reclaim(self, victim: Segment, into: Segment | None, need: int) -> None:
        """Make a segment free again, or delete its file where that fails. Raises `OSError` when both fail."""
        failpoint("ssd.reclaim.before_carry")
        if into is not None:
            self._carry(victim, into, need)
        failpoint("ssd.reclaim.before_drop")
        self._books.lose_segment(victim, LostReason.RECLAIMED)
        self._books.await_readers(victim)
        try:
            self._mark_free(victim)
        except OSError as error:
            self._books.health.write_failed(error)
            self._files.delete(victim.slot)
            self._files.disk.sync_directory(self._files.directory)
        else:
            self._books.add_free(victim.slot)

    def _mark_free(self, segment: Segment) -> None:
        """Nothing in the file counts any more once this is durable; before, all of it still does."""
        buffer = aligned_buffer(2 * PAGE)
        buffer[:PAGE] = encode_free(self._books.owner, segment.generation)
        with self._files.use(segment.slot) as fd:
            failpoint("ssd.reclaim.before_mark")
            write_all(self._files.disk, fd, [buffer[:PAGE]], 0)
            write_all(self._files.disk, fd, [buffer[PAGE:]], self._files.segment_bytes - PAGE)
            failpoint("ssd.reclaim.before_sync")
            self._files.disk.fdatasync(fd)
        failpoint("ssd.reclaim.after_sync")
        self._books.counters.device_written_bytes += 2 * PAGE

    def shrink(self) -> None:
        """Delete the files that are more than the capacity allows, oldest blocks first. Raises `OSError`."""
        books = self._books
        while len(books.segments) + len(books.free) > books.slots_max:
            failpoint("ssd.shrink.before_unlink")
            if books.free:
                self._files.delete(books.free.pop())
                continue
            victim = self._victim()
            if victim is None:
                return
            books.lose_segment(victim, LostReason.RECLAIMED)
            books.await_readers(victim)
            self._files.delete(victim.slot)
        self._files.disk.sync_directory(self._files.directory)

    # --- carrying over ----------------------------------------------------------------------------------

    def _carry(self, victim: Segment, into: Segment, need: int) -> None:
        """Write again what of a segment is worth it."""
        wanted = self._worth_keeping(victim)
        left = self._budget(victim)
        while wanted:
            limit = min(left, self._group_bytes)
            room = GroupRoom(self._files.segment_bytes - need, into.end, into.rows_bound, limit)
            first = wanted[:_CARRIED_AT_ONCE]
            memory = aligned_buffer(sum(pages_up(entry.size) for entry in first))
            batch: list[SsdEntry] = []
            views: list[memoryview] = []
            at = 0
            for entry in first:
                view = memory[at : at + entry.size]
                if entry.size > left or not room.take(_item(entry, view)):
                    break
                at += pages_up(entry.size)
                left -= entry.size
                batch.append(entry)
                views.append(view)
            if not batch or not self._carry_group(batch, views, into):
                return
            wanted = wanted[len(batch) :]

    def _budget(self, victim: Segment) -> int:
        """Bytes that may be carried over: of what was written into the segment, so that each one reclaimed
        gives room for at least as much that is new."""
        with self._books.lock:
            if self._books.segments.get(victim.slot) is not victim:
                return 0
            return int(sum(self._books.index.blocks_of(victim.slot).sizes) * CARRY_SHARE)

    def _worth_keeping(self, victim: Segment) -> list[SsdEntry]:
        entries = self._books.entries_of(victim.slot)
        if self._books.keep is not None:
            kept: Sequence[bool] = self._books.keep(entries)
        else:
            with self._books.lock:
                kept = [self._books.was_used(entry) for entry in entries]
        return [entry for entry, keep in zip(entries, kept, strict=True) if keep]

    def _carry_group(self, batch: Sequence[SsdEntry], views: Sequence[memoryview], into: Segment) -> bool:
        """False when the disk did not take it."""
        read = self._reader.read(batch, views, counted=False)
        good = [
            (entry, _item(entry, view))
            for entry, view, status in zip(batch, views, read, strict=True)
            if status is ReadStatus.OK
        ]
        items = [item for _, item in good]
        if not items:
            return True
        try:
            offsets = self._writer.write(into, items, [])
        except OSError as error:
            self._books.health.write_failed(error)
            self._books.note_removals((entry.namespace, entry.key) for entry, _ in good)
            return False
        counters = self._books.counters
        with self._books.lock:
            placed = self._writer.note(into, items, [], offsets)
            for (entry, _), ordinal in zip(good, placed, strict=True):
                if self._books.is_there(entry) and not self._books.dead:
                    self._books.index.put(into.slot, entry.namespace, entry.key, ordinal)
                    counters.carried += 1
                    counters.carried_bytes += entry.size
        return True


def _item(entry: SsdEntry, view: memoryview) -> SsdItem:
    return SsdItem(
        namespace=entry.namespace,
        key=entry.key,
        data=view,
        parent=entry.parent,
        meta=entry.meta,
        checksum=entry.checksum,
    )
