"""How fast a client stores and reads on its node, beside plain copies of the same sizes in the same process.

Every measured call is followed by a copy of the same size between buffers of this process, so that whatever
else runs on the machine slows both. A ratio compares their medians: 1 is as fast as the copy alone.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles

import msgspec

from mooncaked.client import Client, PutResult
from mooncaked.errors import InvalidRequest, PoolFull

KIB, MIB = 1 << 10, 1 << 20
NAMESPACE = "bench/store"
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
_BUFFER_BYTES = 64 * MIB  # that values come from and go to, in turn: twice, more than most caches hold
_SET_BYTES = 128 * MIB  # of values in the pool at once, if it is large enough
_VALUES_MAX = 256
_SHARE_MAX = 1 / 4  # of the pool
_SETTLE_S = 0.2  # for the node to work out checksums, before reads are measured


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured operation."""

    operation: str
    size: int  # bytes of one value; 0 where none is moved
    batch: int  # keys in one call
    calls: int
    per_s: float  # keys
    bytes_per_s: float
    p50_us: float  # of a call
    p99_us: float
    client_cpu_s_per_gb: float
    daemon_cpu_s_per_gb: float
    copy_p50_us: float  # of plain copies of the same bytes
    ratio: float  # of the medians: copy to call


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows, and where they were measured."""

    node_id: str
    pool_bytes: int
    load_average: float
    rows: list[Row]


class _Clockwork:
    """Times one operation and the copies beside it."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self.calls_s: list[float] = []
        self.copies_s: list[float] = []
        self._client_s = self._daemon_s = 0.0

    def run(self, rounds: Sequence[Callable[[], object]], copy: Callable[[int], object] | None) -> None:
        """Make each call once, each followed by its copy."""
        now = time.perf_counter
        client_s, daemon_s = 0.0, cpu_seconds(self._pid)
        for number, call in enumerate(rounds):
            cpu_s, begin = time.thread_time(), now()
            call()
            self.calls_s.append(now() - begin)
            client_s += time.thread_time() - cpu_s
            if copy is not None:
                begin = now()
                copy(number)
                self.copies_s.append(now() - begin)
        self._client_s += client_s
        self._daemon_s += cpu_seconds(self._pid) - daemon_s

    def row(self, operation: str, size: int, batch: int) -> Row:
        """What came of it."""
        total_s, calls = sum(self.calls_s), len(self.calls_s)
        moved_gb = calls * batch * size / 1e9
        p50, copy_p50 = median(self.calls_s), median(self.copies_s) if self.copies_s else 0.0
        return Row(
            operation=operation,
            size=size,
            batch=batch,
            calls=calls,
            per_s=calls * batch / total_s,
            bytes_per_s=calls * batch * size / total_s,
            p50_us=p50 * 1e6,
            p99_us=quantiles(self.calls_s, n=100)[-1] * 1e6 if calls > 1 else p50 * 1e6,
            client_cpu_s_per_gb=self._client_s / moved_gb if moved_gb else 0.0,
            daemon_cpu_s_per_gb=self._daemon_s / moved_gb if moved_gb else 0.0,
            copy_p50_us=copy_p50 * 1e6,
            ratio=copy_p50 / p50,
        )


class Buffers:
    """Two pieces of memory of this process, each cut into pieces of one size."""

    def __init__(self, size: int) -> None:
        count = max(2, _BUFFER_BYTES // size)
        self._maps = [mmap.mmap(-1, count * size) for _ in range(2)]
        for number, piece in enumerate(self._maps):
            piece.write(os.urandom(MIB)[: min(MIB, size)] * (count * size // min(MIB, size)))
            piece.seek(0)
            if number:
                memoryview(piece)[:] = bytes(1) * len(piece)
        views = [memoryview(piece) for piece in self._maps]
        self.sources, self.targets = (
            [view[start : start + size] for start in range(0, count * size, size)] for view in views
        )

    def copy(self, number: int) -> None:
        """A plain copy of one piece to another."""
        self.targets[(number * 7 + 3) % len(self.targets)][:] = self.sources[
            (number * 5 + 1) % len(self.sources)
        ]


def bench(
    path: Path, sizes: Sequence[int] = SIZES, batch: int = 32, rounds: int = 3, token: str | None = None
) -> Report:
    """Measure the node whose client socket is at `path`; what is stored for that is removed. Raises what a
    client raises, `InvalidRequest` for sizes that the pool cannot hold, and `PoolFull`."""
    with Client(path, NAMESPACE, token=token) as client:
        hello = client.hello()
        pool = sum(region.size for region in hello.regions)
        if not sizes or min(sizes) < 1 or max(sizes) * 2 > pool * _SHARE_MAX or batch < 1 or rounds < 1:
            problem = (
                f"sizes from 1 to {int(pool * _SHARE_MAX / 2)} bytes can be measured in a pool of {pool}"
            )
            raise InvalidRequest(problem=f"{problem}, with a batch and rounds of at least 1")
        pid = listener_pid(path)
        rows = [*_questions(client, batch, rounds, pid)]
        for size in sizes:
            rows += _values(client, size, batch, rounds, pid, int(pool * _SHARE_MAX))
        return Report(node_id=hello.node_id, pool_bytes=pool, load_average=os.getloadavg()[0], rows=rows)


def _questions(client: Client, batch: int, rounds: int, pid: int | None) -> Iterator[Row]:
    keys = [f"{os.getpid()}/question/{number}" for number in range(max(batch, _VALUES_MAX))]
    _check(client.put_batch(keys, [b"x" * 64] * len(keys)), 64)

    def view(key: str) -> None:
        with client.get_view(key):
            pass

    try:
        time.sleep(_SETTLE_S)
        for operation, calls, count in (
            ("exists", [lambda key=key: client.exists(key) for key in keys], 1),
            ("exists", [lambda: client.exists_batch(keys[:batch])] * len(keys), batch),
            ("exists (miss)", [lambda: client.exists("nothing of that name")] * len(keys), 1),
            ("view", [lambda key=key: view(key) for key in keys], 1),
        ):
            clock = _Clockwork(pid)
            for _ in range(rounds * 4):
                clock.run(calls, None)
            yield clock.row(operation, 0, count)
    finally:
        client.remove_batch(keys)


def _values(client: Client, size: int, batch: int, rounds: int, pid: int | None, limit: int) -> Iterator[Row]:
    """Rows for one size: put and get_into, one by one and in batches."""
    batch = max(1, min(batch, limit // 2 // size))
    count = max(batch, min(_VALUES_MAX, min(_SET_BYTES, limit) // size)) // batch * batch
    buffers = Buffers(size)
    for each in sorted({1, batch}):
        puts, gets = _Clockwork(pid), _Clockwork(pid)

        def copy(number: int, each: int = each) -> None:
            for step in range(each):
                buffers.copy(number * each + step)

        for turn in range(rounds + 1):
            # The first turn warms up: memory, reservations.
            used = (puts, gets) if turn else (_Clockwork(pid), _Clockwork(pid))
            keys = [f"{os.getpid()}/{size}/{each}/{turn}/{number}" for number in range(count)]
            try:
                used[0].run(
                    [_put(client, keys, buffers, start, each) for start in range(0, count, each)], copy
                )
                time.sleep(_SETTLE_S)
                used[1].run(
                    [_get(client, keys, buffers, start, each) for start in range(0, count, each)], copy
                )
            finally:
                client.remove_batch(keys)
        yield puts.row("put", size, each)
        yield gets.row("get_into", size, each)


def _put(client: Client, keys: Sequence[str], buffers: Buffers, start: int, count: int) -> Callable[[], None]:
    sources = [buffers.sources[number % len(buffers.sources)] for number in range(start, start + count)]
    chosen = keys[start : start + count]
    if count == 1:
        return lambda: _check([client.put(chosen[0], sources[0])], len(sources[0]))
    return lambda: _check(client.put_batch(chosen, sources), len(sources[0]))


def _get(
    client: Client, keys: Sequence[str], buffers: Buffers, start: int, count: int
) -> Callable[[], object]:
    targets = [buffers.targets[number % len(buffers.targets)] for number in range(start, start + count)]
    chosen = keys[start : start + count]
    if count == 1:
        return lambda: client.get_into(chosen[0], targets[0])
    return lambda: client.get_into_batch(chosen, targets)


def _check(results: Sequence[PutResult], size: int) -> None:
    if any(result is not PutResult.STORED for result in results):
        raise PoolFull(size=size, capacity="the bench's share", pinned="too many", key="[dram] size")


def listener_pid(path: Path) -> int | None:
    """The process that listens at a unix socket, None if the system does not tell."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        pid: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid or None


def cpu_seconds(pid: int | None) -> float:
    """What all threads of a process have used so far; 0 if that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
