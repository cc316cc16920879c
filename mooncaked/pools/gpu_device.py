"""A GPU as torch shows it, and a stand-in made of host memory that tests and machines without one use.

The only module of the node that imports torch, and only when a device is made. Both devices copy through the
same calls of torch, and hand their memory to other processes; what differs is behind `Device`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any, NoReturn, Protocol, TypeAlias

import msgspec

from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.cuda import Driver
from mooncaked.errors import GpuFailed, GpuUnavailable, MissingDependency, NotEnoughGpuMemory
from mooncaked.pinning import Locker, NoLocker
from mooncaked.pools.memory import PAGE, available_memory, make_memfd
from mooncaked.types import GpuHandle

Tensor: TypeAlias = Any  # torch's; flat, of bytes
Pair: TypeAlias = tuple[Tensor, Tensor]  # into, from; of equal size

_KEY = "gpu.size"  # the setting that an error names
_PAUSE_FIRST_S, _PAUSE_MAX_S = 20e-6, 1e-3


class Direction(IntEnum):
    """Which way bytes go. Each has a stream of its own."""

    IN = 0  # from host memory to the device
    OUT = 1


class DmaBuf(msgspec.Struct, frozen=True):
    """Device memory for a network card to register."""

    fd: int | None  # the caller closes it
    reason: str = ""  # why there is none


class Copy(Protocol):
    """Copies that were started together. It keeps the memory that they use, so it is to be kept itself until
    they are done."""

    def done(self) -> bool:
        """Whether all bytes have arrived; raises `GpuFailed`."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for that, without the interpreter lock; False when `timeout_s` passed first. Raises
        `GpuFailed`."""


class Memory(msgspec.Struct, frozen=True):
    """What a device allocated."""

    tensor: Tensor
    view: memoryview | None  # of host memory only
    fd: int = -1  # likewise


class Device(Protocol):
    """What a pool needs of a GPU."""

    name: str
    locker: Locker

    def allocate(self, size: int, region: int) -> Memory:
        """Zeroed memory; raises `NotEnoughGpuMemory`."""

    def free(self, memory: Memory) -> None:
        """Give it back when all copies have ended."""

    def staging(self, size: int) -> Tensor:
        """Page-locked host memory."""

    def host_tensor(self, view: memoryview) -> Tensor:
        """Host memory, writable and not empty, as torch sees it."""

    def copy(self, direction: Direction, pairs: Sequence[Pair]) -> Copy:
        """Start to copy, after whatever was started in this direction before."""

    def share(self, memory: Memory) -> GpuHandle:
        """What another process opens the memory by; raises `GpuFailed`."""

    def dmabuf(self, memory: Memory) -> DmaBuf:
        """The memory for a network card."""

    def close(self) -> None:
        """Let the device go."""


def open_device(name: str) -> Device:
    """The device "cuda:N" or "cpu". Raises `MissingDependency` or `GpuUnavailable`."""
    if name == "cpu":
        return CpuDevice()
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        remedy = 'Write "cuda:0", "cuda:1" and so on'
        raise GpuUnavailable(device=name, cause="that is no name of a device", remedy=remedy)
    return CudaDevice(int(number))


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(feature="A GPU pool", package="torch", install="mooncaked[gpu]") from error
    return torch


def host_copy(into: Tensor, source: Tensor) -> None:
    """Copy within host memory, without the interpreter lock. `copy_` would split it over OpenMP threads, and
    wait a scheduler's turn for each of them where the cores are busy: 6 ms for 1 MiB were measured."""
    ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel())


# --- the stand-in ----------------------------------------------------------------------------------------


class FinishedCopy:
    """Copies that were over when they were started."""

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Does not wait."""
        return True


class CpuDevice:
    """Host memory in the place of a GPU's, shared with other processes as a memfd."""

    name = "cpu"

    def __init__(self) -> None:
        self._torch = _torch()
        self.locker: Locker = NoLocker()

    def allocate(self, size: int, region: int) -> Memory:
        """A memfd, mapped."""
        if size > (free := available_memory()):
            total = os.sysconf("SC_PHYS_PAGES") * PAGE
            raise NotEnoughGpuMemory(size=size, device="cpu", free=free, total=total, key=_KEY)
        fd = make_memfd(f"mooncaked-gpu-{region}", size)
        view = memoryview(mmap.mmap(fd, size))
        return Memory(self.host_tensor(view), view, fd)

    def free(self, memory: Memory) -> None:
        """The mapping goes with the last tensor or view of it."""
        os.close(memory.fd)

    def staging(self, size: int) -> Tensor:
        """Any memory does."""
        return self._torch.empty(size, dtype=self._torch.uint8)

    def host_tensor(self, view: memoryview) -> Tensor:
        """The same memory."""
        return self._torch.frombuffer(view, dtype=self._torch.uint8)

    def copy(self, direction: Direction, pairs: Sequence[Pair]) -> Copy:
        """At once."""
        for into, source in pairs:
            host_copy(into, source)
        return FinishedCopy()

    def share(self, memory: Memory) -> GpuHandle:
        """The path of the memfd in /proc, which a process of the same user may open."""
        path = f"/proc/{os.getpid()}/fd/{memory.fd}"
        return GpuHandle(device="cpu", size=memory.tensor.numel(), offset=0, token=path.encode())

    def dmabuf(self, memory: Memory) -> DmaBuf:
        """None."""
        return DmaBuf(None, "the memory is the host's, and is registered by its address")

    def close(self) -> None:
        """Nothing is held."""


# --- CUDA ------------------------------------------------------------------------------------------------


class EventCopy:
    """Copies on a stream, whose end an event marks."""

    def __init__(self, device: str, event: Any, pairs: Sequence[Pair], clock: Clock) -> None:
        self._device = device
        self._event = event
        self._pairs: Sequence[Pair] | None = pairs  # host memory must stay until they are over
        self._clock = clock

    def done(self) -> bool:
        """Ask the event."""
        with failures(self._device, "copying"):
            done = bool(self._event.query())
        if done:
            self._pairs = None
        return done

    def wait(self, timeout_s: float | None = None) -> bool:
        """Without a limit the thread sleeps until the device wakes it; with one it looks, at first often."""
        if timeout_s is None:
            with failures(self._device, "copying"):
                self._event.synchronize()
            return self.done()
        deadline, pause_s = Deadline(self._clock, timeout_s), _PAUSE_FIRST_S
        while not self.done():
            if deadline.passed():
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        return True


class CudaDevice:
    """A GPU of NVIDIA's. Its copies neither wait for the default stream nor keep it waiting."""

    def __init__(self, ordinal: int, torch: Any = None, driver: Driver | None = None) -> None:
        self.name = f"cuda:{ordinal}"
        self._torch = torch = torch if torch is not None else _torch()
        self._clock = SystemClock()
        _check_visible(torch, ordinal)
        self._driver = driver if driver is not None else Driver()
        self._primary = self._driver.primary(ordinal)
        self.locker: Locker = self._primary
        self._uuid = self._driver.uuid(ordinal)
        with failures(self.name, "making streams"):
            self._streams = [torch.cuda.Stream(device=self.name) for _ in Direction]

    def allocate(self, size: int, region: int) -> Memory:
        """One tensor; zeroed, since the last process may have left another tenant's bytes there."""
        free, total = self._torch.cuda.mem_get_info(self.name)
        if size > free:
            raise NotEnoughGpuMemory(size=size, device=self.name, free=free, total=total, key=_KEY)
        try:
            tensor = self._torch.zeros(size, dtype=self._torch.uint8, device=self.name)
            self._torch.cuda.current_stream(self.name).synchronize()
        except self._torch.OutOfMemoryError as error:
            raise NotEnoughGpuMemory(size=size, device=self.name, free=free, total=total, key=_KEY) from error
        except RuntimeError as error:
            failed(self.name, "taking memory", error)
        return Memory(tensor, None)

    def free(self, memory: Memory) -> None:
        """Wait for the copies; torch frees the memory with its last tensor."""
        with suppress(RuntimeError):  # a device that failed has no copies left
            for stream in self._streams:
                stream.synchronize()

    def staging(self, size: int) -> Tensor:
        """Memory that torch locks."""
        with failures(self.name, "locking host memory"):
            return self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)

    def host_tensor(self, view: memoryview) -> Tensor:
        """The same memory."""
        return self._torch.frombuffer(view, dtype=self._torch.uint8)

    def copy(self, direction: Direction, pairs: Sequence[Pair]) -> Copy:
        """On the direction's stream, with an event behind."""
        stream = self._streams[direction]
        with failures(self.name, "copying"), self._torch.cuda.stream(stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
            event = self._torch.cuda.Event(blocking=True)
            event.record(stream)
        return EventCopy(self.name, event, pairs, self._clock)

    def share(self, memory: Memory) -> GpuHandle:
        """CUDA IPC."""
        token, offset = self._primary.share(memory.tensor.data_ptr())
        return GpuHandle(device=self._uuid, size=memory.tensor.numel(), offset=offset, token=token)

    def dmabuf(self, memory: Memory) -> DmaBuf:
        """Where driver and kernel can (NVIDIA's open kernel modules, Linux 5.12)."""
        address, size = memory.tensor.data_ptr(), memory.tensor.numel()
        if address % PAGE:
            return DmaBuf(None, f"the memory begins at {address:#x}, not at a page: make the pool larger")
        try:
            if not self._primary.gives_dmabuf():
                return DmaBuf(None, "the driver gives out no dma-bufs; NVIDIA's open kernel modules do")
            return DmaBuf(self._primary.dmabuf(address, size))
        except GpuFailed as error:
            return DmaBuf(None, str(error))

    def close(self) -> None:
        """Give what torch keeps of freed memory back to the device, and let the context go."""
        self._torch.cuda.empty_cache()
        self._primary.close()


def _check_visible(torch: Any, ordinal: int) -> None:
    name = f"cuda:{ordinal}"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        cause = "no GPU is visible" if built else f"this torch ({torch.__version__}) is built without CUDA"
        remedy = (
            "See whether nvidia-smi works here, and whether CUDA_VISIBLE_DEVICES is empty"
            if built
            else "Install a build of torch for CUDA: https://pytorch.org/get-started/locally/"
        )
        raise GpuUnavailable(device=name, cause=cause, remedy=remedy)
    if ordinal >= (count := torch.cuda.device_count()):
        remedy = "nvidia-smi -L lists what there is; CUDA_VISIBLE_DEVICES may hide some"
        cause = f"there are {count} here, the last is cuda:{count - 1}"
        raise GpuUnavailable(device=name, cause=cause, remedy=remedy)


@contextmanager
def failures(device: str, operation: str) -> Iterator[None]:
    """Turn what torch raises into `GpuFailed`."""
    try:
        yield
    except RuntimeError as error:
        failed(device, operation, error)


def failed(device: str, operation: str, error: RuntimeError) -> NoReturn:
    """Raise `GpuFailed` with the first line of torch's message; the others advise on debugging kernels."""
    cause = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    raise GpuFailed(device=device, operation=operation, cause=cause) from error
