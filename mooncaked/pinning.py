"""Page-locked host memory: what a GPU reads and writes by itself, at full speed and while others work.

Memory is locked in chunks: one call for a whole pool of hundreds of GiB shows no progress, cannot be stopped,
and fails in some drivers. A copy must not cross from one chunk into the next, nor into memory that is not
locked: CUDA refuses it. So a copy asks for its `runs` first.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np

from mooncaked.errors import GpuFailed
from mooncaked.units import format_size

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 30


class Locker(Protocol):
    """What locks; `mooncaked.cuda.Primary` does."""

    def lock(self, address: int, size: int) -> None:
        """Page-lock; raises `GpuFailed`."""

    def unlock(self, address: int) -> None:
        """Undo `lock`; raises `GpuFailed`."""


class NoLocker:
    """For the stand-in of a GPU, which reads all memory alike."""

    def lock(self, address: int, size: int) -> None:
        """Nothing needs to be done."""

    def unlock(self, address: int) -> None:
        """Nothing was done."""


class Run(msgspec.Struct, frozen=True):
    """A piece of memory that one copy may cover."""

    offset: int  # bytes, in the memory that was asked about
    size: int  # bytes
    locked: bool


class _Chunk(msgspec.Struct, frozen=True):
    start: int  # address
    end: int
    region: int


class HostPins:
    """The host memory that is locked for the GPUs. Any thread may call."""

    def __init__(self, locker: Locker, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._locker = locker
        self._chunk_bytes = chunk_bytes
        self._changes = threading.Lock()
        self._chunks: tuple[_Chunk, ...] = ()  # by address; replaced as a whole, so it is read without a lock
        self._views: dict[int, memoryview] = {}  # by region; keeps the memory mapped while it is locked
        self.failure = ""  # why some memory is not locked

    @property
    def locked_bytes(self) -> int:
        """Bytes that are locked."""
        return sum(chunk.end - chunk.start for chunk in self._chunks)

    def add(
        self,
        region: int,
        view: memoryview,
        progress: Callable[[int, int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> bool:
        """Lock a region's memory (`view` begins at a page, and its pages are in place), telling `progress`
        the bytes done and in all. False when `stop` was set, or when the system refused: what was locked
        until then stays, and copies of the rest go through a staging buffer."""
        base, size = address_of(view), view.nbytes
        with self._changes:
            self._views[region] = view
            for done in range(0, size, self._chunk_bytes):
                if stop is not None and stop.is_set():
                    return False
                count = min(self._chunk_bytes, size - done)
                try:
                    self._locker.lock(base + done, count)
                except GpuFailed as error:
                    self._refused(region, size, done, str(error.fields["cause"]))
                    return False
                self._set([*self._chunks, _Chunk(base + done, base + done + count, region)])
                if progress is not None:
                    progress(done + count, size)
        return True

    def remove(self, region: int) -> None:
        """Unlock a region. Nothing may be copying from or to it."""
        with self._changes:
            chunks = [chunk for chunk in self._chunks if chunk.region == region]
            self._set([chunk for chunk in self._chunks if chunk.region != region])
            for chunk in chunks:
                try:
                    self._locker.unlock(chunk.start)
                except GpuFailed as error:
                    log.warning("memory not unlocked region=%d cause=%s", region, error)
            self._views.pop(region, None)

    def close(self) -> None:
        """Unlock everything. May be called again."""
        for region in list(self._views):
            self.remove(region)

    def runs(self, address: int, size: int) -> Iterator[Run]:
        """The memory at `address` in pieces that are locked as one, or not at all."""
        chunks = self._chunks
        at, end = address, address + size
        for index in range(bisect_right(chunks, at, key=lambda chunk: chunk.end), len(chunks)):
            chunk = chunks[index]
            if chunk.start >= end:
                break
            if chunk.start > at:
                yield Run(at - address, chunk.start - at, False)
                at = chunk.start
            part = min(chunk.end, end) - at
            yield Run(at - address, part, True)
            at += part
        if at < end:
            yield Run(at - address, end - at, False)

    def _set(self, chunks: list[_Chunk]) -> None:
        self._chunks = tuple(sorted(chunks, key=lambda chunk: chunk.start))

    def _refused(self, region: int, size: int, done: int, cause: str) -> None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "none" if limit == resource.RLIM_INFINITY else format_size(limit)
        self.failure = (
            f"of region {region}, {format_size(done)} of {format_size(size)} are page-locked: {cause}; "
            f"the limit of locked memory (ulimit -l) is {shown}"
        )
        log.warning(
            'memory not page-locked region=%d locked=%s size=%s memlock_limit=%s cause="%s" '
            'remedy="copies of the rest take a detour; set LimitMEMLOCK=infinity, or lower dram.size"',
            region,
            format_size(done),
            format_size(size),
            shown,
            cause,
        )


def address_of(view: memoryview) -> int:
    """Where the bytes of `view` are; whoever uses the address keeps the view."""
    if view.readonly or not view.nbytes:
        return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
