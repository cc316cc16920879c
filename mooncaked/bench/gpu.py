"""Checks a GPU pool and measures its copies: `mooncakectl bench gpu`, or by itself on a machine with a GPU:

    python -m mooncaked.bench.gpu --device cuda:0 --size 1GiB --block 1MiB --json

Exits with 10 when a byte was wrong, with 3 when the device cannot be used."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import msgspec

from mooncaked.bench.gpu_checks import Check, run_checks
from mooncaked.bench.gpu_speed import Speed, measure, seconds
from mooncaked.errors import InvalidRequest, MooncakeError, Unhealthy
from mooncaked.pools.dram import DramPool
from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import Device, open_device
from mooncaked.units import format_size, parse_size

PAGE = 4096
_SEED = 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    device: str
    size_bytes: int
    block_bytes: int
    checks: list[Check]
    speeds: list[Speed]
    lock_s_per_gib: float  # page-locking host memory whose pages are in place
    locked_bytes: int
    lock_failure: str  # why not all of it is locked
    dmabuf: str  # "yes", or why not
    load_average: float  # of the machine, at the start


def bench(name: str, size: int, block: int) -> Report:
    """Check and measure. Raises what `GpuPool` does, `NotEnoughMemory`, or `InvalidRequest`."""
    if not 0 < block <= size:
        raise InvalidRequest(problem=f"blocks of {block} bytes do not fit a pool of {size}")
    size = -(-size // PAGE) * PAGE
    load_average = os.getloadavg()[0]
    device = open_device(name)
    pool = GpuPool(device, size, region=1)
    dram = DramPool(size, region=0)
    try:
        dram.prefault()
        speeds = measure(pool, dram.view, _pageable(device, size), block, "pageable")
        half = size // 2 // PAGE * PAGE
        pool.pins.add(0, dram.view[:half])
        checks = run_checks(pool, dram.view, _SEED)
        pool.pins.remove(0)
        lock_s = seconds(lambda: pool.pins.add(0, dram.view))
        speeds += measure(pool, dram.view, device.staging(size), block, "locked")
        return Report(
            device=pool.device,
            size_bytes=size,
            block_bytes=block,
            checks=checks,
            speeds=speeds,
            lock_s_per_gib=lock_s * (1 << 30) / max(1, pool.pins.locked_bytes),
            locked_bytes=pool.pins.locked_bytes,
            lock_failure=pool.pins.failure,
            dmabuf=_dmabuf(pool),
            load_average=load_average,
        )
    finally:
        pool.close()
        dram.close()


def _pageable(device: Device, size: int) -> object:
    return device.host_tensor(memoryview(bytearray(size)))


def _dmabuf(pool: GpuPool) -> str:
    found = pool.dmabuf()
    if found.fd is None:
        return found.reason
    os.close(found.fd)
    return "yes"


def as_text(report: Report) -> str:
    """The report for people."""
    lines = [
        f"{report.device}: {format_size(report.size_bytes)} in blocks of {format_size(report.block_bytes)}"
    ]
    lines += [f"{'ok' if c.passed else 'WRONG':6}{c.name}: {c.detail}" for c in report.checks]
    lines += [
        f"copy {s.direction:4}{s.host_memory:9}{s.bytes_per_s / 1e9:8.2f} GB/s   copy_ "
        f"{s.plain_bytes_per_s / 1e9:8.2f} GB/s   ratio {s.ratio:.2f}   block p50 {s.block_p50_us:.0f} us"
        for s in report.speeds
    ]
    locked = report.lock_failure or f"{report.lock_s_per_gib:.3f} s per GiB"
    return "\n".join([*lines, f"page-locking: {locked}", f"dma-buf: {report.dmabuf}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mooncaked.bench.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help='"cuda:N", or "cpu" for a stand-in')
    parser.add_argument("--size", default="1GiB", help="of the pool, and of the host memory")
    parser.add_argument("--block", default="1MiB", help="of one copy")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args(argv)
    try:
        report = bench(arguments.device, _size(arguments.size), _size(arguments.block))
    except MooncakeError as error:
        told = {"error": {"code": error.code, "message": str(error)}}
        if arguments.json:
            sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
        else:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print(as_text(report))
    return 0 if all(check.passed for check in report.checks) else Unhealthy.exit_code


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidRequest(problem=f"{error}; write for example 1GiB") from error


if __name__ == "__main__":
    sys.exit(main())
