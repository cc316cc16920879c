"""The journal: which blocks lie in the memory that is kept over a restart, in two files kept beside it.

The files live in memory, exactly as long as the regions do, so nothing is ever synced: what was written is
there after this process is killed at any point. One file counts. To shorten it, a summary is written into
the other one while changes go on; that one counts as soon as its header is there, which is written last.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from mooncaked.block import Block
from mooncaked.failpoints import failpoint
from mooncaked.pools.records import (
    FRAME_RECORDS_MAX,
    HEADER_BYTES,
    MAGIC_BYTES,
    STAMP_AT,
    Checked,
    Frames,
    Header,
    Record,
    RegionGone,
    RegionShape,
    Removed,
    Replay,
    Stored,
    Unreadable,
    decode_header,
    decode_stamp,
    encode_frames,
    encode_header,
    encode_stamp,
)

log = logging.getLogger(__name__)

SLACK_RECORDS = 4096  # records that may be there before a journal is shortened, however few blocks it has
_TAIL_BYTES = 1 << 18  # of changes during a summary: at most this is copied while changes wait
_TAIL_ROUNDS_MAX = 64  # where changes come faster than they can be copied
_COPY_BYTES = 1 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says of the life before."""

    header: Header
    regions: dict[int, RegionShape]
    blocks: list[Stored]  # last stored last
    seen_at_s: float | None  # monotonic: the last sign of life
    torn: bool  # its end was cut off
    file: int  # which of the two it was


def read_journal(fds: Sequence[int]) -> Kept | None:
    """The journal that counts of two files, None when neither was begun. Raises `Unreadable`."""
    headers: list[tuple[int, int, Header]] = []
    problems: list[Unreadable] = []
    for file, fd in enumerate(fds):
        try:
            header = decode_header(os.pread(fd, HEADER_BYTES, 0))
        except Unreadable as error:  # the other one may be whole: this one was just being begun
            problems.append(error)
            continue
        if header is not None:
            headers.append((header.generation, file, header))
    if not headers:
        if problems:
            raise problems[0]
        return None
    _, file, header = max(headers, key=lambda found: found[0])
    fd = fds[file]
    size = os.fstat(fd).st_size
    if size < HEADER_BYTES:
        raise Unreadable("its header is cut off")
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as data:
        replay, frames = _replay(data, header)
        seen_at_s = decode_stamp(data[:HEADER_BYTES])
    blocks = list(replay.blocks.values())
    return Kept(
        header=header, regions=replay.regions, blocks=blocks, seen_at_s=seen_at_s, torn=frames.torn, file=file
    )


def _replay(data: mmap.mmap, header: Header) -> tuple[Replay, Frames]:
    with memoryview(data) as view:
        replay, frames = Replay(header.regions), Frames(view)
        for records in frames:
            replay.apply(records)
        frames.release()
    return replay, frames


class Journal:
    """Follows a store. Begun by `begin` into the file that does not count; `commit` makes it count, once the
    store has told all that it begins with.

    When a write fails (the memory is full), the journal is given up for good: the next start finds nothing,
    and begins cold, rather than with what may not be true."""

    def __init__(self, fds: Sequence[int], header: Header, file: int) -> None:
        """Take over two files, both kept; `file` is the one to write to, which does not count now."""
        self._fds = tuple(fds)
        self._file = file
        self._header = header
        self._end = HEADER_BYTES
        self._buffer: list[Record] = []  # under the store's lock
        self._unchecked: set[Block] = set()  # stored without a checksum; under the store's lock
        self._lock = threading.Lock()  # for what follows; held for short writes only
        self._compacting = threading.Lock()
        self._committed = False
        self._records = self._live = 0  # of blocks: written to the file, and in the table
        self.problem = ""  # why it was given up
        self.compactions = 0
        os.ftruncate(self._fds[file], 0)
        os.ftruncate(self._fds[file], HEADER_BYTES)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._end

    @property
    def records(self) -> int:
        """Records of blocks in the file that counts."""
        return self._records

    # --- as a follower, under the store's lock ----------------------------------------------------------

    def stored(self, block: Block) -> None:
        """See `Follower`."""
        if block.checksum is None:
            self._unchecked.add(block)
        self._live += 1
        self._buffer.append(
            Stored(
                block.namespace,
                block.key,
                block.parent,
                block.meta,
                block.region,
                block.offset,
                block.size,
                block.checksum,
                int(block.hold_asked),
                block.expires_at_s,
            )
        )

    def verified(self, block: Block) -> None:
        """See `Follower`. What came back with its checksum is on record already."""
        if block in self._unchecked and block.checksum is not None:
            self._unchecked.remove(block)
            self._buffer.append(Checked(block.namespace, block.key, block.checksum))

    def removed(self, block: Block) -> None:
        """See `Follower`."""
        self._unchecked.discard(block)
        self._live -= 1
        self._buffer.append(Removed(block.namespace, block.key))

    def flush(self) -> None:
        """See `Follower`: a removal is on record before the memory can be another block's."""
        if self._buffer:
            records, self._buffer = self._buffer, []
            self._write(records)

    # --- regions ----------------------------------------------------------------------------------------

    def region_added(self, shape: RegionShape) -> None:
        """A region is about to be used."""
        self._write([shape])

    def region_gone(self, region: int) -> None:
        """A region has been given back."""
        self._write([RegionGone(region)])

    # --- life -------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """From now on, this file counts."""
        with self._lock:
            self._guard(self._write_header)
            self._committed = not self.problem
            other = self._fds[1 - self._file]
        if self._committed:
            os.ftruncate(other, 0)

    def beat(self, now_s: float) -> None:
        """Leave a sign of life: monotonic time."""
        with self._lock:
            if self._committed and not self.problem:
                os.pwrite(self._fds[self._file], encode_stamp(now_s), STAMP_AT)

    @property
    def due(self) -> bool:
        """Whether it has grown so much that `compact` is worth its while."""
        return self._committed and not self.problem and self._records > 2 * self._live + SLACK_RECORDS

    def compact(self) -> bool:
        """Write a shorter journal, while changes go on; False when that is going on already, or failed, which
        harms nothing. For a thread of the background."""
        if not self._committed or self.problem or not self._compacting.acquire(blocking=False):
            return False
        try:
            self._compact()
        except (OSError, ValueError) as error:
            log.warning("the journal could not be shortened cause=%s", error)
            with suppress(OSError):
                os.ftruncate(self._fds[1 - self._file], 0)
            return False
        finally:
            self._compacting.release()
        return True

    def close(self) -> None:
        """Close the files; what is in them stays as long as they are kept."""
        with self._compacting, self._lock:
            self.problem = self.problem or "closed"
            for fd in self._fds:
                os.close(fd)

    # --- internals --------------------------------------------------------------------------------------

    def _write(self, records: list[Record]) -> None:
        with self._lock:
            if not self.problem:
                self._guard(lambda: self._append(records))

    def _append(self, records: list[Record]) -> None:
        fd = self._fds[self._file]
        for frame in encode_frames(records):
            failpoint("journal.flush.before_write")
            write_all(fd, frame, self._end)
            failpoint("journal.flush.after_write")
            self._end += len(frame)
        self._records += len(records)

    def _write_header(self) -> None:
        failpoint("journal.commit.before_header")
        write_all(self._fds[self._file], encode_header(self._header), 0)
        failpoint("journal.commit.after_header")

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.problem = str(error)
        log.error("the journal cannot be written, the next start is a cold one cause=%s", error)
        for fd in self._fds:  # not truncated: a summary may be reading one of them through a mapping
            with suppress(OSError):
                os.pwrite(fd, bytes(MAGIC_BYTES), 0)

    def _compact(self) -> None:
        with self._lock:
            source, file, end = self._fds[self._file], 1 - self._file, self._end
        target = self._fds[file]
        os.ftruncate(target, 0)
        os.ftruncate(target, HEADER_BYTES)
        failpoint("journal.compact.before_summary")
        replay = self._read(source, end)
        position = _write_blocks(target, list(replay.blocks.values()))
        failpoint("journal.compact.after_summary")
        header = msgspec.structs.replace(
            self._header, generation=self._header.generation + 1, regions=list(replay.regions.values())
        )
        copied, records = end, len(replay.blocks)
        for _ in range(_TAIL_ROUNDS_MAX):
            until = self._end
            if until - copied <= _TAIL_BYTES:
                break
            _copy(source, target, copied, position, until - copied)
            position, copied = position + until - copied, until
        with self._lock:
            if self.problem:
                return
            _copy(source, target, copied, position, self._end - copied)
            records += self._records - replay.records
            position += self._end - copied
            self._switch(file, header, position, records)
        failpoint("journal.compact.before_truncate")
        os.ftruncate(source, 0)
        self.compactions += 1

    def _switch(self, file: int, header: Header, end: int, records: int) -> None:
        stamp = os.pread(self._fds[self._file], HEADER_BYTES - STAMP_AT, STAMP_AT)
        os.pwrite(self._fds[file], stamp, STAMP_AT)
        failpoint("journal.compact.before_switch")
        write_all(self._fds[file], encode_header(header), 0)
        failpoint("journal.compact.after_switch")
        self._file, self._header, self._end, self._records = file, header, end, records

    def _read(self, fd: int, end: int) -> Replay:
        with mmap.mmap(fd, end, prot=mmap.PROT_READ) as data:
            return _replay(data, self._header)[0]


def _write_blocks(fd: int, blocks: list[Stored]) -> int:
    """Write frames of blocks behind the header; where they end."""
    position = HEADER_BYTES
    for first in range(0, len(blocks), FRAME_RECORDS_MAX):
        for frame in encode_frames(blocks[first : first + FRAME_RECORDS_MAX]):
            write_all(fd, frame, position)
            position += len(frame)
    return position


def _copy(source: int, target: int, from_: int, to: int, size: int) -> None:
    while size > 0:
        data = os.pread(source, min(size, _COPY_BYTES), from_)
        if not data:
            raise OSError(f"{size} bytes of the journal are missing")
        write_all(target, data, to)
        from_, to, size = from_ + len(data), to + len(data), size - len(data)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """`pwrite`, until all is written; raises `OSError`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
