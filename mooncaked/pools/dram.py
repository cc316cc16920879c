"""The DRAM pool's regions: memory mapped here and by every client of the node, its pages in place from start.

Pre-faulting matters twice: the first write to a page that is not there yet costs a fault in the middle of a
request, and memory that the machine does not have is found out at start, not by a process killed later.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress

from mooncaked.errors import ConfigError, InvalidRequest, NotEnoughMemory
from mooncaked.pools import memory
from mooncaked.pools.memory import HUGE_BYTES, PAGE, available_memory, make_memfd, round_up
from mooncaked.types import Tier
from mooncaked.units import format_size

log = logging.getLogger(__name__)

_CHUNK = 64 << 20  # bytes that one call populates: a step of progress, and how soon a stop is seen
_KEY = "dram.size"  # the setting that an error names

MakeMemory = Callable[[int, str], int]  # a size in bytes and a kind of pages; the descriptor
Progress = Callable[[int, int], None]  # bytes done, bytes in all; called in the thread that called `prefault`


class DramPool:
    """`size` bytes of memory (rounded up to pages) as region number `region`.

    An anonymous region is sealed against resizing: a client that maps it can write, but cannot shrink it and
    so crash this process. Raises `NotEnoughMemory` when the machine or its cgroup cannot hold the pool."""

    tier = Tier.DRAM

    def __init__(
        self,
        size: int,
        region: int = 0,
        *,
        huge_pages: str = "transparent",
        numa_nodes: Sequence[int] = (),
        prefault_threads: int = 4,
        fd: int | None = None,
        make: MakeMemory | None = None,
    ) -> None:
        """`huge_pages`: "off", "transparent" (where the kernel does so), or reserved ones, "2MiB" or "1GiB";
        where too few are reserved, it is "transparent", and the log says what to do. `numa_nodes`: where the
        pages come from, in turn; raises `ConfigError` for a node that cannot be. `fd`: memory of that size
        that there is already; the region closes it. `make`: makes memory that outlives this process, and
        raises `OSError` where it cannot; without it, the memory is anonymous."""
        if size < 1 or prefault_threads < 1:
            raise InvalidRequest(
                problem=f"a pool of {size} bytes, filled by {prefault_threads} threads, cannot be"
            )
        self.region = region
        self._asked = size
        self.size = round_up(size, huge_pages)
        self.huge_pages = huge_pages  # what it has, which may be less than what was asked for
        self.numa_nodes = tuple(numa_nodes)
        self.kept = fd is not None or make is not None
        self.prefaulted_bytes = 0
        self._threads = prefault_threads
        self._closed = False
        self.fd, self._map = self._take(make or self._anonymous) if fd is None else self._adopt(fd)
        try:
            self._place()
        except BaseException:
            self._map.close()
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def _anonymous(self, size: int, huge_pages: str) -> int:
        return make_memfd(f"mooncaked-region-{self.region}", size, huge_pages)

    def _take(self, make: MakeMemory) -> tuple[int, mmap.mmap]:
        """New memory, of the best kind that there is."""
        if self.huge_pages in HUGE_BYTES:
            try:
                return self._mapped(make(self.size, self.huge_pages))
            except (OSError, NotEnoughMemory):
                log.warning(
                    "huge pages are not there, using transparent ones size=%s wanted=%s remedy=%r",
                    format_size(self.size),
                    self.huge_pages,
                    memory.huge_pages_remedy(self.huge_pages, self.size),
                )
            self.huge_pages, self.size = "transparent", round_up(self._asked, "transparent")
        available = available_memory()
        if self.size > available:
            raise NotEnoughMemory(key=_KEY, size=self.size, cause=f"{available} bytes are available")
        return self._mapped(make(self.size, self.huge_pages))

    def _adopt(self, fd: int) -> tuple[int, mmap.mmap]:
        found = os.fstat(fd).st_size
        if found != self.size:
            os.close(fd)
            raise InvalidRequest(problem=f"region {self.region} has {found} bytes, not {self.size}")
        return self._mapped(fd)

    def _mapped(self, fd: int) -> tuple[int, mmap.mmap]:
        try:
            return fd, mmap.mmap(fd, self.size)
        except OSError as error:
            os.close(fd)
            cause = f"it cannot be mapped: {os.strerror(error.errno or 0)}"
            raise NotEnoughMemory(key=_KEY, size=self.size, cause=cause) from error

    def _place(self) -> None:
        """Tell the kernel what pages to use, and from where."""
        if self.huge_pages == "transparent":
            with suppress(OSError):  # fewer page faults and TLB misses where the kernel has them for shmem
                self._map.madvise(mmap.MADV_HUGEPAGE)
        if not self.numa_nodes:
            return
        anchor = ctypes.c_char.from_buffer(self._map)
        try:
            memory.bind_to_nodes(ctypes.addressof(anchor), self.size, self.numa_nodes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise _no_such_node(self.numa_nodes) from error
            log.warning("memory cannot be bound to NUMA nodes nodes=%s cause=%s", self.numa_nodes, error)
            self.numa_nodes = ()
        finally:
            del anchor  # else the mapping could not be closed

    def prefault(self, progress: Progress | None = None, stop: threading.Event | None = None) -> bool:
        """Put every page in place, in `prefault_threads` threads that release the GIL; what is written there
        stays. False when `stop` was set before the end. Raises `NotEnoughMemory` when memory runs out."""
        anchor = ctypes.c_char.from_buffer(self._map)  # keeps the mapping while threads use its address
        chunks = _chunks(self.size, max(_CHUNK, HUGE_BYTES.get(self.huge_pages, PAGE)))
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
                self.prefaulted_bytes = done
                if progress is not None:
                    progress(done, self.size)

    def _populate(self, base: int, offset: int, size: int) -> int:
        try:
            memory.populate(base + offset, size, self.fd, offset)
        except OSError as error:
            cause = f"at byte {offset} the system said: {os.strerror(error.errno or 0)}"
            raise NotEnoughMemory(key=_KEY, size=self.size, cause=cause) from error
        return size

    def discard(self) -> None:
        """Give the pages back to the system at once, although clients may still map them; nobody may use the
        region any more."""
        with suppress(OSError):  # a kernel without it: they go with the last mapping
            memory.punch_hole(self.fd, self.size)

    def close(self) -> None:
        """Close the descriptor and unmap. Where slices of `view` are still alive, the memory goes with the
        last of them. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.view.release()
        with suppress(BufferError):  # slices are alive; the mapping goes with the last one
            self._map.close()
        os.close(self.fd)


def _no_such_node(nodes: Sequence[int]) -> ConfigError:
    there = ", ".join(map(str, memory.memory_nodes()))
    problem = f"memory cannot come from NUMA node {', '.join(map(str, nodes))}"
    remedy = f"Nodes with memory here are: {there}"
    return ConfigError(file="this machine", key="dram.numa", problem=problem, remedy=remedy)


def check_nodes(nodes: Sequence[int], origin: str) -> None:
    """Raise `ConfigError` when this machine has no memory at one of the NUMA nodes."""
    missing = [node for node in nodes if node not in memory.memory_nodes()]
    if missing:
        there = ", ".join(map(str, memory.memory_nodes()))
        problem = f"there is no memory at NUMA node {', '.join(map(str, missing))}"
        raise ConfigError(
            file=origin, key="dram.numa", problem=problem, remedy=f"Nodes with memory here are: {there}"
        )


def _chunks(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((offset, min(step, size - offset)) for offset in range(0, size, step))
