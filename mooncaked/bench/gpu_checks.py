"""Whether a GPU pool keeps every byte: against a copy of it in this process's memory."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import xxhash

from mooncaked.bench.gpu_peer import Task
from mooncaked.errors import MooncakeError
from mooncaked.pools.gpu import GpuPool

_SPAN = 64 << 20  # bytes of the pool that are checked at most
_COPIES = 300
_THREADS = 4
_PEER_LIMIT_S = 120.0


class Check(msgspec.Struct, frozen=True):
    """One check."""

    name: str
    passed: bool
    detail: str


class WrongByte(Exception):
    """What came back is not what was put in."""


def run_checks(pool: GpuPool, host: memoryview, seed: int) -> list[Check]:
    """All checks, on memory `host`, of which the first half may be locked and the second is not."""
    return [
        _check("odd places and sizes, both ways", lambda: odd_copies(pool, host, seed)),
        _check("copies in both directions at once", lambda: copies_at_once(pool, host, seed)),
        _check("two processes", lambda: two_processes(pool, host, seed)),
    ]


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name, True, run())
    except (WrongByte, MooncakeError) as error:
        return Check(name, False, str(error))


def odd_copies(pool: GpuPool, host: memoryview, seed: int) -> str:
    """Copies of any size from and to any place, and in the end all that was checked."""
    choose = random.Random(seed)
    span = min(pool.size, _SPAN, len(host))
    host[:span] = choose.randbytes(span)
    pool.copy_in(0, host[:span]).wait()
    mirror = np.array(host[:span], np.uint8)
    copied = 0
    for _ in range(_COPIES):
        size = min(span, int(2 ** choose.uniform(0, 23)) | 1)
        place, start = choose.randrange(span - size + 1), choose.randrange(len(host) - size + 1)
        part = host[start : start + size]
        if choose.random() < 0.5:
            part[:] = choose.randbytes(size)
            pool.copy_in(place, part).wait()
            mirror[place : place + size] = part
        else:
            pool.copy_out(place, part).wait()
            _compare(part, mirror[place : place + size].data, place)
        copied += size
    pool.copy_out(0, host[:span]).wait()
    _compare(host[:span], mirror.data, 0)
    return f"{_COPIES} copies, {copied} bytes"


def copies_at_once(pool: GpuPool, host: memoryview, seed: int) -> str:
    """Threads that copy in and out, each in a part of the pool of its own."""
    part = min(pool.size, len(host), _SPAN) // _THREADS
    wrong: list[Exception] = []

    def work(number: int) -> None:
        choose = random.Random(seed + number)
        base = number * part
        try:
            for _ in range(20):
                size = choose.randrange(1, part // 2)
                data, back = host[base : base + size], host[base + part // 2 : base + part // 2 + size]
                data[:] = choose.randbytes(size)
                coming = pool.copy_batch_in(
                    [(base, data[: size // 3]), (base + size // 3, data[size // 3 :])]
                )
                coming.wait()
                pool.copy_batch_out([(base, back)]).wait()
                _compare(back, data, base)
        except (WrongByte, MooncakeError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    return f"{_THREADS} threads, {20 * _THREADS} copies each way"


def two_processes(pool: GpuPool, host: memoryview, seed: int) -> str:
    """Another process sees these bytes, and we see what it writes."""
    choose = random.Random(seed)
    size = min(pool.size, len(host), _SPAN)
    host[:size] = choose.randbytes(size)
    pool.copy_in(0, host[:size]).wait()
    piece = max(1, size // 9)
    pieces = [(choose.randrange(n * piece, (n + 1) * piece - piece // 2), piece // 2) for n in range(8)]
    task = msgspec.json.encode(Task(pool.export(), pieces)) + b"\n"
    peer = subprocess.run(
        [sys.executable, "-m", "mooncaked.bench.gpu_peer"],
        input=task,
        capture_output=True,
        timeout=_PEER_LIMIT_S,
    )
    if peer.returncode:
        reason = peer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise WrongByte(f"the other process ended with {peer.returncode}: {reason}")
    digests = msgspec.json.decode(peer.stdout, type=list[int])
    for (offset, length), digest in zip(pieces, digests, strict=True):
        if xxhash.xxh3_64_intdigest(host[offset : offset + length]) != digest:
            raise WrongByte(f"the other process reads other bytes at {offset}+{length}")
        back = bytearray(length)
        pool.copy_out(offset, back).wait()
        _compare(memoryview(back), np.invert(np.frombuffer(host, np.uint8, length, offset)).data, offset)
    return f"{len(pieces)} pieces of {piece // 2} bytes read and changed by another process"


def _compare(found: memoryview, expected: memoryview, place: int) -> None:
    if found == expected:
        return
    differ = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    raise WrongByte(
        f"{differ.size} of {len(found)} bytes at {place} are wrong, the first at {place + differ[0]}"
    )
