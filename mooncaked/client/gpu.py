"""A node's GPU pools as an engine's process sees them, and host memory that its GPU reads by itself.

    tensor = open_handle(handle)            # all bytes of one pool, without a copy
    block = tensor[offset : offset + size]  # while the block is pinned

torch is imported when the first handle is opened. CUDA's sharing knows no read-only: who opens a pool must
write only where it was told to. When the daemon ends, the memory goes, whoever has it open; its handles then
name nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from mooncaked.cuda import IPC_HANDLE_BYTES, Driver, Primary
from mooncaked.errors import GpuFailed, GpuUnavailable, IntegrityError, MissingDependency
from mooncaked.pinning import HostPins
from mooncaked.types import GpuHandle

LOCK_CHUNK_BYTES = 64 << 30  # an engine's own copies must not cross from one chunk into the next


def open_handle(handle: GpuHandle) -> Any:
    """The pool as a flat torch tensor of bytes, on the device where it is; closed with its last view.

    Raises `MissingDependency` (no torch), `GpuUnavailable` (this process does not see the device),
    `GpuFailed` (the daemon has ended; or this process made the handle), or `IntegrityError`."""
    torch = _torch()
    if handle.device == "cpu":
        return torch.frombuffer(_map(handle), dtype=torch.uint8)
    if len(handle.token) != IPC_HANDLE_BYTES or handle.offset < 0 or handle.size < 1:
        detail = f"{len(handle.token)} bytes for {handle.size} bytes at {handle.offset}"
        raise IntegrityError(what="a GPU pool's handle", detail=detail)
    driver = Driver()
    ordinal = _ordinal(driver, handle.device)
    torch.zeros(1, device=f"cuda:{ordinal}")  # torch sets up the device first
    return torch.as_tensor(_Shared(driver.primary(ordinal), handle), device=f"cuda:{ordinal}")


def lock_host_memory(views: list[memoryview], ordinal: int = 0) -> HostPins:
    """Page-lock memory that this process has mapped, such as a node's pool, so that copies between it and
    this process's GPUs run at full speed and do not block. Each process locks its own mapping. Unlocked by
    `close`; what could not be locked is in `failure`. Raises `GpuUnavailable` where there is no GPU."""
    pins = HostPins(Driver().primary(ordinal), LOCK_CHUNK_BYTES)
    for number, view in enumerate(views):
        pins.add(number, view)
    return pins


class _Shared:
    """An allocation of another process, as torch takes memory that is not its own. torch keeps this object as
    long as a tensor of the memory lives."""

    def __init__(self, primary: Primary, handle: GpuHandle) -> None:
        address = primary.open(handle.token)
        weakref.finalize(self, _close, primary, address).atexit = False  # then the driver closes by itself
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (handle.size,),
            "typestr": "|u1",
            "data": (address + handle.offset, False),
            "strides": None,
        }


def _close(primary: Primary, address: int) -> None:
    with suppress(GpuFailed):  # of a device that has failed
        primary.close_shared(address)
        primary.close()


def _ordinal(driver: Driver, uuid: str) -> int:
    count = driver.count()
    for ordinal in range(count):
        if driver.uuid(ordinal) == uuid:
            return ordinal
    cause = f"it is not among the {count} that this process sees"
    raise GpuUnavailable(device=uuid, cause=cause, remedy="Add it to CUDA_VISIBLE_DEVICES of this process")


def _map(handle: GpuHandle) -> mmap.mmap:
    path = Path(os.fsdecode(handle.token))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        cause = f"{path}: {error.strerror}"
        raise GpuFailed(device="cpu", operation="opening the shared memory", cause=cause) from error
    try:
        if os.fstat(fd).st_size != handle.size:
            detail = f"{path} has {os.fstat(fd).st_size} bytes, not {handle.size}"
            raise IntegrityError(what="a GPU pool's handle", detail=detail)
        return mmap.mmap(fd, handle.size)
    finally:
        os.close(fd)


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(feature="A GPU pool", package="torch", install="mooncaked[gpu]") from error
    return torch
