"""Copies between a GPU and host memory that is not page-locked: through a few buffers that are.

The host's memory is copied to or from a buffer by the calling thread (without the interpreter lock) while the
device works on the one before, so the detour costs about a memcpy, not two copies one after the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from mooncaked.errors import GpuFailed
from mooncaked.pools.gpu_device import Copy, Device, Direction, FinishedCopy, Pair, Tensor, host_copy

BUFFERS = 4
BUFFER_BYTES = 4 << 20
_STALL_S = 60.0  # a copy of one buffer takes less than a millisecond


class Staging:
    """The buffers of one direction, made at first use. Any thread may call; one copies at a time."""

    def __init__(self, device: Device, direction: Direction, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._direction = direction
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._free: deque[tuple[Tensor, Copy]] = deque()  # with the copy that used it last

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Inwards: the bytes are in buffers or on the device on return, and arrive before whatever is started
        in this direction later. Outwards: they have arrived. Raises `GpuFailed`."""
        with self._lock:
            while len(self._free) < BUFFERS:
                self._free.append((self._device.staging(self._buffer_bytes), FinishedCopy()))
            (self._inwards if self._direction is Direction.IN else self._outwards)(pairs)

    def _inwards(self, pairs: Sequence[Pair]) -> None:
        for into, source in self._pieces(pairs):
            buffer = self._buffer()
            part = buffer[: source.numel()]
            host_copy(part, source)
            self._free.append((buffer, self._device.copy(self._direction, [(into, part)])))

    def _outwards(self, pairs: Sequence[Pair]) -> None:
        running: deque[tuple[Tensor, Copy, Tensor]] = deque()
        for into, source in self._pieces(pairs):
            if len(running) == BUFFERS:
                self._land(*running.popleft())
            buffer = self._buffer()
            copy = self._device.copy(self._direction, [(buffer[: source.numel()], source)])
            running.append((buffer, copy, into))
        while running:
            self._land(*running.popleft())

    def _land(self, buffer: Tensor, copy: Copy, into: Tensor) -> None:
        self._await(copy)
        host_copy(into, buffer[: into.numel()])
        self._free.append((buffer, copy))

    def _buffer(self) -> Tensor:
        buffer, copy = self._free.popleft()
        self._await(copy)
        return buffer

    def _await(self, copy: Copy) -> None:
        if not copy.wait(_STALL_S):
            cause = f"it has not ended in {_STALL_S:.0f} s"
            raise GpuFailed(device=self._device.name, operation="copying", cause=cause)

    def _pieces(self, pairs: Sequence[Pair]) -> Iterator[Pair]:
        step = self._buffer_bytes
        for into, source in pairs:
            for at in range(0, source.numel(), step):
                yield into[at : at + step], source[at : at + step]
