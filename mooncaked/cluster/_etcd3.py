"""The `etcd3` package's messages and stubs, made to work with today's protobuf; nothing else of it is used.

etcd3 0.12.0's `*_pb2.py` were generated in 2019 and build their descriptors by hand, which protobuf's upb
refuses. The serialized descriptors inside them are sound: the messages are built from those bytes, in a
descriptor pool of their own (no clash with another package's "kv.proto"), and put into `sys.modules` where
etcd3 looks for them. A failed import would leave half-registered modules behind, so the version decides.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

_HAND_BUILT = "0.12.0"
_FILES = ("kv", "auth", "rpc")  # each needs the ones before it


def _serialized_descriptor(path: Path) -> bytes:
    """The FileDescriptorProto that is a literal in the generated module at `path`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            literal = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            value = literal.value if isinstance(literal, ast.Constant) else None
            if isinstance(value, str):
                return value.encode("latin-1")
            if isinstance(value, bytes):
                return value
    raise ImportError(f"{path} holds no serialized descriptor")


def _module(name: str, pool: descriptor_pool.DescriptorPool) -> types.ModuleType:
    """What the generated module `name` offers: a class per message, a wrapper per enum, the enums' values."""
    module: Any = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2")
    module.DESCRIPTOR = file = pool.FindFileByName(f"{name}.proto")
    for message in file.message_types_by_name.values():
        setattr(module, message.name, message_factory.GetMessageClass(message))
    for enum in file.enum_types_by_name.values():
        setattr(module, enum.name, enum_type_wrapper.EnumTypeWrapper(enum))
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module  # type: ignore[no-any-return]


def _put_messages_in_place() -> None:
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    root = Path(spec.submodule_search_locations[0]) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        serialized = _serialized_descriptor(root / f"{name}_pb2.py")
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(serialized))
    for name in _FILES:
        sys.modules[f"etcd3.etcdrpc.{name}_pb2"] = _module(name, pool)


if "etcd3" not in sys.modules and importlib.metadata.version("etcd3") == _HAND_BUILT:
    _put_messages_in_place()

rpc: Any = importlib.import_module("etcd3.etcdrpc.rpc_pb2")
"""Messages of etcd's services."""
kv: Any = importlib.import_module("etcd3.etcdrpc.kv_pb2")
"""KeyValue and Event."""
stubs: Any = importlib.import_module("etcd3.etcdrpc.rpc_pb2_grpc")
"""KVStub, WatchStub, LeaseStub, AuthStub, MaintenanceStub: each takes a channel of grpc or of grpc.aio."""
