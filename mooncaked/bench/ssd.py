"""How fast this machine's SSD is through the SSD pool, beside fio: `python -m mooncaked.bench.ssd --dir DIR`.

Both write and read the same blocks with O_DIRECT, in turns, each round into files made anew. The pool writes
groups of 32 MiB with a sync after each, so fio gets a queue as deep as such a group and a sync as often;
the pool reads with its threads, up to 4 MiB in each of their calls, and fio gets as many requests at a time
as there are blocks in those. A queue of one is measured as well. The ratio is of each round, since other
users of the disk change its speed from minute to minute. What the pool does beyond fio, checksums above
all, is in its time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from mooncaked.bench.ssd_adoption import Adoption, adopt
from mooncaked.bench.ssd_contenders import (
    MEMORY_BYTES,
    Contender,
    Pass,
    PoolContender,
    fio_contenders,
    fio_version,
)
from mooncaked.clock import Clock, SystemClock
from mooncaked.errors import InvalidRequest, MooncakeError, Unhealthy
from mooncaked.units import format_size, parse_size


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One contender over all rounds."""

    kind: str  # "write" or "read"
    what: str  # "pool", or "fio" and the depth of its queue
    gb_per_s: float  # 10^9 bytes, median
    cpu_s_per_gb: float  # median
    ratio: float | None  # of the pool's speed to this one's in the same round, median; None: it is the pool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result."""

    directory: str
    direct: bool  # O_DIRECT was in use
    block_bytes: int
    size_bytes: int
    rounds: int
    load: float  # average of the last minute, at the end
    fio: str  # its version; empty: it is not installed
    speeds: list[Speed]
    adoption: Adoption | None


def measure(turns: Sequence[Contender], rounds: int) -> dict[tuple[str, str], list[Pass]]:
    """Passes by kind and contender, one for each round. Everybody is first once, and then last."""
    passes: dict[tuple[str, str], list[Pass]] = {}
    for number in range(rounds):
        shift = number % len(turns)
        order = [*turns[shift:], *turns[:shift]]
        try:
            for one in order:
                passes.setdefault(("write", one.name), []).append(one.write())
            for one in order:
                if "read" in one.kinds:
                    passes.setdefault(("read", one.name), []).append(one.read())
        finally:
            for one in order:
                one.clear()
    return passes


def speeds(turns: Sequence[Contender], passes: dict[tuple[str, str], list[Pass]], size: int) -> list[Speed]:
    """What the passes come to."""
    result = []
    for kind in ("write", "read"):
        for one in turns:
            if kind in one.kinds and (own := passes.get((kind, one.name))):
                pool = passes[kind, turns[0].name]
                ratios = [theirs.seconds / ours.seconds for theirs, ours in zip(own, pool, strict=True)]
                result.append(
                    Speed(
                        kind=kind,
                        what=one.name,
                        gb_per_s=size / median(p.seconds for p in own) / 1e9,
                        cpu_s_per_gb=median(p.cpu_s for p in own) / size * 1e9,
                        ratio=None if one is turns[0] else median(ratios),
                    )
                )
    return result


def run(
    parent: Path, size: int, block: int, rounds: int, blocks: int, with_fio: bool, clock: Clock
) -> Report:
    """Measure in a directory made in `parent` and removed after: `size` bytes a round, and `blocks` blocks
    that are found again after a restart. Raises `Unhealthy` when the disk does not do its part."""
    version = fio_version() if with_fio else ""
    size -= size % block
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=parent) as made:
        directory = Path(made)
        adoption = adopt(directory / "adopt", blocks, block, clock) if blocks else None
        pool = PoolContender(directory / "pool", size, block, clock)
        turns: list[Contender] = [pool, *(fio_contenders(directory, size, block) if version else [])]
        passes = measure(turns, rounds)
    return Report(
        directory=str(parent),
        direct=pool.direct,
        block_bytes=block,
        size_bytes=size,
        rounds=rounds,
        load=os.getloadavg()[0],
        fio=version,
        speeds=speeds(turns, passes, size),
        adoption=adoption,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. With --json, an error is JSON on standard output as well; the exit code is its
    own."""
    parser = argparse.ArgumentParser(prog="mooncaked.bench.ssd", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the disk")
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--block", default="1MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--adopt", type=int, default=0, metavar="BLOCKS")
    parser.add_argument("--no-fio", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    try:
        size, block = _sizes(given.size, given.block)
        report = run(given.dir, size, block, given.rounds, given.adopt, not given.no_fio, SystemClock())
    except MooncakeError as error:
        return _complain(error, given.json)
    except OSError as error:
        return _complain(Unhealthy(what=str(given.dir), cause=os.strerror(error.errno or 0)), given.json)
    print(msgspec.json.encode(report).decode() if given.json else _as_text(report))
    return 0


def _sizes(size: str, block: str) -> tuple[int, int]:
    """Bytes in all and of a block; raises `InvalidRequest`."""
    try:
        total, one = parse_size(size), parse_size(block)
    except ValueError as error:
        raise InvalidRequest(problem=str(error)) from error
    if not 1 <= one <= min(total, MEMORY_BYTES):
        problem = f"a block of {block} cannot be: at least a byte, at most --size and 128MiB"
        raise InvalidRequest(problem=problem)
    return total, one


def _complain(error: MooncakeError, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": {"code": error.code, "message": str(error)}}))
    else:
        print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _as_text(report: Report) -> str:
    lines = [f"{s.kind} {s.what}: {s.gb_per_s:.3f} GB/s {s.cpu_s_per_gb:.3f} CPU s/GB" for s in report.speeds]
    if (adoption := report.adoption) is not None:
        block = format_size(adoption.block_bytes)
        lines.append(f"adoption of {adoption.blocks} blocks of {block}: {adoption.open_s:.2f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
