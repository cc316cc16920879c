"""The CUDA driver where torch does not reach: memory for other processes, page-locking, dma-buf.

By ctypes on libcuda.so.1, which comes with the kernel driver: its name and its versioned functions stay.
libcudart has another name with each major version and comes in the wheels, and torch's own way to share
memory (`_share_cuda_`) is private to torch, counts references in a file of the producer's, and has changed
between releases. A call that fails returns its error here, and that is all; one of the runtime would also
make the next kernel fail that torch starts. All calls release the interpreter lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Any
from uuid import UUID

from mooncaked.errors import GpuFailed, GpuUnavailable

LIBRARY = "libcuda.so.1"
IPC_HANDLE_BYTES = 64

_REGISTER_PORTABLE = 1  # page-locked for every device, not only for the one that was asked
_IPC_LAZY_PEER_ACCESS = 1
_HANDLE_DMA_BUF = 1
_ATTRIBUTE_DMA_BUF = 124  # of a device: it can give out dma-bufs
_ATTRIBUTE_SYNC_MEMOPS = 6  # of memory: synchronous copies are complete for others too when they return


class _IpcHandle(ctypes.Structure):
    """Passed by value, so its size matters."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuPointerSetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemGetHandleForAddressRange": (c_void_p, c_uint64, c_size_t, c_int, c_ulonglong),
    "cuGetErrorString": (c_int, c_void_p),
}


class Driver:
    """The library, initialised. Raises `GpuUnavailable` where there is none or it finds no device."""

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _load()
        try:
            self.call("cuInit", 0)
        except GpuFailed as error:
            remedy = "See whether nvidia-smi works, and whether this process may open /dev/nvidia*"
            raise GpuUnavailable(device="cuda", cause=error.fields["cause"], remedy=remedy) from error

    def call(self, name: str, *arguments: object, device: str = "cuda") -> None:
        """Call a function of the driver; raises `GpuFailed` for whatever it returns but success, or when this
        driver does not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError as error:
            raise GpuFailed(device=device, operation=name, cause="the driver is too old for it") from error
        function.argtypes = _SIGNATURES[name]
        function.restype = c_int
        if result := function(*arguments):
            raise GpuFailed(device=device, operation=name, cause=self._describe(result))

    def count(self) -> int:
        """Devices that this process sees (CUDA_VISIBLE_DEVICES counts)."""
        number = c_int()
        self.call("cuDeviceGetCount", byref(number))
        return number.value

    def uuid(self, ordinal: int) -> str:
        """The device's name for good, as nvidia-smi writes it; ordinals differ between processes."""
        device, uuid = self._device(ordinal), _Uuid()
        self.call("cuDeviceGetUuid_v2", byref(uuid), device)
        return f"GPU-{UUID(bytes=bytes(uuid.bytes))}"

    def primary(self, ordinal: int) -> Primary:
        """The context of a device that torch uses as well; to be closed."""
        return Primary(self, ordinal, self._device(ordinal))

    def _device(self, ordinal: int) -> int:
        device = c_int()
        self.call("cuDeviceGet", byref(device), ordinal, device=f"cuda:{ordinal}")
        return device.value

    def _describe(self, result: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorString.argtypes = _SIGNATURES["cuGetErrorString"]
        if self._library.cuGetErrorString(result, byref(text)) or text.value is None:
            return f"CUDA error {result}"
        return f"{text.value.decode(errors='replace')} (CUDA error {result})"


class Primary:
    """One device's primary context, kept alive until `close`. Any thread may call."""

    def __init__(self, driver: Driver, ordinal: int, device: int) -> None:
        self.name = f"cuda:{ordinal}"
        self._driver = driver
        self._device = device
        self._context = c_void_p()
        self._closed = False
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)

    def close(self) -> None:
        """Let the context go. May be called again."""
        if not self._closed:
            self._closed = True
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    # --- host memory ----------------------------------------------------------------------------------

    def lock(self, address: int, size: int) -> None:
        """Page-lock host memory for all devices; raises `GpuFailed`."""
        with self._current():
            self._call("cuMemHostRegister_v2", address, size, _REGISTER_PORTABLE)

    def unlock(self, address: int) -> None:
        """Undo `lock` of what began at this address; raises `GpuFailed`."""
        with self._current():
            self._call("cuMemHostUnregister", address)

    # --- memory for other processes -------------------------------------------------------------------

    def share(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that device memory at `address` lies in, and the offset there.

        Raises `GpuFailed` for memory that was not made by cudaMalloc, such as torch's expandable segments."""
        base, size, handle = c_uint64(), c_size_t(), _IpcHandle()
        with self._current():
            self._call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
            self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle.reserved), address - base.value

    def open(self, handle: bytes) -> int:
        """The address here of an allocation that another process shares; raises `GpuFailed`, also for one of
        this process."""
        address = c_uint64()
        shared = _IpcHandle.from_buffer_copy(handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", byref(address), shared, _IPC_LAZY_PEER_ACCESS)
        return address.value

    def close_shared(self, address: int) -> None:
        """Undo `open`."""
        with self._current():
            self._call("cuIpcCloseMemHandle", address)

    # --- memory for other devices ---------------------------------------------------------------------

    def gives_dmabuf(self) -> bool:
        """Whether the device's memory can be had as a dma-buf."""
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), _ATTRIBUTE_DMA_BUF, self._device)
        return bool(found.value)

    def dmabuf(self, address: int, size: int) -> int:
        """A dma-buf descriptor of device memory, whole pages of the host; the caller closes it. Raises
        `GpuFailed`."""
        fd, on = c_int(-1), c_uint(1)
        with self._current():
            self._call("cuPointerSetAttribute", byref(on), _ATTRIBUTE_SYNC_MEMOPS, address)
            self._call("cuMemGetHandleForAddressRange", byref(fd), address, size, _HANDLE_DMA_BUF, 0)
        return fd.value

    # --- internals ------------------------------------------------------------------------------------

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        self._driver.call(name, *arguments, device=self.name)


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        remedy = "Install NVIDIA's driver, and in a container run it with access to the GPUs"
        raise GpuUnavailable(device="cuda", cause=f"there is no {LIBRARY}", remedy=remedy) from error
