"""Blocks that leave memory are written to the disks, ahead of need and in the background.

One thread decides what leaves, a few others write; nobody who stores or reads waits for any of them. What
they do not manage in time is evicted as if there were no disks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

import msgspec

from mooncaked.block import Block
from mooncaked.clock import Clock, Deadline
from mooncaked.pools.ssd import DeviceState, SsdItem, WriteStatus
from mooncaked.store import Leaving, Store
from mooncaked.tiers.below import Disks
from mooncaked.tiers.rate import Rate

log = logging.getLogger(__name__)

DEVICE_BYTES_MAX = 64 << 20  # on their way to one device
POOL_SHARE_MAX = 1 / 8  # of the pool, on its way
GROUP_BYTES = 16 << 20  # written by one call
TICK_S = 0.1
PAUSE_S = 1.0  # after the disks took a block in vain
_THREADS_PER_DEVICE = 2  # one group is made ready while the other is being written
_DRAIN_POLL_S = 0.02
_SAVED = (WriteStatus.STORED, WriteStatus.EXISTS)


class Demoted(msgspec.Struct, frozen=True, kw_only=True):
    """What was written since the start, and what is being written."""

    blocks: int
    size: int  # bytes
    failed: int  # blocks that the disks did not take
    queued_blocks: int
    queued_bytes: int


class Demoter:
    """Keeps the pool below its high watermark. `admits` says which blocks are worth being written."""

    def __init__(
        self,
        store: Store,
        disks: Disks,
        admits: Callable[[Block], bool],
        clock: Clock,
        *,
        bytes_per_s: float = 0.0,
        queue_bytes_max: int | None = None,
    ) -> None:
        """`bytes_per_s` is what may be written; 0: no limit."""
        devices = max(1, len(disks.stats()))
        self._store = store
        self._disks = disks
        self._admits = admits
        self._clock = clock
        self._rate = Rate(bytes_per_s)
        self._queue_bytes_max = queue_bytes_max or devices * DEVICE_BYTES_MAX
        self._threads = ThreadPoolExecutor(_THREADS_PER_DEVICE * devices, "demote")
        self._thread = threading.Thread(target=self._run, name="demoter", daemon=True)
        self._wake = threading.Event()
        self._stopping = False
        self._paused_until_s = -inf
        self._too_large = inf  # bytes; no disk takes a block of this size
        self._lock = threading.Lock()
        self._blocks = self._size = self._failed = self._queued_blocks = self._queued_bytes = 0

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def set_rate(self, bytes_per_s: float) -> None:
        """Change how much may be written in a second; 0: no limit."""
        self._rate.set(bytes_per_s)

    def stats(self) -> Demoted:
        """The figures now."""
        with self._lock:
            return Demoted(
                blocks=self._blocks,
                size=self._size,
                failed=self._failed,
                queued_blocks=self._queued_blocks,
                queued_bytes=self._queued_bytes,
            )

    def drain(self, deadline: Deadline) -> bool:
        """Choose nothing more, and wait until what was chosen is written; False: the deadline came first."""
        self._stop()
        while self.stats().queued_blocks:
            if deadline.passed():
                return False
            self._wake.wait(min(_DRAIN_POLL_S, deadline.left()))
        return True

    def close(self) -> None:
        """End. What is not being written yet stays in memory; a write that has begun is waited for."""
        self._stop()
        self._threads.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(TICK_S)
            self._wake.clear()
            if not self._stopping:
                self.step()

    def step(self) -> None:
        """Take what has to leave memory now, as much as may be on its way at once."""
        writable = any(device.state is DeviceState.ACTIVE for device in self._disks.stats())
        if not writable or self._paused():
            self._store.evict_to_low(lambda: self._stopping)
            return
        more = True
        while more and not self._stopping:
            taken = self._store.leave_or_evict(self._wants, self._room())
            more = taken.more
            for group in _groups(taken.leaving):
                self._submit(group)
        while not self._stopping and (ahead := self._store.leave_ahead(self._wants, self._room())):
            for group in _groups(ahead):
                self._submit(group)

    def _paused(self) -> bool:
        return self._clock.monotonic() < self._paused_until_s

    def _wants(self, block: Block) -> bool:
        return block.size < self._too_large and self._admits(block)

    def _room(self) -> int:
        """Bytes that may be taken on their way now."""
        if self._paused() or not self._rate.free(self._clock.monotonic()):
            return 0
        share = int(POOL_SHARE_MAX * self._store.stats().capacity_bytes)
        return max(0, min(self._queue_bytes_max, share) - self.stats().queued_bytes)

    def _submit(self, group: Sequence[Leaving]) -> None:
        size = sum(leaving.info.size for leaving in group)
        self._rate.take(size)
        with self._lock:
            self._queued_blocks += len(group)
            self._queued_bytes += size
        future = self._threads.submit(self._write, group)
        future.add_done_callback(lambda done: self._end(group, size, done))

    def _write(self, group: Sequence[Leaving]) -> list[WriteStatus]:
        items = [
            SsdItem(
                namespace=info.namespace,
                key=info.key,
                data=self._store.view(info.region, info.offset, info.size),
                parent=info.parent,
                meta=info.meta,
                checksum=info.checksum,
            )
            for info in (leaving.info for leaving in group)
        ]
        try:
            return self._disks.write(items)
        finally:
            for item in items:
                item.data.release()

    def _end(self, group: Sequence[Leaving], size: int, done: Future[list[WriteStatus]]) -> None:
        """A group was written, or given up."""
        if not done.cancelled() and (error := done.exception()):  # a bug, which must not keep blocks pinned
            log.error("blocks were not written count=%d", len(group), exc_info=error)
            statuses = [WriteStatus.FAILED] * len(group)
        else:
            statuses = [] if done.cancelled() else done.result()
        saved = [status in _SAVED for status in statuses] or [False] * len(group)
        self._store.left(group, saved)
        with self._lock:
            self._queued_blocks -= len(group)
            self._queued_bytes -= size
            for leaving, status in zip(group, statuses, strict=False):
                self._count(leaving, status)
        self._wake.set()

    def _count(self, leaving: Leaving, status: WriteStatus) -> None:
        if status in _SAVED:
            self._blocks += 1
            self._size += leaving.info.size
        elif status is WriteStatus.TOO_LARGE:
            self._too_large = min(self._too_large, leaving.info.size)
        elif status is not WriteStatus.REMOVED:
            self._failed += 1
            self._paused_until_s = self._clock.monotonic() + PAUSE_S


def _groups(leaving: Sequence[Leaving]) -> Iterator[list[Leaving]]:
    """In pieces for one call each."""
    group: list[Leaving] = []
    size = 0
    for each in leaving:
        if group and size + each.info.size > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(each)
        size += each.info.size
    if group:
        yield group
