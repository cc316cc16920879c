"""Blocks made durable in groups: one header, the values from where they lie, one sync.

Whoever comes while a group is being written waits, and the next one to get the turn writes for all who
wait. A block can be read only after its group was synced. A group that fails is blotted out, and its names
are noted as removed: what of it reached the disk all the same must not come back after a restart.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import xxhash

from mooncaked.errors import InvalidRequest
from mooncaked.keys import show_key
from mooncaked.pools.ssd.books import Books, Name, Segment, Ticket
from mooncaked.pools.ssd.grouping import GroupRoom, bytes_needed
from mooncaked.pools.ssd.groups import GroupWriter
from mooncaked.pools.ssd.health import is_full
from mooncaked.pools.ssd.model import SsdItem, WriteStatus
from mooncaked.pools.ssd.space import NoRoom, Space

_SEGMENT_FAILURES_MAX = 2  # groups that may fail at one place before another is tried


class Committer:
    """The queue of one device, and who writes it."""

    def __init__(self, books: Books, writer: GroupWriter, space: Space, group_bytes: int) -> None:
        self._books = books
        self._writer = writer
        self._space = space
        self._group_bytes = group_bytes
        self._turn = threading.Lock()  # held by who writes; taken before the books' lock
        self._queue: deque[Ticket] = deque()  # under the books' lock
        self.queued_bytes = 0

    @property
    def turn(self) -> threading.Lock:
        """Whoever holds it is the only one who changes files."""
        return self._turn

    def write(self, items: Sequence[SsdItem]) -> list[WriteStatus]:
        """Write blocks and wait until they are durable. What fails is said by the status, not raised."""
        prepared = [_with_checksum(item) for item in items]
        joined: list[tuple[Ticket, bool]] = []
        with self._books.lock:
            for item in prepared:
                joined.append(self._join(item))
        own = [ticket for ticket, _ in joined if ticket.status is None]
        while any(ticket.status is None for ticket in own):
            with self._turn:
                if any(ticket.status is None for ticket in own):
                    self._commit_next()
        return [_seen(ticket.status, first) for ticket, first in joined]

    def _join(self, item: SsdItem) -> tuple[Ticket, bool]:
        """The ticket of a block, and whether it is its first; under the books' lock."""
        ticket = Ticket(item)
        if (waiting := self._books.in_flight.get(ticket.name)) is not None:
            return waiting, False
        if self._books.index.find(item.namespace, item.key) is not None:
            ticket.status = WriteStatus.EXISTS
        elif not self._books.health.writable:
            ticket.status = WriteStatus.FAILED
        elif not GroupRoom(self._books.files.segment_bytes, 0, 0, 0).take(item):
            ticket.status = WriteStatus.TOO_LARGE
        else:
            self._books.in_flight[ticket.name] = ticket
            self._queue.append(ticket)
            self.queued_bytes += item.data.nbytes
        return ticket, True

    def flush(self) -> bool:
        """Make removals durable that wait for a group; False when that failed."""
        with self._turn:
            while self._books.removals and self._books.health.writable:
                if not self._commit_next():
                    return False
        return not self._books.removals

    # --- one group; all of it with the turn ----------------------------------------------------------------

    def _commit_next(self) -> bool:
        """Write the next group of what waits; False when it failed, and then what was in it is decided."""
        if not self._books.health.writable:
            self._refuse(WriteStatus.FAILED)
            return False
        try:
            segment = self._books.active or self._space.roll(self._need())
            batch, removals = self._take(segment)
            if not batch and not removals and self._waits():
                segment = self._space.roll(self._need())
                batch, removals = self._take(segment)
        except NoRoom:
            self._refuse(WriteStatus.FULL)
            return False
        except OSError as error:
            self._books.health.write_failed(error)
            self._refuse(WriteStatus.FULL if is_full(error) else WriteStatus.FAILED)
            return False
        except BaseException:
            self._refuse(WriteStatus.FAILED)  # nobody may wait for a turn that does not come
            raise
        return self._write(segment, batch, removals) if batch or removals else True

    def _waits(self) -> bool:
        with self._books.lock:
            return bool(self._queue or self._books.removals)

    def _need(self) -> int:
        """Bytes that what is carried over must leave for the block that comes next."""
        with self._books.lock:
            return bytes_needed(self._queue[0].item) if self._queue else 0

    def _refuse(self, status: WriteStatus) -> None:
        """Decide everything that waits."""
        with self._books.lock:
            waiting = list(self._queue)
            self._queue.clear()
            for ticket in waiting:
                self._decide(ticket, status)

    def _decide(self, ticket: Ticket, status: WriteStatus) -> None:
        ticket.status = WriteStatus.REMOVED if ticket.cancelled else status
        self.queued_bytes -= ticket.item.data.nbytes
        del self._books.in_flight[ticket.name]

    def _take(self, segment: Segment) -> tuple[list[Ticket], list[Name]]:
        """What goes into the next group: removals first, since a block of the same name counts after them."""
        room = GroupRoom(self._books.files.segment_bytes, segment.end, segment.rows_bound, self._group_bytes)
        batch: list[Ticket] = []
        with self._books.lock:
            pending = self._books.removals
            removals = []
            for name in pending:
                if not room.take_removal(*name):
                    break
                removals.append(name)
            for name in removals:
                del pending[name]
            while self._queue:
                ticket = self._queue[0]
                if ticket.cancelled:
                    self._decide(self._queue.popleft(), WriteStatus.REMOVED)
                    continue
                if ticket.name in pending or not room.take(ticket.item):
                    break
                batch.append(self._queue.popleft())
        return batch, removals

    def _write(self, segment: Segment, batch: list[Ticket], removals: list[Name]) -> bool:
        status = WriteStatus.FAILED
        try:
            offsets = self._writer.write(segment, [ticket.item for ticket in batch], removals)
            with self._books.lock:
                self._publish(segment, batch, removals, offsets)
            status = WriteStatus.STORED
        except OSError as error:
            status = WriteStatus.FULL if is_full(error) else WriteStatus.FAILED
            self._books.health.write_failed(error)
            self._books.note_removals([*removals, *(ticket.name for ticket in batch)])
            if segment.failures >= _SEGMENT_FAILURES_MAX and self._books.health.writable:
                self._space.seal(segment)
            return False
        finally:
            with self._books.lock:
                for ticket in batch:
                    if ticket.status is None:
                        self._decide(ticket, status)
        self._books.health.write_worked()
        return True

    def _publish(
        self, segment: Segment, batch: list[Ticket], removals: list[Name], offsets: list[int]
    ) -> None:
        """Make a durable group readable; under the books' lock."""
        placed = self._writer.note(segment, [ticket.item for ticket in batch], removals, offsets)
        counters = self._books.counters
        for ticket, ordinal in zip(batch, placed, strict=True):
            item = ticket.item
            if self._books.dead:
                self._decide(ticket, WriteStatus.FAILED)
            elif not ticket.cancelled:
                self._books.index.put(segment.slot, item.namespace, item.key, ordinal)
                counters.stored += 1
                counters.written_bytes += item.data.nbytes


def _seen(status: WriteStatus | None, first: bool) -> WriteStatus:
    """The status for one of those who wrote the same block."""
    if status is None:
        return WriteStatus.FAILED  # the one who wrote it was stopped by an error that he has raised
    return WriteStatus.EXISTS if status is WriteStatus.STORED and not first else status


def _with_checksum(item: SsdItem) -> SsdItem:
    """The item with its checksum; here, since the caller's thread can do this while another one writes."""
    if not item.data.c_contiguous or item.data.itemsize != 1 or item.data.ndim != 1:
        problem = f"the value of key {show_key(item.key)} is no run of bytes in memory"
        raise InvalidRequest(problem=problem)  # here it harms nobody else
    if item.checksum is not None:
        return item
    return msgspec.structs.replace(item, checksum=xxhash.xxh3_64_intdigest(item.data))
