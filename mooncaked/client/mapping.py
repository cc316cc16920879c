"""The daemon's memory as a client sees it: one mapping per region, valid for one life of the daemon."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

from mooncaked.api.protocol import HelloReply
from mooncaked.errors import IntegrityError

_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_STEP = 2 << 20  # bytes whose page table entries are made at once
_WORTHWHILE_BYTES = 64 << 10  # for a smaller value, a fault for each page that it really touches is cheaper


class _Region:
    """One region. Its pages are the daemon's and in place; what a new process lacks is its page table, and a
    fault per 4 KiB to make it would cost more than the copies. So it is made in steps, where needed."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        self.memory = memoryview(self._map)
        self._known = bytearray(-(-size // _STEP))  # by step: whether its page table was made
        with suppress(OSError):  # where the kernel has huge pages for shared memory
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def prepare(self, offset: int, size: int) -> None:
        """Make the page table for these bytes."""
        for step in range(offset // _STEP, -(-(offset + size) // _STEP)):
            if not self._known[step]:
                self._known[step] = 1
                start = step * _STEP
                with suppress(OSError):  # an older kernel: the faults then come one by one
                    self._map.madvise(_MADV_POPULATE_READ, start, min(_STEP, len(self.memory) - start))


class Mapping:
    """The regions of one daemon (of one `epoch`), mapped shared and writable.

    The memory stays mapped as long as anybody holds a view of it, also when the daemon is gone: its bytes
    then stay what they were. A daemon that starts again has another epoch and gets a mapping of its own,
    so that a write which was begun before can never reach the memory of the new one."""

    def __init__(self, hello: HelloReply, fds: Sequence[int]) -> None:
        """Map each region of `hello` from the descriptor at its place; the caller closes the descriptors.

        Raises `IntegrityError` when they do not fit together."""
        if len(fds) != len(hello.regions):
            detail = f"{len(hello.regions)} regions came with {len(fds)} descriptors"
            raise IntegrityError(what="the daemon's greeting", detail=detail)
        self.epoch = hello.epoch
        self._regions: dict[int, _Region] = {}
        for info, fd in zip(hello.regions, fds, strict=True):
            if not 0 < info.size <= os.fstat(fd).st_size:  # touching a page behind the end would kill us
                detail = f"region {info.region} does not have the {info.size} bytes announced"
                raise IntegrityError(what="the daemon's greeting", detail=detail)
            self._regions[info.region] = _Region(fd, info.size)

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """The bytes of one block; raises `IntegrityError` for a place outside of the regions."""
        found = self._regions.get(region)
        if found is None or offset < 0 or size < 0 or offset + size > len(found.memory):
            raise IntegrityError(
                what="the daemon's reply", detail=f"no bytes {offset}+{size} in region {region}"
            )
        if size >= _WORTHWHILE_BYTES:
            found.prepare(offset, size)
        return found.memory[offset : offset + size]

    def capacity(self) -> int:
        """Bytes of all regions together."""
        return sum(len(region.memory) for region in self._regions.values())
