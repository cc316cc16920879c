"""How long it takes until blocks on disk are found again after a restart."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from mooncaked.bench.ssd_contenders import NAMESPACE, make_key, make_pool
from mooncaked.clock import Clock
from mooncaked.errors import Unhealthy
from mooncaked.pools.ssd import SsdItem, WriteStatus
from mooncaked.pools.ssd.aligned import aligned_buffer
from mooncaked.pools.ssd.device import GROUP_BYTES
from mooncaked.pools.ssd.disk import RealDisk


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that were found again."""

    blocks: int
    block_bytes: int
    segments: int
    open_s: float
    memory_bytes_per_block: float  # growth of this process


class SparseDisk(RealDisk):
    """Writes headers and tables and leaves the values out, so that a million blocks need no terabyte."""

    def allocate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        super().pwritev(fd, buffers[:1], offset)
        return sum(map(len, buffers))

    def fdatasync(self, fd: int) -> None:
        return

    def free_bytes(self, path: str) -> int:
        return 1 << 60


def adopt(directory: Path, blocks: int, block_bytes: int, clock: Clock) -> Adoption:
    """How long it takes until `blocks` blocks are found again after a restart."""
    directory.mkdir()
    size = blocks * block_bytes
    pool = make_pool(directory, size, clock, SparseDisk())
    value = aligned_buffer(block_bytes)[:block_bytes]  # zeros, which is what holes read as
    checksum = xxhash.xxh3_64_intdigest(value)
    step = max(1, GROUP_BYTES // block_bytes)
    parent: bytes | None = None
    for start in range(0, blocks, step):
        items = []
        for number in range(start, min(blocks, start + step)):
            key = make_key(number)
            items.append(SsdItem(namespace=NAMESPACE, key=key, data=value, parent=parent, checksum=checksum))
            parent = None if number % 64 == 63 else key
        if set(pool.write(items)) != {WriteStatus.STORED}:
            raise Unhealthy(what="the SSD", cause=pool.stats()[0].reason)
    segments = pool.stats()[0].segments
    pool.close()
    del pool
    before, began = _resident_bytes(), clock.monotonic()
    pool = make_pool(directory, size, clock)
    took = clock.monotonic() - began
    found = pool.stats()[0].blocks
    grown = _resident_bytes() - before
    pool.close()
    shutil.rmtree(directory)
    if found != blocks:
        raise Unhealthy(what="the SSD", cause=f"{found} of {blocks} blocks were found again")
    return Adoption(
        blocks=blocks,
        block_bytes=block_bytes,
        segments=segments,
        open_s=took,
        memory_bytes_per_block=grown / blocks,
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
