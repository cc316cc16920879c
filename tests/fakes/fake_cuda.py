"""A CUDA driver that only keeps books, called through ctypes like the real one, and torch with such a GPU.

The functions are real C functions of the documented signatures (ctypes callbacks), so wrong argument types,
a handle that is not passed by value, or an address cut to 32 bits show up here and not on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from types import SimpleNamespace
from typing import Any

import torch

OUT_OF_MEMORY, NOT_SUPPORTED, INVALID_CONTEXT, INVALID_VALUE = 2, 801, 201, 1
_TEXTS = {2: b"out of memory", 801: b"operation not supported", 201: b"invalid device context"}


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class FakeCuda:
    """Two devices. `refuse` names functions that fail, with their result; calls are noted in `calls`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: dict[str, int] = {}
        self.contexts: list[int] = []  # current ones
        self.retained = 0
        self.locked: dict[int, int] = {}
        self.opened: set[int] = set()
        self.dmabuf_supported = 1
        self._kept: list[Any] = []
        number, device, address = POINTER(c_int), c_int, c_ulonglong
        self._define("cuInit", self._init, c_uint)
        self._define("cuDeviceGetCount", self._count, number)
        self._define("cuDeviceGet", self._get, number, c_int)
        self._define("cuDeviceGetUuid_v2", self._uuid, POINTER(ctypes.c_ubyte * 16), device)
        self._define("cuDeviceGetAttribute", self._attribute, number, c_int, device)
        self._define("cuDevicePrimaryCtxRetain", self._retain, POINTER(c_void_p), device)
        self._define("cuDevicePrimaryCtxRelease_v2", self._release, device)
        self._define("cuCtxPushCurrent_v2", self._push, c_void_p)
        self._define("cuCtxPopCurrent_v2", self._pop, POINTER(c_void_p))
        self._define("cuMemHostRegister_v2", self._lock, c_void_p, c_size_t, c_uint)
        self._define("cuMemHostUnregister", self._unlock, c_void_p)
        range_arguments = (POINTER(address), POINTER(c_size_t), address)
        self._define("cuMemGetAddressRange_v2", self._range, *range_arguments)
        self._define("cuIpcGetMemHandle", self._share, POINTER(Handle), address)
        self._define("cuIpcOpenMemHandle_v2", self._open, POINTER(address), Handle, c_uint)
        self._define("cuIpcCloseMemHandle", self._close, address)
        self._define("cuPointerSetAttribute", self._set, POINTER(c_uint), c_int, address)
        dmabuf_arguments = (number, address, c_size_t, c_int, c_ulonglong)
        self._define("cuMemGetHandleForAddressRange", self._dmabuf, *dmabuf_arguments)
        self._define("cuGetErrorString", self._text, c_int, POINTER(c_char_p))

    def _define(self, name: str, does: Callable[..., int], *arguments: Any) -> None:
        def call(*given: Any) -> int:
            return self.refuse[name] if name in self.refuse else does(*given)

        prototype = ctypes.CFUNCTYPE(c_int, *arguments)
        callback = prototype(call)
        self._kept.append(callback)
        # As a symbol of a library looks: nothing is known of its arguments but what the caller declares.
        untyped = ctypes.CFUNCTYPE(c_int)(ctypes.cast(callback, c_void_p).value)
        setattr(self, name, untyped)

    def _need_context(self) -> bool:
        return bool(self.contexts)

    def _init(self, flags: int) -> int:
        return 0 if flags == 0 else INVALID_VALUE

    def _count(self, count: Any) -> int:
        count[0] = 2
        return 0

    def _get(self, device: Any, ordinal: int) -> int:
        device[0] = 40 + ordinal
        return 0 if ordinal < 2 else 101

    def _uuid(self, uuid: Any, device: int) -> int:
        uuid[0][:] = [device] * 16
        return 0

    def _attribute(self, value: Any, attribute: int, device: int) -> int:
        value[0] = self.dmabuf_supported if attribute == 124 else -1
        return 0

    def _retain(self, context: Any, device: int) -> int:
        context[0] = 0x7F00_0000_0000 + device
        self.retained += 1
        return 0

    def _release(self, device: int) -> int:
        self.retained -= 1
        return 0

    def _push(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _pop(self, context: Any) -> int:
        context[0] = self.contexts.pop()
        return 0

    def _lock(self, address: int, size: int, flags: int) -> int:
        if not self._need_context():
            return INVALID_CONTEXT
        self.locked[address] = size
        return 0 if flags == 1 else INVALID_VALUE

    def _unlock(self, address: int) -> int:
        del self.locked[address]
        return 0

    def _range(self, base: Any, size: Any, address: int) -> int:
        base[0], size[0] = address - 512, 1 << 40
        return 0 if self._need_context() else INVALID_CONTEXT

    def _share(self, handle: Any, address: int) -> int:
        ctypes.memmove(handle, address.to_bytes(8, "little") + b"h" * 56, 64)
        return 0 if self._need_context() else INVALID_CONTEXT

    def _open(self, address: Any, handle: Handle, flags: int) -> int:
        address[0] = int.from_bytes(bytes(handle)[:8], "little")
        self.opened.add(address[0])
        return 0 if flags == 1 and bytes(handle)[8:] == b"h" * 56 and self._need_context() else INVALID_VALUE

    def _close(self, address: int) -> int:
        self.opened.remove(address)
        return 0

    def _set(self, value: Any, attribute: int, address: int) -> int:
        self.calls.append(("attribute", value[0], attribute, address))
        return 0

    def _dmabuf(self, fd: Any, address: int, size: int, kind: int, flags: int) -> int:
        self.calls.append(("dmabuf", address, size, kind, flags))
        fd[0] = 77
        return 0

    def _text(self, result: int, text: Any) -> int:
        if result not in _TEXTS:
            return INVALID_VALUE
        text[0] = _TEXTS[result]
        return 0


class FakeStream:
    """Runs at once."""

    def __init__(self, device: str = "") -> None:
        self.device = device

    def synchronize(self) -> None:
        pass


class FakeEvent:
    """Over after it was asked `late` times."""

    late = 0

    def __init__(self, blocking: bool) -> None:
        self.asked = 0
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        self.asked += 1
        return self.asked > self.late

    def synchronize(self) -> None:
        self.asked = self.late + 1


class FakeTorch:
    """The real torch, with devices "cuda:0" and "cuda:1" whose memory is the host's."""

    uint8 = torch.uint8
    frombuffer = staticmethod(torch.frombuffer)
    OutOfMemoryError = torch.OutOfMemoryError
    __version__ = "2.6.0"

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self.streams: list[FakeStream] = []  # current one last
        self.used: list[FakeStream] = []
        self.made: list[FakeStream] = []
        self.version = SimpleNamespace(cuda="12.6")
        self.out_of_memory = False
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            mem_get_info=lambda device: (free_bytes, 2 * free_bytes),
            Stream=self._stream_made,
            Event=FakeEvent,
            stream=self._stream,
            current_stream=lambda device: FakeStream(device),
            empty_cache=lambda: None,
        )

    def zeros(self, size: int, dtype: object, device: str) -> torch.Tensor:
        if self.out_of_memory:
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee documentation")
        return torch.zeros(size, dtype=torch.uint8)

    def empty(self, size: int, dtype: object, pin_memory: bool) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _stream_made(self, device: str) -> FakeStream:
        self.made.append(FakeStream(device))
        return self.made[-1]

    @contextlib.contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        self.used.append(stream)
        yield
