"""How fast copies to and from a GPU pool are, beside torch's plain `copy_` of as many bytes, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec

from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import Tensor

_ROUNDS = 5
_BLOCK_ROUNDS = 200


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    direction: str  # "in" | "out"
    host_memory: str  # "locked" | "pageable"
    bytes_per_s: float  # of the pool's copies, in blocks
    plain_bytes_per_s: float  # of one `copy_` of everything
    ratio: float  # ours to plain; above 1 is faster
    block_p50_us: float  # one block, from the call to its end


def measure(pool: GpuPool, host: memoryview, plain: Tensor, block: int, host_memory: str) -> list[Speed]:
    """Both directions. `plain` is host memory of the same kind for torch to copy."""
    pieces = [(at, host[at : at + block]) for at in range(0, pool.size, block)]
    one = [pieces[len(pieces) // 2]]
    tensor = pool.tensor
    return [
        _speed(
            "in",
            host_memory,
            pool.size,
            lambda: pool.copy_batch_in(pieces).wait(),
            lambda: tensor.copy_(plain),
            lambda: pool.copy_batch_in(one).wait(),
        ),
        _speed(
            "out",
            host_memory,
            pool.size,
            lambda: pool.copy_batch_out(pieces).wait(),
            lambda: plain.copy_(tensor),
            lambda: pool.copy_batch_out(one).wait(),
        ),
    ]


def _speed(
    direction: str,
    host_memory: str,
    size: int,
    ours: Callable[[], object],
    plain: Callable[[], object],
    block: Callable[[], object],
) -> Speed:
    ours(), plain()  # what the first use sets up
    rounds = [(seconds(ours), seconds(plain)) for _ in range(_ROUNDS)]
    ours_s, plain_s = (median(column) for column in zip(*rounds, strict=True))
    return Speed(
        direction=direction,
        host_memory=host_memory,
        bytes_per_s=size / ours_s,
        plain_bytes_per_s=size / plain_s,
        ratio=plain_s / ours_s,
        block_p50_us=1e6 * median(seconds(block) for _ in range(_BLOCK_ROUNDS)),
    )


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
