"""The daemon's memory as a client sees it: one mapping per region, valid for one life of the daemon."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mooncaked.api.protocol import HelloReply
from mooncaked.client.gpu_regions import GpuRegions
from mooncaked.client.shared import SharedWords
from mooncaked.errors import IntegrityError

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_STEP = 2 << 20  # bytes whose page table entries are made at once
_WORTHWHILE_BYTES = 64 << 10  # for a smaller value, a fault for each page that it really touches is cheaper


class _Region:
    """One region. Its pages are the daemon's and in place; what a new process lacks is its page table, and a
    fault per 4 KiB to make it would cost more than the copies. So it is made in steps, where needed."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.memory = memoryview(self._map)
        self._known = bytearray(-(-size // _STEP))  # by step: whether its page table was made
        with suppress(OSError):  # where the kernel has huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def prepare(self, offset: int, size: int) -> None:
        """Make the page table for these bytes."""
        first, end = offset // _STEP, -(-(offset + size) // _STEP)
        if self._known.find(0, first, end) < 0:
            return
        for step in range(first, end):
            if not self._known[step]:
                self._known[step] = 1
                start = step * _STEP
                with suppress(OSError):  # an older kernel: the faults then come one by one
                    self._map.madvise(_MADV_POPULATE_READ, start, min(_STEP, len(self.memory) - start))


class Mapping:
    """The regions of one daemon (of one `epoch`), mapped shared, and writable if the daemon lets clients
    write.

    The memory stays mapped as long as anybody holds a view of it, also when the daemon is gone: its bytes
    then stay what they were. A daemon that starts again has another epoch and gets a mapping of its own,
    so that a write which was begun before can never reach the memory of the new one."""

    def __init__(
        self, hello: HelloReply, fds: Sequence[int], renew: Callable[[Mapping], None] | None = None
    ) -> None:
        """Map each region of `hello` from the descriptor at its place; the caller closes the descriptors.
        `renew` is called when a region is named that is not known, and calls `update`.

        Raises `IntegrityError` when they do not fit together."""
        self._renew = renew
        self.epoch = hello.epoch
        self.writable = hello.writable
        self.shared: SharedWords | None = None
        self.gpus = GpuRegions(hello.gpus)
        self._regions: dict[int, _Region] = {}
        self._changing = threading.Lock()
        self.update(hello, fds)
        if hello.direct is not None:
            self.shared = SharedWords(hello, hello.direct, fds[len(hello.regions) :])

    def update(self, hello: HelloReply, fds: Sequence[int]) -> None:
        """Map regions that are new, and forget those that are no longer; otherwise as at the beginning."""
        expected = len(hello.regions) + (0 if hello.direct is None else 2 + bool(hello.direct.posted_bytes))
        if len(fds) != expected:
            detail = f"{len(hello.regions)} regions came with {len(fds)} descriptors"
            raise IntegrityError(what="the daemon's greeting", detail=detail)
        with self._changing:
            known = self._regions
            regions: dict[int, _Region] = {}
            for info, fd in zip(hello.regions, fds, strict=False):
                if not 0 < info.size <= os.fstat(fd).st_size:  # touching a page behind the end would kill us
                    detail = f"region {info.region} does not have the {info.size} bytes announced"
                    raise IntegrityError(what="the daemon's greeting", detail=detail)
                found = known.get(info.region)
                regions[info.region] = found or _Region(fd, info.size, writable=hello.writable)
            self._regions = regions
        self.gpus.update(hello.gpus)

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """The bytes of one block; raises `IntegrityError` for a place outside of the regions."""
        found = self._regions.get(region)
        if found is None and self._renew is not None:  # it may have been added since
            self._renew(self)
            found = self._regions.get(region)
        if found is None or offset < 0 or size < 0 or offset + size > len(found.memory):
            raise IntegrityError(
                what="the daemon's reply", detail=f"no bytes {offset}+{size} in region {region}"
            )
        if size >= _WORTHWHILE_BYTES:
            found.prepare(offset, size)
        return found.memory[offset : offset + size]

    def gpu_view(self, region: int, offset: int, size: int) -> Any:
        """The bytes of one block in GPU memory, as a torch tensor; opens that memory when it is first asked
        for. Raises `IntegrityError` as `view` does, and what `mooncaked.client.gpu.open_handle` raises."""
        if not self.gpus.knows(region) and self._renew is not None:  # it may have been opened since
            self._renew(self)
        return self.gpus.view(region, offset, size)

    def views(self) -> list[memoryview]:
        """The whole memory of each region."""
        return [region.memory for region in self._regions.values()]

    def largest(self) -> int:
        """Bytes of the largest region; a value lies in one of them."""
        return max((len(region.memory) for region in self._regions.values()), default=0)

    def capacity(self) -> int:
        """Bytes of all regions together."""
        return sum(len(region.memory) for region in self._regions.values())
