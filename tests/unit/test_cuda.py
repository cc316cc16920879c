"""What the daemon asks of CUDA's driver and of torch, against a driver that only keeps books.

That real ones do what is asked is checked by `mooncakectl bench gpu` on a machine with a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mooncaked.client import Client
from mooncaked.client import gpu as client
from mooncaked.cuda import Driver
from mooncaked.errors import GpuFailed, GpuUnavailable, NotEnoughGpuMemory
from mooncaked.pinning import address_of
from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import CudaDevice
from tests.fakes.fake_cuda import NOT_SUPPORTED, OUT_OF_MEMORY, FakeCuda, FakeEvent, FakeTorch
from tests.node.running import node_thread

MIB = 1 << 20
ADDRESS = 0x7FFF_1234_5678_9000


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def driver(cuda: FakeCuda) -> Driver:
    return Driver(cuda)


def device(cuda: FakeCuda, fake_torch: FakeTorch | None = None) -> CudaDevice:
    return CudaDevice(0, fake_torch or FakeTorch(), Driver(cuda))


# --- the driver --------------------------------------------------------------------------------------------


def test_devices_have_names_that_last(driver: Driver) -> None:
    assert driver.count() == 2
    assert driver.uuid(1) == "GPU-" + "29292929-2929-2929-2929-292929292929"


def test_host_memory_is_locked_in_the_primary_context(driver: Driver, cuda: FakeCuda) -> None:
    primary = driver.primary(0)
    primary.lock(ADDRESS, 5 << 32)
    assert cuda.locked == {ADDRESS: 5 << 32}
    primary.unlock(ADDRESS)
    assert (cuda.locked, cuda.contexts, cuda.retained) == ({}, [], 1)
    primary.close()
    primary.close()
    assert cuda.retained == 0


def test_memory_is_shared_by_the_handle_of_its_allocation(driver: Driver, cuda: FakeCuda) -> None:
    primary = driver.primary(0)
    handle, offset = primary.share(ADDRESS)
    assert (len(handle), offset) == (64, 512)
    assert driver.primary(1).open(handle) + offset == ADDRESS
    primary.close_shared(ADDRESS - offset)
    assert not cuda.opened


def test_a_dmabuf_is_asked_for_by_address_and_size(driver: Driver, cuda: FakeCuda) -> None:
    primary = driver.primary(0)
    assert primary.gives_dmabuf()
    assert primary.dmabuf(ADDRESS, 3 << 33) == 77
    assert cuda.calls == [("attribute", 1, 6, ADDRESS), ("dmabuf", ADDRESS, 3 << 33, 1, 0)]


def test_an_error_has_the_drivers_words_and_leaves_no_context_behind(driver: Driver, cuda: FakeCuda) -> None:
    cuda.refuse["cuMemHostRegister_v2"] = OUT_OF_MEMORY
    with pytest.raises(
        GpuFailed, match=r"cuda:0: cuMemHostRegister_v2 failed: out of memory \(CUDA error 2\)"
    ):
        driver.primary(0).lock(ADDRESS, 4096)
    assert cuda.contexts == []
    cuda.refuse["cuMemHostRegister_v2"] = 12345
    with pytest.raises(GpuFailed, match="failed: CUDA error 12345"):
        driver.primary(0).lock(ADDRESS, 4096)


def test_a_driver_that_is_too_old_says_so(driver: Driver, cuda: FakeCuda) -> None:
    del cuda.cuMemGetHandleForAddressRange
    with pytest.raises(GpuFailed, match="the driver is too old for it"):
        driver.primary(0).dmabuf(ADDRESS, 4096)


def test_a_driver_without_devices_is_no_driver(cuda: FakeCuda) -> None:
    cuda.refuse["cuInit"] = 100
    with pytest.raises(GpuUnavailable, match=r"cuda cannot be used: CUDA error 100\. See whether nvidia-smi"):
        Driver(cuda)


def test_no_library_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.cuda.LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(GpuUnavailable, match=r"there is no libcuda-that-is-not-there\.so\.1\. Install"):
        Driver()


# --- the device --------------------------------------------------------------------------------------------


def test_a_pool_on_cuda_copies_each_direction_on_its_own_stream(cuda: FakeCuda) -> None:
    fake_torch = FakeTorch()
    pool = GpuPool(device(cuda, fake_torch), MIB, 1)
    back = bytearray(5)
    assert pool.copy_in(100, b"hello").wait()
    assert pool.copy_out(100, back).wait(5.0)
    assert back == b"hello"
    inwards, outwards = fake_torch.made
    assert set(fake_torch.used) == {inwards, outwards}
    assert fake_torch.used[0] is inwards
    assert fake_torch.used[-1] is outwards
    assert pool.view is None
    pool.close()
    assert cuda.retained == 0


def test_waiting_has_a_limit(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "late", 10)
    pool = GpuPool(device(cuda), MIB, 1)
    pool.pins.add(0, (buffer := memoryview(bytearray(100))))
    copy = pool.copy_in(0, buffer)
    assert not copy.done()
    assert not copy.wait(0.0)
    assert copy.wait(30.0)
    assert pool.copy_in(0, buffer).wait()


def test_what_torch_raises_is_told_in_one_line(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: FakeEvent) -> bool:
        raise RuntimeError(
            "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ..."
        )

    pool = GpuPool(device(cuda), MIB, 1)
    copy = pool.copy_in(0, b"")
    monkeypatch.setattr(FakeEvent, "query", fail)
    with pytest.raises(
        GpuFailed, match=r"cuda:0: copying failed: CUDA error: an illegal memory access was encountered\.$"
    ):
        copy.wait(1.0)


def test_memory_that_is_not_there_is_refused_with_the_numbers(cuda: FakeCuda) -> None:
    with pytest.raises(NotEnoughGpuMemory, match="of its 2097152 bytes, 1048576 are free"):
        GpuPool(device(cuda, FakeTorch(free_bytes=MIB)), 2 * MIB, 1)
    assert cuda.retained == 0
    taken = FakeTorch()
    taken.out_of_memory = True  # another process was quicker
    with pytest.raises(NotEnoughGpuMemory):
        GpuPool(device(cuda, taken), 2 * MIB, 1)


def test_a_device_that_is_not_there(cuda: FakeCuda) -> None:
    with pytest.raises(GpuUnavailable, match="cuda:2 cannot be used: there are 2 here, the last is cuda:1"):
        CudaDevice(2, FakeTorch(), Driver(cuda))
    hidden = FakeTorch()
    hidden.cuda.is_available = lambda: False
    with pytest.raises(GpuUnavailable, match=r"no GPU is visible\. See whether nvidia-smi works"):
        CudaDevice(0, hidden, Driver(cuda))


def test_a_dmabuf_of_the_pool_or_the_reason_why_not(cuda: FakeCuda) -> None:
    gpu = device(cuda)
    tensor = torch.zeros(3 * 4096, dtype=torch.uint8)
    start = -tensor.data_ptr() % 4096
    memory = gpu.allocate(8192, 1)
    aligned = type(memory)(tensor[start : start + 8192], None)
    assert gpu.dmabuf(aligned).fd == 77
    assert "not at a page" in gpu.dmabuf(type(memory)(tensor[start + 64 :], None)).reason
    cuda.refuse["cuMemGetHandleForAddressRange"] = NOT_SUPPORTED
    assert "operation not supported" in gpu.dmabuf(aligned).reason
    cuda.dmabuf_supported = 0
    assert "open kernel modules" in gpu.dmabuf(aligned).reason


def test_page_locking_goes_through_the_device(cuda: FakeCuda) -> None:
    pool = GpuPool(device(cuda), MIB, 1)
    assert pool.pins.add(0, memoryview(bytearray(8192)))
    assert list(cuda.locked.values()) == [8192]
    pool.close()
    assert cuda.locked == {}


# --- the engine's side -------------------------------------------------------------------------------------


def test_an_engine_opens_the_pool_on_the_same_gpu_by_its_uuid(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = GpuPool(device(cuda), MIB, 1)
    handle = pool.export()
    assert (handle.size, handle.offset, handle.device) == (MIB, 512, Driver(cuda).uuid(0))
    opened: list[dict[str, object]] = []

    class EngineTorch:
        @staticmethod
        def zeros(count: int, device: str) -> None:
            assert device == "cuda:0"

        @staticmethod
        def as_tensor(shared: object, device: str) -> object:
            opened.append(shared.__cuda_array_interface__)  # type: ignore[attr-defined]
            return shared

    monkeypatch.setattr(client, "_torch", lambda: EngineTorch)
    monkeypatch.setattr(client, "Driver", lambda: Driver(cuda))
    tensor = client.open_handle(handle)
    (interface,) = opened
    assert interface["shape"] == (MIB,)
    assert interface["typestr"] == "|u1"
    address = interface["data"][0]  # type: ignore[index]
    assert cuda.opened == {address - 512}
    del tensor
    assert cuda.opened == set(), "closed with the last tensor"


def test_an_engine_that_does_not_see_the_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Driver", lambda: Driver(cuda))
    handle = GpuPool(device(cuda), MIB, 1).export()
    with pytest.raises(
        GpuUnavailable, match=r"not among the 2 that this process sees\. Add it to CUDA_VISIBLE"
    ):
        client.open_handle(type(handle)(device="GPU-other", size=MIB, offset=0, token=handle.token))


def test_an_engine_locks_its_own_mapping(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "Driver", lambda: Driver(cuda))
    pins = client.lock_host_memory([memoryview(bytearray(4096)), memoryview(bytearray(8192))])
    assert sorted(cuda.locked.values()) == [4096, 8192]
    pins.close()
    assert cuda.locked == {}


def test_a_client_locks_the_memory_of_its_node(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client, "Driver", lambda: Driver(cuda))
    with node_thread(tmp_path / "c.sock", size=16 * MIB) as node, Client(node.socket) as engine:
        engine.put("a", b"1")
        pins = engine.lock_host_memory()
        assert list(cuda.locked.values()) == [16 * MIB]
        with engine.get_view("a") as view:
            assert view is not None
            assert [run.locked for run in pins.runs(address_of(view), len(view))] == [True]
        pins.close()
    assert cuda.locked == {}
