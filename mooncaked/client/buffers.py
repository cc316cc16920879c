"""Whatever holds bytes, seen as bytes: bytes-like objects, numpy arrays and torch tensors, without a copy.

torch is never imported here: a tensor can only exist where its owner has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from mooncaked.errors import InvalidRequest

Buffer: TypeAlias = object
"""Bytes-like, a numpy array, or a CPU torch tensor; C-contiguous. Where it is read into: writable."""

Value: TypeAlias = Buffer | Sequence[Buffer]
"""One buffer, or a list or tuple of buffers whose bytes follow one another (gather, scatter)."""

DIGEST_BYTES_MAX = 16 << 10  # of values that are hashed by who writes them
_RELEASE_GIL_BYTES = 1 << 20  # below it, giving the interpreter lock away costs more than the copy


def as_view(buffer: Buffer, *, writable: bool = False) -> memoryview:
    """The bytes of `buffer` as a flat memoryview onto the same memory; raises `InvalidRequest`."""
    view = _flat_view(buffer)
    if writable and view.readonly:
        raise InvalidRequest(
            problem=f"a {type(buffer).__name__} is read-only; give a writable buffer to read into"
        )
    return view


def plain_view(value: Value) -> memoryview | None:
    """`as_view` for what is bytes already; None for everything else."""
    kind = type(value)
    if kind is memoryview:
        view: memoryview = value  # type: ignore[assignment]
        return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else None
    if kind is bytes or kind is bytearray:
        return memoryview(value)  # type: ignore[arg-type]
    return None


def as_views(value: Value, *, writable: bool = False) -> list[memoryview]:
    """The buffers of `value`, one or several, as flat memoryviews in order; raises `InvalidRequest`."""
    if isinstance(value, list | tuple):
        return [as_view(part, writable=writable) for part in value]
    return [as_view(value, writable=writable)]


def _flat_view(buffer: Any) -> memoryview:
    if isinstance(buffer, bytes | bytearray):
        return memoryview(buffer)
    if isinstance(buffer, memoryview) and buffer.format == "B" and buffer.ndim == 1 and buffer.c_contiguous:
        return buffer
    if isinstance(buffer, np.ndarray):
        return _array_view(buffer)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        return _tensor_view(buffer, torch)
    try:
        return np.frombuffer(buffer, np.uint8).data
    except (TypeError, ValueError, BufferError) as error:
        return _foreign_view(buffer, error)


def _foreign_view(buffer: Buffer, cause: Exception) -> memoryview:
    if isinstance(buffer, memoryview) and buffer.nbytes == 0:
        return memoryview(b"")
    if hasattr(buffer, "__array_interface__"):
        return _array_view(np.asarray(buffer))
    name = type(buffer).__name__
    problem = (
        f"a {name} cannot be used as a buffer ({cause}); give contiguous bytes, a numpy array or a tensor"
    )
    raise InvalidRequest(problem=problem) from cause


def _array_view(array: np.ndarray[Any, Any]) -> memoryview:
    if not array.flags.c_contiguous:
        raise InvalidRequest(
            problem=f"a numpy array of strides {array.strides} is not contiguous; copy it first"
        )
    if array.dtype.hasobject:
        raise InvalidRequest(problem="a numpy array of Python objects has no bytes of its own to store")
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # a type that the buffer protocol has no letter for, e.g. a date
        return array.reshape(-1).view(np.uint8).data


def _tensor_view(tensor: Any, torch: ModuleType) -> memoryview:
    if tensor.device.type != "cpu":
        problem = f"a tensor on {tensor.device} cannot be reached from here; move it to the CPU"
        raise InvalidRequest(problem=problem)
    if not tensor.is_contiguous():
        raise InvalidRequest(
            problem="a tensor that is not contiguous cannot be used; call .contiguous() first"
        )
    # Through uint8, since numpy knows no bfloat16; the array shares the tensor's memory and keeps it alive.
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def close_view(view: memoryview | None) -> None:
    """Make `view` unusable, so that nobody reads on after its pin has ended."""
    try:
        if view is not None:
            view.release()
    except BufferError:
        return  # something made from it, e.g. an array, still lives; the caller was told not to use it


# --- copies ------------------------------------------------------------------------------------------


def copy(target: memoryview, source: memoryview) -> None:
    """Copy equal numbers of bytes; a large copy lets other threads run meanwhile."""
    if len(source) < _RELEASE_GIL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_in(target: memoryview, views: Sequence[memoryview]) -> int | None:
    """Write the bytes of `views` into `target`, which has just their size. Their XXH3-64 where that costs
    less here than the daemon's coming back to them, else None: it works it out soon."""
    gather(target, views)
    # What was stored is hashed, not what was given: the two differ if a writer changes it meanwhile.
    return xxhash.xxh3_64_intdigest(target) if len(target) <= DIGEST_BYTES_MAX else None


def digest(views: Sequence[memoryview]) -> int:
    """The XXH3-64 of the bytes of `views`, one after the other."""
    whole = xxhash.xxh3_64()
    for view in views:
        whole.update(view)
    return whole.intdigest()


def gather(target: memoryview, views: Sequence[memoryview]) -> None:
    """Write the bytes of `views` into `target`, which has just their size."""
    offset = 0
    for view in views:
        end = offset + len(view)
        copy(target if len(views) == 1 else target[offset:end], view)
        offset = end


def copy_out(source: memoryview, views: Sequence[memoryview]) -> None:
    """Spread the bytes of `source` over `views` in order; the last ones may stay unwritten."""
    if len(views) == 1 and len(source) <= len(views[0]):
        copy(views[0] if len(source) == len(views[0]) else views[0][: len(source)], source)
        return
    offset = 0
    for view in views:
        count = min(len(view), len(source) - offset)
        copy(view[:count] if count < len(view) else view, source[offset : offset + count])
        offset += count


# --- tensors -----------------------------------------------------------------------------------------


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, tag="tensor/1"):
    """What is kept beside a tensor's bytes."""

    dtype: str  # as numpy and torch call it: "float32", "bfloat16", ...
    shape: list[int]
    framework: str  # "numpy" | "torch": what it was when it was put


_encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(TensorMeta).decode


def describe_tensor(tensor: object) -> bytes:
    """The metadata of a numpy array or torch tensor, encoded; raises `InvalidRequest` for anything else."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _encode_meta(TensorMeta(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), "torch"))
    if isinstance(tensor, np.ndarray) and tensor.dtype.names is None:
        return _encode_meta(TensorMeta(tensor.dtype.str, list(tensor.shape), "numpy"))
    name = f"a {type(tensor).__name__}" if not isinstance(tensor, np.ndarray) else "an array of records"
    raise InvalidRequest(problem=f"{name} is no tensor; give a numpy array of numbers or a torch tensor")


def make_tensor(key: str, meta: bytes, source: memoryview, framework: str | None) -> object:
    """A tensor of its own memory with the stored bytes; raises `InvalidRequest` if it cannot be made."""
    try:
        info = _decode_meta(meta)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            problem=f"the value of key {key} was not put as a tensor; read it with get"
        ) from error
    data = np.empty(len(source), np.uint8)
    copy(data.data, source)
    if (framework or info.framework) == "torch":
        return _as_torch(key, data, info)
    try:
        return data.view(np.dtype(info.dtype)).reshape(info.shape)
    except (TypeError, ValueError) as error:
        problem = (
            f"numpy cannot hold the tensor of key {key} ({info.dtype}, shape {info.shape}); ask for torch"
        )
        raise InvalidRequest(problem=problem) from error


def _as_torch(key: str, data: np.ndarray[Any, Any], info: TensorMeta) -> object:
    torch = sys.modules.get("torch")
    if torch is None:
        raise InvalidRequest(problem=f"the tensor of key {key} is torch's; import torch, or ask for numpy")
    name = info.dtype
    if info.framework == "numpy":
        of_numpy = np.dtype(info.dtype)
        name = of_numpy.name
        if not of_numpy.isnative:
            data = data.view(of_numpy).astype(of_numpy.newbyteorder("=")).view(np.uint8)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequest(
            problem=f"torch has no type {name}, which the tensor of key {key} has; ask for numpy"
        )
    return torch.from_numpy(data).view(dtype).reshape(info.shape)
