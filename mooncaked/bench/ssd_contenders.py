"""Who writes and reads in the SSD bench: the pool, and fio."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import xxhash

from mooncaked.clock import Clock
from mooncaked.errors import Unhealthy
from mooncaked.pools.ssd import ReadStatus, SsdDevice, SsdItem, SsdPool, WriteStatus
from mooncaked.pools.ssd.aligned import aligned_buffer
from mooncaked.pools.ssd.device import GROUP_BYTES, SEGMENT_BYTES
from mooncaked.pools.ssd.disk import RealDisk
from mooncaked.pools.ssd.reading import CALL_BYTES

READERS = 4
NAMESPACE = "bench"
MEMORY_BYTES = 128 << 20  # that blocks are written from and read into, over and over


class Pass(NamedTuple):
    """One way over all blocks."""

    seconds: float
    cpu_s: float


class Contender(Protocol):
    """Writes and reads all blocks, in files of its own."""

    name: str
    kinds: tuple[str, ...]  # that it is measured for

    def write(self) -> Pass:
        """Write all blocks into new files."""

    def read(self) -> Pass:
        """Read all of them back."""

    def clear(self) -> None:
        """Remove the files."""


# --- the pool -------------------------------------------------------------------------------------------


def make_pool(directory: Path, size_bytes: int, clock: Clock, disk: RealDisk | None = None) -> SsdPool:
    """An opened pool of one device that holds `size_bytes`; raises `Unhealthy` where that cannot be."""
    segment = min(SEGMENT_BYTES, max(4 << 20, size_bytes // 8 // 4096 * 4096))
    capacity = size_bytes + size_bytes // 8 + 4 * segment
    device = SsdDevice(
        directory,
        capacity,
        node_id="bench",
        clock=clock,
        segment_bytes=segment,
        readers=READERS,
        disk=disk,
    )
    pool = SsdPool([device])
    pool.open()
    if not device.writable:
        raise Unhealthy(what=str(directory), cause=pool.stats()[0].reason)
    return pool


def make_key(number: int) -> bytes:
    """The key of a block."""
    return xxhash.xxh3_128_digest(number.to_bytes(8, "little"))


def write_blocks(pool: SsdPool, memory: memoryview, count: int, block: int) -> None:
    """Write `count` blocks out of `memory`; raises `Unhealthy` unless all are stored."""
    held = len(memory) // block
    for start in range(0, count, held):
        items = [
            SsdItem(namespace=NAMESPACE, key=make_key(n), data=memory[i * block : (i + 1) * block])
            for i, n in enumerate(range(start, min(count, start + held)))
        ]
        if set(statuses := pool.write(items)) != {WriteStatus.STORED}:
            raise Unhealthy(what="the SSD", cause=f"blocks came back as {set(statuses)}")


def read_blocks(pool: SsdPool, memory: memoryview, count: int, block: int) -> None:
    """Read them all back, verified; raises `Unhealthy` unless all are whole."""
    held = len(memory) // block
    views = [memory[i * block : (i + 1) * block] for i in range(held)]
    for start in range(0, count, held):
        keys = [make_key(n) for n in range(start, min(count, start + held))]
        entries = [entry for entry in pool.lookup(NAMESPACE, keys) if entry is not None]
        statuses = set(pool.read_into(entries, views[: len(entries)]))
        if len(entries) < len(keys) or statuses != {ReadStatus.OK}:
            raise Unhealthy(what="the SSD", cause=f"{len(entries)} of {len(keys)} blocks, as {statuses}")


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


class PoolContender:
    """The SSD pool. `direct` says after a pass whether O_DIRECT was in use."""

    name = "pool"
    kinds: tuple[str, ...] = ("write", "read")

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int, clock: Clock) -> None:
        self._directory = directory
        self._block = block_bytes
        self._count = size_bytes // block_bytes
        self._clock = clock
        self._memory = aligned_buffer(max(MEMORY_BYTES, block_bytes))
        for at in range(0, len(self._memory), 1 << 20):  # no zeros, which some disks do not store
            self._memory[at : at + (1 << 20)] = os.urandom(len(self._memory[at : at + (1 << 20)]))
        self._pool: SsdPool | None = None
        self.direct = False

    def write(self) -> Pass:
        """Write all blocks into a new directory."""
        self._directory.mkdir()
        self._pool = make_pool(self._directory, self._count * self._block, self._clock)
        return self._timed(write_blocks, self._pool)

    def read(self) -> Pass:
        """Read all of them back, verified."""
        if self._pool is None:
            raise Unhealthy(what="the bench", cause="there is nothing to read yet")
        return self._timed(read_blocks, self._pool)

    def _timed(self, work: Callable[[SsdPool, memoryview, int, int], None], pool: SsdPool) -> Pass:
        cpu, began = _cpu_s(resource.RUSAGE_SELF), self._clock.monotonic()
        work(pool, self._memory, self._count, self._block)
        took = self._clock.monotonic() - began
        self.direct = pool.stats()[0].direct
        return Pass(took, _cpu_s(resource.RUSAGE_SELF) - cpu)

    def clear(self) -> None:
        """Close the pool and remove the directory."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        shutil.rmtree(self._directory, ignore_errors=True)


# --- fio ------------------------------------------------------------------------------------------------


def depths(block: int, kind: str) -> list[int]:
    """Queue depths for fio: one, and what the pool has under way at a time."""
    under_way = GROUP_BYTES if kind == "write" else CALL_BYTES * (READERS + 1)
    return sorted({1, min(256, max(1, under_way // block))})


class FioContender:
    """fio with one depth of queue for writes or reads, or both."""

    def __init__(
        self, path: Path, size_bytes: int, block_bytes: int, depth: int, kinds: tuple[str, ...]
    ) -> None:
        self.name = f"fio, queue of {depth}"
        self.kinds = kinds
        self._path = path
        self._block = block_bytes
        self._depth = depth
        self._options = [f"--filename={path}", f"--size={size_bytes}", f"--bs={block_bytes}"]

    def write(self) -> Pass:
        """Write a new file, with a sync as often as the pool syncs."""
        self._path.unlink(missing_ok=True)
        return self._run("write", f"--fdatasync={max(1, GROUP_BYTES // self._block)}")

    def read(self) -> Pass:
        """Read the file back."""
        return self._run("read")

    def _run(self, kind: str, *options: str) -> Pass:
        command = ["fio", "--name=bench", *self._options, *options, f"--rw={kind}", "--direct=1"]
        command += ["--ioengine=libaio", f"--iodepth={self._depth}", "--output-format=json"]
        cpu = _cpu_s(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            cause = done.stderr.strip()[-200:] or f"it exited with {done.returncode}"
            raise Unhealthy(what="fio", cause=cause)
        figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]
        return Pass(figures["runtime"] / 1e3, _cpu_s(resource.RUSAGE_CHILDREN) - cpu)

    def clear(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def fio_version() -> str:
    """Empty where it is not installed."""
    if shutil.which("fio") is None:
        return ""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


def fio_contenders(directory: Path, size: int, block: int) -> list[FioContender]:
    """One for each depth of queue."""
    kinds: dict[int, tuple[str, ...]] = {}
    for kind in ("write", "read"):
        for depth in depths(block, kind):
            kinds[depth] = (*kinds.get(depth, ()), kind)
    return [FioContender(directory / f"fio-{d}", size, block, d, names) for d, names in kinds.items()]
