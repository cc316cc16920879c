"""Blocks read into the caller's memory and compared with their checksums.

Neighbours on disk are read in one call, from several threads where it is more than one call. A block that
cannot be read, or is not what was written, is dropped: it is a miss from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field

import xxhash

from mooncaked.keys import show_key
from mooncaked.pools.ssd.aligned import PAGE, Staging, is_aligned, pages_up
from mooncaked.pools.ssd.books import Books, Segment
from mooncaked.pools.ssd.disk import read_all
from mooncaked.pools.ssd.index import ORDINAL_BITS
from mooncaked.pools.ssd.model import LostReason, ReadStatus, SsdEntry

CALL_BYTES = 4 << 20  # that one call reads at most, unless a block is longer
_CALL_SPANS = 256
_STAGING_KEEP = 2 * CALL_BYTES


@dataclass(slots=True)
class Wanted:
    """One block to be read, and where to."""

    number: int  # in the caller's list
    entry: SsdEntry
    view: memoryview


@dataclass(slots=True)
class Span:
    """Whole pages of a segment: one block straight into its place, or any number of them through a copy."""

    at: int  # bytes
    end: int
    direct: bool
    wanted: list[Wanted]


@dataclass(slots=True)
class Call:
    """Spans of a segment that follow each other."""

    slot: int
    spans: list[Span] = field(default_factory=list)

    @property
    def wanted(self) -> list[Wanted]:
        """All blocks of the call."""
        return [wanted for span in self.spans for wanted in span.wanted]


def plan(wanted: Sequence[Wanted]) -> list[Call]:
    """The calls that read those blocks."""
    calls: list[Call] = []
    for one in sorted(wanted, key=lambda w: (w.entry.location >> ORDINAL_BITS, w.entry.offset)):
        slot = one.entry.location >> ORDINAL_BITS
        span = _span(one)
        last = calls[-1] if calls and calls[-1].slot == slot else None
        if last is not None and _joins(last, span):
            continue
        if last is not None and _follows(last, span):
            last.spans.append(span)
        else:
            calls.append(Call(slot, [span]))
    return calls


def _span(one: Wanted) -> Span:
    offset, size = one.entry.offset, one.entry.size
    direct = size > 0 and offset % PAGE == 0 and is_aligned(one.view)
    return Span(offset - offset % PAGE, pages_up(offset + size), direct, [one])


def _joins(call: Call, span: Span) -> bool:
    """Put a block that is copied anyway into the last span, where they share or adjoin pages."""
    last = call.spans[-1]
    if span.direct or last.direct or not last.at <= span.at <= last.end or span.end - last.at > CALL_BYTES:
        return False
    last.end = max(last.end, span.end)
    last.wanted += span.wanted
    return True


def _follows(call: Call, span: Span) -> bool:
    fits = span.end - call.spans[0].at <= CALL_BYTES and len(call.spans) < _CALL_SPANS
    return span.at == call.spans[-1].end and fits


class Pending:
    """A read under way."""

    def __init__(self, reader: Reader, segments: list[Segment | None], results: list[ReadStatus]) -> None:
        self._reader = reader
        self._segments = segments
        self._results = results
        self.own: list[Call] = []  # for the thread that waits
        self.futures: list[Future[None]] = []

    def result(self) -> list[ReadStatus]:
        """Read the caller's own part, wait for the others, and say what became of each block."""
        try:
            for call in self.own:
                self._reader.execute(call, self._results)
        finally:
            wait(self.futures)  # nobody may write into the views, or read from the segments, after this
            self._reader.finish(self._segments)
        for future in self.futures:
            future.result()
        return self._results


class Reader:
    """Reads from one device; for any number of threads."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._files = books.files
        self._local = threading.local()

    def read(
        self, entries: Sequence[SsdEntry], views: Sequence[memoryview], *, counted: bool = True
    ) -> list[ReadStatus]:
        """Read each entry into its view, of the entry's size, in this thread."""
        results = self.start(entries, views, None).result()
        if counted:
            self.count(entries, results)
        return results

    def start(
        self, entries: Sequence[SsdEntry], views: Sequence[memoryview], threads: Executor | None
    ) -> Pending:
        """Begin to read with further threads. Whoever does must call `result`, even after an error."""
        if not self._books.health.readable:
            return Pending(self, [], [ReadStatus.GONE] * len(entries))
        segments = self._books.begin_read(entries)
        results = [ReadStatus.GONE if segment is None else ReadStatus.FAILED for segment in segments]
        pending = Pending(self, segments, results)
        try:
            calls = plan(
                [
                    Wanted(number, entry, view)
                    for number, (entry, view) in enumerate(zip(entries, views, strict=True))
                    if segments[number] is not None
                ]
            )
            while threads is not None and len(calls) > 1:
                try:
                    pending.futures.append(threads.submit(self.execute, calls[-1], results))
                except RuntimeError:  # they have just been shut down
                    break
                calls.pop()
            pending.own += calls
        except BaseException:
            pending.own.clear()
            pending.result()
            raise
        return pending

    def finish(self, segments: Sequence[Segment | None]) -> None:
        """The read is over."""
        self._books.end_read(segments)

    def count(self, entries: Sequence[SsdEntry], results: Sequence[ReadStatus]) -> None:
        """Count what was read."""
        sizes = [e.size for e, status in zip(entries, results, strict=True) if status is ReadStatus.OK]
        with self._books.lock:
            self._books.counters.read += len(sizes)
            self._books.counters.read_bytes += sum(sizes)

    def execute(self, call: Call, results: list[ReadStatus]) -> None:
        """Make one call, and note in `results` what became of its blocks."""
        try:
            whole = self._read(call)
        except OSError as error:
            if len(call.wanted) > 1:  # one bad place must not take its neighbours along
                for one in call.wanted:
                    self.execute(Call(call.slot, [_span(one)]), results)
                return
            self._failed(call.wanted[0].entry, error)
            return
        self._books.health.read_worked()
        for one in call.wanted:
            if whole and xxhash.xxh3_64_intdigest(one.view) == one.entry.checksum:
                results[one.number] = ReadStatus.OK
            else:
                results[one.number] = ReadStatus.CORRUPT
                self._corrupt(one.entry)

    def _failed(self, entry: SsdEntry, error: OSError) -> None:
        self._books.drop(entry, LostReason.UNREADABLE)
        if self._books.health.read_failed(error):
            self._books.lose_all()

    def _corrupt(self, entry: SsdEntry) -> None:
        where = f"segment {entry.location >> ORDINAL_BITS} offset {entry.offset} key {show_key(entry.key)}"
        self._books.health.note(
            "corrupt", where, "none: the block is dropped; if it recurs, replace the disk"
        )
        self._books.drop(entry, LostReason.CORRUPT)

    def _read(self, call: Call) -> bool:
        staging = self._staging()
        staging.reset()
        buffers: list[memoryview] = []
        copies: list[tuple[memoryview, memoryview]] = []
        for span in call.spans:
            for buffer in _buffers(span, staging, copies):
                buffers.append(buffer)
        if not buffers:
            return True
        with self._files.use(call.slot) as fd:
            whole = read_all(self._files.disk, fd, buffers, call.spans[0].at)
        for target, source in copies:
            target[:] = source
        return whole

    def _staging(self) -> Staging:
        staging = getattr(self._local, "staging", None)
        if not isinstance(staging, Staging):
            staging = self._local.staging = Staging(_STAGING_KEEP)
        return staging


def _buffers(
    span: Span, staging: Staging, copies: list[tuple[memoryview, memoryview]]
) -> Iterator[memoryview]:
    """Where the bytes of a span go; what has to be copied from there is added to `copies`."""
    if not span.direct:
        if span.end > span.at:
            piece = staging.take(span.end - span.at)
            for one in span.wanted:
                start = one.entry.offset - span.at
                copies.append((one.view, piece[start : start + one.entry.size]))
            yield piece
        return
    view = span.wanted[0].view
    whole = len(view) - len(view) % PAGE
    if whole:
        yield view[:whole]
    if whole < len(view):
        piece = staging.take(PAGE)
        copies.append((view[whole:], piece[: len(view) - whole]))
        yield piece
