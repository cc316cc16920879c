"""The GPU pool on the stand-in device: copies both ways, page-locked memory and not, sharing, and errors."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest

from mooncaked.client.gpu import open_handle
from mooncaked.errors import (
    GpuFailed,
    GpuUnavailable,
    IntegrityError,
    InvalidRequest,
    MissingDependency,
    NotEnoughGpuMemory,
    Refused,
)
from mooncaked.pinning import HostPins
from mooncaked.pools import gpu_device
from mooncaked.pools.dram import DramPool
from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import CpuDevice, CudaDevice, Direction
from mooncaked.pools.gpu_staging import BUFFER_BYTES, Staging
from mooncaked.types import Tier

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[GpuPool]:
    pool = GpuPool("cpu", 16 * MIB, region=7)
    yield pool
    pool.close()


@pytest.fixture
def dram() -> Iterator[DramPool]:
    dram = DramPool(16 * MIB)
    yield dram
    dram.close()


def contents(pool: GpuPool) -> bytes:
    assert pool.view is not None
    return bytes(pool.view)


def test_a_pool_says_what_it_is_and_starts_as_zeros(pool: GpuPool) -> None:
    assert (pool.tier, pool.region, pool.size, pool.device) == (Tier.GPU, 7, 16 * MIB, "cpu")
    assert contents(pool) == bytes(16 * MIB)


@pytest.mark.parametrize("locked", [True, False], ids=["page-locked", "through staging"])
def test_any_bytes_go_in_and_come_out(pool: GpuPool, dram: DramPool, locked: bool) -> None:
    if locked:
        pool.pins.add(dram.region, dram.view)
    choose = random.Random(1)
    dram.view[:] = choose.randbytes(dram.size)
    for size in (0, 1, 63, 4097, MIB - 1, BUFFER_BYTES, 3 * BUFFER_BYTES + 5):
        source, place = choose.randrange(dram.size - size + 1), choose.randrange(pool.size - size + 1)
        host = dram.view[source : source + size]
        assert pool.copy_in(place, host).wait()
        back = bytearray(size)
        copy = pool.copy_out(place, back)
        assert copy.wait(1.0)
        assert copy.done()
        assert back == host


def test_a_copy_touches_nothing_beside_it(pool: GpuPool) -> None:
    pool.copy_in(0, b"\xff" * 4096).wait()
    pool.copy_in(1001, b"abc").wait()
    assert contents(pool)[999:1006] == b"\xff\xffabc\xff\xff"
    back = bytearray(b"-" * 10)
    pool.copy_out(1000, memoryview(back)[2:8]).wait()
    assert bytes(back) == b"--\xffabc\xff\xff--"


def test_batches_are_copied_as_one(pool: GpuPool, dram: DramPool) -> None:
    pool.pins.add(dram.region, dram.view)
    dram.view[:] = random.Random(2).randbytes(dram.size)
    pieces = [(7 * MIB - n * 65_521, dram.view[n * 70_001 : n * 70_001 + 60_013]) for n in range(100)]
    assert pool.copy_batch_in(pieces).wait()
    back = [(offset, bytearray(len(view))) for offset, view in pieces]
    assert pool.copy_batch_out(back).wait()
    assert [bytes(buffer) for _, buffer in back] == [bytes(view) for _, view in pieces]
    assert pool.copy_batch_in([]).wait()


def test_half_of_the_memory_is_locked(pool: GpuPool, dram: DramPool) -> None:
    """A copy that crosses borders is cut there: CUDA refuses one that does not lie in one locked piece."""
    pool.pins.add(0, dram.view[MIB : 2 * MIB])
    dram.view[:] = random.Random(3).randbytes(dram.size)
    assert pool.copy_in(3, dram.view[5 : 4 * MIB]).wait()
    assert contents(pool)[3 : 4 * MIB - 2] == bytes(dram.view[5 : 4 * MIB])


def test_buffers_of_every_kind(pool: GpuPool) -> None:
    pool.copy_in(0, np.arange(8, dtype="<i4")).wait()
    assert contents(pool)[:32] == np.arange(8, dtype="<i4").tobytes()
    back = np.zeros((2, 4), dtype="<i4")
    pool.copy_out(0, back).wait()
    assert back.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(InvalidRequest, match="bytes is read-only"):
        pool.copy_out(0, b"1234")
    with pytest.raises(InvalidRequest, match="int cannot be copied"):
        pool.copy_in(0, 5)
    with pytest.raises(InvalidRequest, match="ndarray cannot be copied"):
        pool.copy_in(0, np.zeros((4, 4), np.uint8)[:, 1])


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (16 * MIB, 1), (16 * MIB - 4, 5)])
def test_a_place_outside_is_refused(pool: GpuPool, offset: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match="are not in a pool of 16777216 bytes"):
        pool.copy_in(offset, bytes(size))


def test_both_directions_at_once_from_many_threads(pool: GpuPool) -> None:
    """Each thread has a part of the pool to itself, as blocks have, and shares the streams with others."""
    failures: list[int] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        for _ in range(30):
            data = choose.randbytes(choose.randrange(1, MIB))
            pool.copy_in(number * 2 * MIB, data).wait()
            back = bytearray(len(data))
            pool.copy_out(number * 2 * MIB, back).wait()
            if back != data:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_host_memory_is_not_copied_by_torchs_threads(
    pool: GpuPool, dram: DramPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`copy_` between two pieces of host memory waits for OpenMP's threads: milliseconds on busy cores."""

    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("copy_ was called")

    monkeypatch.setattr(gpu_device._torch().Tensor, "copy_", refuse)
    pool.pins.add(0, dram.view[:MIB])
    pool.copy_in(0, dram.view).wait()
    pool.copy_out(0, dram.view).wait()


# --- page-locked memory


class Recorder:
    """Locks by writing down, and refuses from some call on, as a system at its limit does."""

    def __init__(self, allowed: int = 1000) -> None:
        self.allowed = allowed
        self.locked: dict[int, int] = {}

    def lock(self, address: int, size: int) -> None:
        if len(self.locked) == self.allowed:
            raise GpuFailed(device="cuda:0", operation="cuMemHostRegister_v2", cause="out of memory")
        self.locked[address] = size

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_memory_is_locked_in_chunks_with_progress(dram: DramPool) -> None:
    recorder, seen = Recorder(), []
    pins = HostPins(recorder, chunk_bytes=6 * MIB)
    assert pins.add(0, dram.view, lambda done, size: seen.append((done, size)))
    assert seen == [(6 * MIB, 16 * MIB), (12 * MIB, 16 * MIB), (16 * MIB, 16 * MIB)]
    assert list(recorder.locked.values()) == [6 * MIB, 6 * MIB, 4 * MIB]
    assert pins.locked_bytes == 16 * MIB
    pins.close()
    pins.close()
    assert (recorder.locked, pins.locked_bytes) == ({}, 0)


def test_locking_stops_when_told_to(dram: DramPool) -> None:
    pins, stop = HostPins(Recorder(), chunk_bytes=MIB), threading.Event()
    assert not pins.add(0, dram.view, lambda done, size: stop.set(), stop)
    assert pins.locked_bytes == MIB


def test_what_cannot_be_locked_is_said_once_and_taken_around(
    dram: DramPool, caplog: pytest.LogCaptureFixture
) -> None:
    pins = HostPins(Recorder(allowed=2), chunk_bytes=MIB)
    assert not pins.add(3, dram.view)
    assert pins.locked_bytes == 2 * MIB
    assert "2MiB of 16MiB are page-locked: out of memory; the limit of locked memory" in pins.failure
    assert "memory not page-locked region=3 locked=2MiB size=16MiB" in caplog.text
    assert "LimitMEMLOCK" in caplog.text


def test_runs_are_cut_at_the_borders_of_chunks() -> None:
    memory = memoryview(bytearray(64))
    pins = HostPins(Recorder(), chunk_bytes=8)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    pins.add(0, memory[16:32])
    pins.add(1, memory[40:44])

    def runs(start: int, size: int) -> list[tuple[int, int, bool]]:
        return [(start + run.offset, run.size, run.locked) for run in pins.runs(base + start, size)]

    assert runs(0, 64) == [
        (0, 16, False), (16, 8, True), (24, 8, True), (32, 8, False), (40, 4, True), (44, 20, False),
    ]  # fmt: skip
    assert runs(16, 8) == [(16, 8, True)]
    assert runs(20, 8) == [(20, 4, True), (24, 4, True)]
    assert runs(44, 4) == [(44, 4, False)]
    pins.remove(0)
    assert runs(16, 28) == [(16, 24, False), (40, 4, True)]


def test_two_pools_share_what_is_locked(dram: DramPool) -> None:
    one = GpuPool("cpu", MIB, 1)
    other = GpuPool("cpu", MIB, 2, pins=one.pins)
    one.pins.add(0, dram.view)
    other.close()
    assert one.pins.locked_bytes == dram.size, "the pool that made the pins ends them"
    one.close()
    assert one.pins.locked_bytes == 0


# --- sharing

_ENGINE = """
import sys, msgspec
from mooncaked.client.gpu import open_handle
from mooncaked.types import GpuHandle
tensor = open_handle(msgspec.json.decode(sys.stdin.buffer.readline(), type=GpuHandle))
print(bytes(tensor[100:105].numpy()).decode(), tensor.numel(), flush=True)
tensor[200:204] = tensor[100:104]
"""


def test_another_process_reads_and_writes_the_same_memory(pool: GpuPool) -> None:
    pool.copy_in(100, b"hello").wait()
    handle = msgspec.json.encode(pool.export()) + b"\n"
    engine = subprocess.run(
        [sys.executable, "-c", _ENGINE], input=handle, capture_output=True, check=True, timeout=60
    )
    assert engine.stdout.decode().split() == ["hello", str(pool.size)]
    back = bytearray(4)
    pool.copy_out(200, back).wait()
    assert back == b"hell"


def test_shared_memory_outlives_the_pool_but_its_handle_does_not() -> None:
    pool = GpuPool("cpu", MIB, 1)
    handle = pool.export()
    tensor = open_handle(handle)
    pool.copy_in(0, b"kept").wait()
    pool.close()
    assert bytes(tensor[:4].numpy()) == b"kept"
    with pytest.raises(GpuFailed, match="opening the shared memory failed"):
        open_handle(handle)


def test_a_handle_that_does_not_fit_is_refused(pool: GpuPool) -> None:
    handle = pool.export()
    with pytest.raises(IntegrityError, match="has 16777216 bytes, not 4096"):
        open_handle(msgspec.structs.replace(handle, size=4096))
    with pytest.raises(IntegrityError, match="3 bytes for"):
        open_handle(msgspec.structs.replace(handle, device="GPU-1", token=b"abc"))


def test_the_stand_in_has_no_dmabuf_and_says_why(pool: GpuPool) -> None:
    found = pool.dmabuf()
    assert found.fd is None
    assert "registered by its address" in found.reason


# --- errors


@pytest.mark.parametrize("size", [0, -4096, 5000])
def test_a_size_in_whole_pages_is_asked_for(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"a GPU pool of {size} bytes"):
        GpuPool("cpu", size, 1)


def test_a_pool_larger_than_the_device_is_refused_with_the_numbers() -> None:
    size = psutil.virtual_memory().total + 4096
    with pytest.raises(
        NotEnoughGpuMemory, match=rf"pool of {size} bytes .* on cpu: of its \d+ bytes, \d+ are"
    ):
        GpuPool("cpu", size, 1)


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:x", "cuda:-1", ""])
def test_a_name_that_is_none(device: str) -> None:
    with pytest.raises(GpuUnavailable, match='Write "cuda:0"'):
        GpuPool(device, 4096, 1)


def test_without_torch_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(MissingDependency, match=r"pip install 'mooncaked\[gpu\]'"):
            GpuPool(device, 4096, 1)


def test_a_closed_pool_refuses(pool: GpuPool) -> None:
    pool.close()
    pool.close()
    for use in (lambda: pool.copy_in(0, b"x"), pool.export, pool.dmabuf, lambda: pool.view):
        with pytest.raises(Refused, match="closed"):
            use()


def test_opening_and_closing_leaks_no_descriptor_and_no_memory() -> None:
    process = psutil.Process()
    GpuPool("cpu", MIB, 1).close()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(20):
        pool = GpuPool("cpu", 16 * MIB, 1)
        pool.copy_in(0, bytes(16 * MIB)).wait()
        pool.close()
        del pool
    assert process.num_fds() == descriptors
    assert process.memory_info().rss - memory < 64 * MIB


def test_the_daemon_does_not_import_torch() -> None:
    program = "import sys, mooncaked.daemon, mooncaked.pools.gpu, mooncaked.gpu, mooncaked.client.gpu; "
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# --- staging on a device that is slow


class LateDevice(CpuDevice):
    """Copies only when somebody waits, in the order of the stream, as a GPU may."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[LateCopy] = []
        self.buffers = 0

    def staging(self, size: int) -> object:
        self.buffers += 1
        return super().staging(size)

    def copy(self, direction: Direction, pairs: object) -> LateCopy:
        self.waiting.append(LateCopy(self, list(pairs)))  # type: ignore[call-overload]
        return self.waiting[-1]


class LateCopy:
    def __init__(self, device: LateDevice, pairs: list[tuple[object, object]]) -> None:
        self.device, self.pairs = device, pairs

    def done(self) -> bool:
        return self not in self.device.waiting

    def wait(self, timeout_s: float | None = None) -> bool:
        while not self.done():
            copy = self.device.waiting.pop(0)
            for into, source in copy.pairs:
                into.copy_(source)  # type: ignore[attr-defined]
        return True


def test_no_buffer_is_used_again_before_its_copy_is_over() -> None:
    device = LateDevice()
    data = bytearray(random.Random(4).randbytes(100_003))
    host = device.host_tensor(memoryview(data))
    there = device.staging(len(data))
    inwards = Staging(device, Direction.IN, buffer_bytes=4096)
    inwards.copy([(there[:50_000], host[:50_000]), (there[50_000:], host[50_000:])])  # type: ignore[index]
    assert device.copy(Direction.IN, []).wait()
    back = device.host_tensor(memoryview(bytearray(len(data))))
    Staging(device, Direction.OUT, buffer_bytes=4096).copy([(back, there)])
    assert bytes(back.numpy()) == data
    assert device.buffers == 1 + 2 * 4, "the buffers are few, however much is copied"


class HungDevice(LateDevice):
    def copy(self, direction: Direction, pairs: object) -> LateCopy:
        return HungCopy(self, [])


class HungCopy(LateCopy):
    def wait(self, timeout_s: float | None = None) -> bool:
        return False


def test_a_device_that_hangs_is_an_error() -> None:
    device = HungDevice()
    host = device.host_tensor(memoryview(bytearray(100)))
    with pytest.raises(GpuFailed, match="cpu: copying failed: it has not ended in 60 s"):
        Staging(device, Direction.OUT).copy([(host, host)])


# --- the CUDA device: what can be said without one is in tests/unit/test_cuda.py


def test_a_machine_without_cuda_says_so() -> None:
    if gpu_device._torch().cuda.is_available():
        pytest.skip("there is a GPU here: mooncakectl bench gpu checks it")
    with pytest.raises(GpuUnavailable, match=r"cuda:0 cannot be used: .*(without CUDA|no GPU is visible)"):
        CudaDevice(0)
