"""One directory on one disk: what it keeps, within a hard limit, through whatever happens to the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mooncaked.clock import Clock
from mooncaked.errors import InvalidRequest, MooncakeError, Refused
from mooncaked.keys import show_key
from mooncaked.pools.ssd.aligned import PAGE
from mooncaked.pools.ssd.books import Books
from mooncaked.pools.ssd.commit import Committer
from mooncaked.pools.ssd.disk import Disk, RealDisk
from mooncaked.pools.ssd.files import SegmentFiles
from mooncaked.pools.ssd.groups import GroupWriter
from mooncaked.pools.ssd.health import Health
from mooncaked.pools.ssd.manifest import (
    NAMES,
    TEMPORARY,
    check_manifest,
    make_manifest,
    read_manifest,
    write_manifest,
)
from mooncaked.pools.ssd.model import (
    DeviceState,
    DeviceStats,
    Keep,
    Lost,
    Progress,
    ReadStatus,
    SsdEntry,
    SsdItem,
    WriteStatus,
)
from mooncaked.pools.ssd.reading import Pending, Reader
from mooncaked.pools.ssd.recovery import Found, recover
from mooncaked.pools.ssd.space import Space
from mooncaked.units import format_size

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
SEGMENT_BYTES_MIN = 64 << 10
SEGMENT_BYTES_MAX = 2 << 30
GROUP_BYTES = 32 << 20
_DIRECTORY_BYTES = 64 << 10  # of the capacity: manifest, its successor, the directory itself


def slots_in(capacity_bytes: int, segment_bytes: int) -> int:
    """How many segment files may be there: with what the file system needs to find their pieces."""
    return max(0, capacity_bytes - _DIRECTORY_BYTES) // (segment_bytes + max(16 << 10, segment_bytes // 1024))


class SsdDevice:
    """Blocks in `directory`, which exists and is used by nobody else. All methods may be called from any
    thread; those that touch the disk block, and belong into threads of their own.

    `capacity_bytes` is what its files occupy at most. `node_id` owns the directory for ever. `readers`
    threads read at a time, beside those who call. Without `autoflush`, removals become durable with the next
    write, `flush` or `close` only. Raises `InvalidRequest` for a geometry that cannot be."""

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        *,
        node_id: str,
        clock: Clock,
        segment_bytes: int = SEGMENT_BYTES,
        group_bytes: int = GROUP_BYTES,
        readers: int = 4,
        number: int = 0,
        autoflush: bool = True,
        disk: Disk | None = None,
    ) -> None:
        self.directory = str(directory)
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._clock = clock
        self._node_id = node_id
        self._disk = RealDisk() if disk is None else disk
        slots = slots_in(capacity_bytes, segment_bytes)
        _check_geometry(self.directory, segment_bytes, slots, readers)
        files = SegmentFiles(self._disk, self.directory, segment_bytes)
        self._books = Books(number, files, slots, Health(self.directory))
        self._reader = Reader(self._books)
        writer = GroupWriter(self._books)
        self._space = Space(self._books, writer, self._reader, group_bytes)
        self._committer = Committer(self._books, writer, self._space, group_bytes)
        self._readers = readers
        self._autoflush = autoflush
        self._lock_fd: int | None = None
        self._threads: ThreadPoolExecutor | None = None  # for reads
        self._writers: ThreadPoolExecutor | None = None  # for writes that nobody waits for here
        self._closing = threading.Lock()

    # --- opening ----------------------------------------------------------------------------------------

    def open(
        self,
        *,
        lost: Lost | None = None,
        keep: Keep | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Take the directory and index what is in it. Raises `Refused` where it belongs to somebody else, and
        `OSError`; the state is then `failed`, with the reason, and the directory untouched."""
        try:
            self._open(lost, keep, progress or _silent)
        except (MooncakeError, OSError) as error:
            self._books.health.fail(str(error))
            self._release()
            raise

    def _open(self, lost: Lost | None, keep: Keep | None, progress: Progress) -> None:
        began = self._clock.monotonic()
        self._lock_fd = self._lock()
        slots, read_only = self._claim()
        found = recover(self._books, slots, progress)
        if not read_only and not self._books.files.writable:
            read_only = "its files cannot be opened for writing"
        self._report(found, self._clock.monotonic() - began)
        if lost is not None:
            self._books.lost = lost
        self._books.keep = keep
        self._threads = ThreadPoolExecutor(self._readers, thread_name_prefix="ssd-read")
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="ssd-write")
        if self._autoflush:
            self._books.removal_hook = self._flush_soon
        self._books.health.opened(read_only)
        if not read_only:
            with self._committer.turn:
                self._continue(found)

    def _lock(self) -> int:
        try:
            return self._disk.lock_directory(self.directory)
        except BlockingIOError as error:
            problem = f"another process uses {self.directory}"
            raise Refused(
                problem=problem, remedy="Stop it, or give each node a directory of its own."
            ) from error
        except FileNotFoundError as error:
            problem = f"{self.directory} does not exist"
            remedy = "Mount the disk there, or make the directory, owned by the daemon's user."
            raise Refused(problem=problem, remedy=remedy) from error

    def _claim(self) -> tuple[list[int], str]:
        """See to it that the directory is ours, and tidy up. Returns the slots whose files were allocated to
        their end (others hold nothing), and why the directory can only be read, if that is so."""
        files = self._books.files
        slots = files.slots()
        found, both = read_manifest(self._disk, self.directory)
        manifest = found or make_manifest(self._node_id, self.segment_bytes)
        if found is None and slots:
            problem = f"{self.directory} has segments, but no {NAMES[0]} that says whose they are"
            raise Refused(problem=problem, remedy="Empty the directory to start anew, or use another one.")
        check_manifest(manifest, self._node_id, self.segment_bytes, self.directory)
        self._books.owner = manifest.owner
        whole = [slot for slot in slots if files.is_whole(slot)]
        try:
            if not both:
                write_manifest(self._disk, self.directory, manifest)
            self._tidy(whole)
        except OSError as error:
            if not whole:
                raise
            self._books.health.write_failed(error)
            return whole, f"the directory cannot be changed: {error.strerror}"
        return whole, ""

    def _tidy(self, whole: Sequence[int]) -> None:
        """Remove what a crash left half made."""
        files = self._books.files
        for slot in set(files.slots()) - set(whole):
            files.delete(slot)
        if TEMPORARY in self._disk.listdir(self.directory):
            self._disk.unlink(str(Path(self.directory, TEMPORARY)))

    def _continue(self, found: Sequence[Found]) -> None:
        """Go on in the segment that was written last; seal those that were left open before it."""
        books = self._books
        try:
            for one in found:
                if one.unusable:  # whatever is in it must not be mistaken for something later
                    books.files.delete(one.slot)
            self._space.shrink()
        except OSError as error:
            books.health.write_failed(error)
        left_open = [one for one in found if one.blocks is not None and not one.sealed]
        for one in left_open:
            segment = books.segments.get(one.slot)
            if segment is None:
                continue
            if segment.generation == books.generation and not one.damaged:
                books.active = segment
            elif books.health.writable:
                self._space.seal(segment)
        if books.active is not None:
            with suppress(OSError):  # what keeps failing is met by the next write as well
                self._space.keep_reserve(books.active, 0)

    def _report(self, found: Sequence[Found], took_s: float) -> None:
        damaged = sum(one.damaged for one in found)
        with self._books.lock:
            blocks, live = len(self._books.index), self._books.index.live_bytes()
        log.info(
            "ssd device opened directory=%s blocks=%d bytes=%d segments=%d took_s=%.3f torn=%d damaged=%d "
            "direct=%s",
            self.directory,
            blocks,
            live,
            len(found),
            took_s,
            sum(one.torn for one in found),
            damaged,
            self._books.files.direct,
        )
        if damaged:
            detail = f"{damaged} groups or tables of groups cannot be read"
            self._books.health.note("corrupt", detail, "none: their blocks are lost, unless a copy was found")

    # --- use --------------------------------------------------------------------------------------------

    @property
    def state(self) -> DeviceState:
        """What it does now."""
        return self._books.health.state

    @property
    def writable(self) -> bool:
        """Whether it takes new blocks."""
        return self._books.health.writable

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""
        return self._committer.queued_bytes

    def used_share(self) -> float:
        """How much of what it may hold it holds, 0 to 1."""
        with self._books.lock:
            return self._books.index.live_bytes() / self.capacity_bytes

    def write(self, items: Sequence[SsdItem]) -> list[WriteStatus]:
        """Write blocks, together with what others write meanwhile, and return when they are durable."""
        return self._committer.write(items)

    def submit_write(self, items: Sequence[SsdItem]) -> Future[list[WriteStatus]]:
        """`write` in a thread of the device."""
        if self._writers is None:
            done: Future[list[WriteStatus]] = Future()
            done.set_result([WriteStatus.FAILED] * len(items))
            return done
        return self._writers.submit(self.write, items)

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks can be read; takes no lock."""
        return self._books.index.has(namespace, keys)

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> list[SsdEntry | None]:
        """The blocks of those names; None for what is not there."""
        return self._books.find(namespace, keys)

    def start_read(self, entries: Sequence[SsdEntry], views: Sequence[memoryview]) -> Pending:
        """Begin to read each entry into its view of exactly its size. `result` must be called, and until it
        returns the views must be left alone. Raises `InvalidRequest` for a view of another size."""
        for entry, view in zip(entries, views, strict=True):
            if view.nbytes != entry.size:
                problem = f"block {show_key(entry.key)} has {entry.size} bytes, its buffer {view.nbytes}"
                raise InvalidRequest(problem=problem)
        return self._reader.start(entries, views, self._threads)

    def read_into(self, entries: Sequence[SsdEntry], views: Sequence[memoryview]) -> list[ReadStatus]:
        """Read each entry into its view, verified; several calls at a time, and this thread takes part."""
        results = self.start_read(entries, views).result()
        self.count_read(entries, results)
        return results

    def count_read(self, entries: Sequence[SsdEntry], results: Sequence[ReadStatus]) -> None:
        """Count what a read that `start_read` began has brought."""
        self._reader.count(entries, results)

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Make blocks unreadable, at once; a restart does not bring them back after the next `flush`,
        which the device does by itself soon. Does not touch the disk. Returns which there were."""
        return self._books.remove(namespace, keys)

    def flush(self) -> bool:
        """Make removals durable; False when the disk did not take them."""
        return self._committer.flush()

    def _flush_soon(self) -> None:
        if self._writers is not None:
            with suppress(RuntimeError):  # closing, which flushes as well
                self._writers.submit(self.flush)

    def entries(self) -> Iterator[SsdEntry]:
        """Every block that can be read, segment by segment; what changes meanwhile may be in it or not."""
        with self._books.lock:
            slots = list(self._books.segments)
        for slot in slots:
            yield from self._books.entries_of(slot)

    def stats(self) -> DeviceStats:
        """Its figures now."""
        books, counters = self._books, self._books.counters
        with books.lock:
            written, device_written = counters.written_bytes, counters.device_written_bytes
            count = len(books.segments) + len(books.free)
            return DeviceStats(
                name=self.directory,
                state=books.health.state,
                reason=books.health.reason,
                direct=books.files.direct,
                capacity_bytes=self.capacity_bytes,
                allocated_bytes=count * self.segment_bytes,
                used_bytes=sum(segment.end for segment in books.segments.values()),
                live_bytes=books.index.live_bytes(),
                blocks=len(books.index),
                segments=count,
                segments_free=len(books.free),
                queued_bytes=self.queued_bytes,
                written_bytes=written,
                device_written_bytes=device_written,
                read_bytes=counters.read_bytes,
                stored_total=counters.stored,
                read_total=counters.read,
                carried_total=counters.carried,
                carried_bytes=counters.carried_bytes,
                lost=dict(counters.lost),
                errors=dict(books.health.errors),
                write_amplification=device_written / written if written else 1.0,
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless what it knows fits together."""
        self._books.check_integrity()

    def close(self) -> None:
        """Make removals durable, end its threads and let the directory go. May be called again."""
        with self._closing:
            if self._books.health.writable:
                self.flush()
            with self._committer.turn:  # no write is under way, and none begins after this
                self._books.health.closed()
            self._release()

    def _release(self) -> None:
        for threads in (self._writers, self._threads):
            if threads is not None:
                threads.shutdown()
        self._writers = self._threads = None
        self._books.files.close()
        if self._lock_fd is not None:
            self._disk.close(self._lock_fd)
            self._lock_fd = None


def _silent(done: int, total: int) -> None:
    """Nobody wants to know."""


def _check_geometry(directory: str, segment_bytes: int, slots: int, readers: int) -> None:
    if segment_bytes % PAGE or not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX:
        limits = f"{format_size(SEGMENT_BYTES_MIN)} to {format_size(SEGMENT_BYTES_MAX)}"
        problem = f"segments of {segment_bytes} bytes cannot be: whole pages of {PAGE} bytes, {limits}"
        raise InvalidRequest(problem=problem)
    if slots < 2:
        problem = f"{directory}: the capacity must have room for two segments of {segment_bytes} bytes"
        raise InvalidRequest(problem=problem)
    if readers < 1:
        raise InvalidRequest(problem=f"{readers} threads cannot read")
