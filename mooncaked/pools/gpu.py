"""The GPU pool: one tensor of bytes on a device, copies to and from host memory, and the ways to share it.

    pool = GpuPool("cuda:0", 8 << 30, region=1)
    pool.pins.add(0, dram.view)                  # page-lock host memory: copies then need no detour
    pool.copy_in(4096, dram.view[:100]).wait()
    pool.export()                                # for engines of this node: mooncaked.client.gpu.open_handle

Every byte of the pool belongs to whoever was given it; nothing here orders a copy in against a copy out of
the same place. Copies of one direction run in the order in which they were started.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from mooncaked.errors import InvalidRequest, Refused
from mooncaked.pinning import HostPins, address_of
from mooncaked.pools.gpu_device import Copy, Device, Direction, DmaBuf, Memory, Pair, Tensor, open_device
from mooncaked.pools.gpu_staging import Staging
from mooncaked.types import GpuHandle, Tier

PAGE = 4096
Piece = tuple[int, object]  # offset in the pool, and bytes of host memory (anything with a buffer)


class GpuPool:
    """`size` bytes on `device` ("cuda:N", or "cpu" for a stand-in) as region number `region`.

    `pins` is the host memory that is page-locked, shared by all pools of a process; None makes a new one.
    Raises `MissingDependency` (no torch), `GpuUnavailable` (no such device), `NotEnoughGpuMemory`, or
    `InvalidRequest` for a size that is no multiple of 4096. Any thread may call anything but `close`."""

    tier = Tier.GPU

    def __init__(self, device: str | Device, size: int, region: int, *, pins: HostPins | None = None) -> None:
        if size < PAGE or size % PAGE:
            raise InvalidRequest(
                problem=f"a GPU pool of {size} bytes cannot be: its size is in pages of {PAGE}"
            )
        self.region = region
        self.size = size
        self._device = open_device(device) if isinstance(device, str) else device
        self.device = self._device.name
        try:
            self._memory: Memory | None = self._device.allocate(size, region)
        except BaseException:
            self._device.close()
            raise
        self._own_pins = pins is None
        self.pins = pins if pins is not None else HostPins(self._device.locker)
        self._staging = [Staging(self._device, direction) for direction in Direction]

    @property
    def view(self) -> memoryview | None:
        """The memory, where this process can address it: that of the stand-in."""
        return self._open().view

    @property
    def tensor(self) -> Tensor:
        """The memory as torch shows it: flat, of bytes."""
        return self._open().tensor

    def close(self) -> None:
        """Wait for the copies and give the memory back. Pins that this pool made end before. May be called
        again."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self._device.free(memory)
        del memory
        if self._own_pins:
            self.pins.close()
        self._staging.clear()
        self._device.close()

    def _open(self) -> Memory:
        if self._memory is None:
            raise Refused(problem="this GPU pool is closed", remedy="Make a new one")
        return self._memory

    # --- copies ---------------------------------------------------------------------------------------

    def copy_in(self, offset: int, host: object) -> Copy:
        """Start to copy `host` to `offset`. Raises `InvalidRequest` for a place that is not all in the pool,
        and `GpuFailed`."""
        return self.copy_batch_in([(offset, host)])

    def copy_out(self, offset: int, host: object) -> Copy:
        """Start to fill `host`, which is writable, from `offset`. Raises like `copy_in`."""
        return self.copy_batch_out([(offset, host)])

    def copy_batch_in(self, pieces: Iterable[Piece]) -> Copy:
        """`copy_in` for many. `host` must not change until the copy is done."""
        return self._copy(Direction.IN, pieces)

    def copy_batch_out(self, pieces: Iterable[Piece]) -> Copy:
        """`copy_out` for many. Nobody may read the `host` buffers until the copy is done."""
        return self._copy(Direction.OUT, pieces)

    def _copy(self, direction: Direction, pieces: Iterable[Piece]) -> Copy:
        tensor = self._open().tensor
        direct: list[Pair] = []
        detour: list[Pair] = []
        for offset, host in pieces:
            view = _flat(host, writable=direction is Direction.OUT)
            if offset < 0 or offset + len(view) > self.size:
                problem = f"bytes {offset}+{len(view)} are not in a pool of {self.size} bytes"
                raise InvalidRequest(problem=problem)
            if len(view):
                place = tensor[offset : offset + len(view)]
                self._pair(direction, place, self._device.host_tensor(view), direct, detour)
        if detour:
            self._staging[direction].copy(detour)
        return self._device.copy(direction, direct)

    def _pair(
        self, direction: Direction, place: Tensor, host: Tensor, direct: list[Pair], detour: list[Pair]
    ) -> None:
        """Enter a copy, in pieces where only some of the host's memory is locked, into the lists."""
        for run in self.pins.runs(host.data_ptr(), host.numel()):
            end = run.offset + run.size
            here, there = place[run.offset : end], host[run.offset : end]
            pair = (here, there) if direction is Direction.IN else (there, here)
            (direct if run.locked else detour).append(pair)

    # --- sharing --------------------------------------------------------------------------------------

    def export(self) -> GpuHandle:
        """What engines of this node open the pool by. Raises `GpuFailed` where the memory cannot be shared,
        for instance with torch's expandable segments (PYTORCH_CUDA_ALLOC_CONF)."""
        return self._device.share(self._open())

    def dmabuf(self) -> DmaBuf:
        """A descriptor by which a network card registers the pool, or why there is none."""
        return self._device.dmabuf(self._open())


def _flat(host: object, *, writable: bool) -> memoryview:
    """The bytes of `host`, as memory that torch takes."""
    try:
        view = memoryview(host).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(problem=f"a {type(host).__name__} cannot be copied: {error}") from error
    if not view.readonly or not len(view):
        return view
    if writable:
        raise InvalidRequest(
            problem=f"a {type(host).__name__} is read-only; give a writable buffer to copy to"
        )
    return _as_writable(view)


def _as_writable(view: memoryview) -> memoryview:
    """Read-only bytes as torch takes them: it knows only writable memory. They are only read."""
    array = (ctypes.c_ubyte * len(view)).from_address(address_of(view))
    array.owner = view  # type: ignore[attr-defined]  # lives as long as what is made of it
    return memoryview(array).cast("B")
