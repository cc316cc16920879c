"""The DRAM pool: a sealed memfd, mapped here and by every client of the node, its pages in place from start.

Pre-faulting matters twice: the first write to a page that is not there yet costs a fault in the middle of a
request, and memory that the machine does not have is found out at start, not by a process killed later.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from mooncaked.errors import InvalidRequest, NotEnoughMemory
from mooncaked.types import Tier

PAGE = mmap.PAGESIZE
_CHUNK = 64 << 20  # bytes that one call populates: a step of progress, and how soon a stop is seen
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_KEY = "dram.size"  # the setting that an error names

Progress = Callable[[int, int], None]  # bytes done, bytes in all; called in the thread that called `prefault`


class DramPool:
    """`size` bytes of memory (rounded up to pages) as region number `region`.

    The memfd is sealed against resizing: a client that maps it can write, but cannot shrink it and so crash
    this process. Raises `NotEnoughMemory` when the machine or its cgroup cannot hold the pool."""

    tier = Tier.DRAM

    def __init__(self, size: int, region: int = 0, *, prefault_threads: int = 4) -> None:
        if size < 1 or prefault_threads < 1:
            raise InvalidRequest(
                problem=f"a pool of {size} bytes, filled by {prefault_threads} threads, cannot be"
            )
        self.region = region
        self.size = -(-size // PAGE) * PAGE
        self._threads = prefault_threads
        available = available_memory()
        if self.size > available:
            raise NotEnoughMemory(key=_KEY, size=size, cause=f"{available} bytes are available")
        self.fd = _sealed_memfd(f"mooncaked-region-{region}", self.size)
        try:
            self._map = mmap.mmap(self.fd, self.size)
        except OSError as error:
            os.close(self.fd)
            cause = f"it cannot be mapped: {os.strerror(error.errno or 0)}"
            raise NotEnoughMemory(key=_KEY, size=self.size, cause=cause) from error
        self._closed = False
        with suppress(OSError):  # fewer page faults and TLB misses where the kernel has huge pages for shmem
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    def prefault(self, progress: Progress | None = None, stop: threading.Event | None = None) -> bool:
        """Put every page in place, in `prefault_threads` threads that release the GIL; what is written there
        stays. False when `stop` was set before the end. Raises `NotEnoughMemory` when memory runs out."""
        anchor = ctypes.c_char.from_buffer(self._map)  # keeps the mapping while threads use its address
        chunks = _chunks(self.size)
        done = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="prefault") as threads:
            running: set[Future[int]] = set()
            while True:
                stopped = stop is not None and stop.is_set()
                while not stopped and len(running) < self._threads and (chunk := next(chunks, None)):
                    running.add(threads.submit(self._populate, ctypes.addressof(anchor), *chunk))
                if not running:
                    return done == self.size
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                done += sum(future.result() for future in finished)
                if progress is not None:
                    progress(done, self.size)

    def _populate(self, base: int, offset: int, size: int) -> int:
        try:
            self._put_in_place(base, offset, size)
        except OSError as error:
            cause = f"at byte {offset} the system said: {os.strerror(error.errno or 0)}"
            raise NotEnoughMemory(key=_KEY, size=self.size, cause=cause) from error
        return size

    def _put_in_place(self, base: int, offset: int, size: int) -> None:
        try:
            _madvise(base + offset, size, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel: at least give the file its pages, which leaves cheap faults for the mapping.
            os.posix_fallocate(self.fd, offset, size)

    def close(self) -> None:
        """Close the memfd and unmap. Where slices of `view` are still alive, the memory goes with the last of
        them. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.view.release()
        with suppress(BufferError):  # slices are alive; the mapping goes with the last one
            self._map.close()
        os.close(self.fd)


def available_memory() -> int:
    """Bytes that a new pool can take: what the kernel calls available, or less where a cgroup has a limit."""
    return min(_meminfo_available(), _cgroup_left())


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def _cgroup_left(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Room under the tightest memory limit of this process's cgroup (v2) and those above it."""
    left = 1 << 62
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return left
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        with suppress(OSError, ValueError):  # no limit file, or "max"
            limit = int((folder / "memory.max").read_text())
            left = min(left, limit - int((folder / "memory.current").read_text()) + _reclaimable(folder))
    return max(0, left)


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache in a cgroup, which the kernel drops before it refuses memory."""
    for line in (folder / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _sealed_memfd(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    return ((offset, min(_CHUNK, size - offset)) for offset in range(0, size, _CHUNK))


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL; mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _madvise(address: int, size: int, advice: int) -> None:
    while _libc.madvise(address, size, advice) != 0:
        number = ctypes.get_errno()
        if number not in (errno.EINTR, errno.EAGAIN):
            raise OSError(number, os.strerror(number))
