"""A store in this process's memory, with the client's interface and whatever faults a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from mooncaked.client import PutResult
from mooncaked.client.buffers import as_views, copy_out
from mooncaked.errors import MooncakeError


class MemoryStore:
    """Shared by the clients of all engines of a test, as if they were on one node."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.lock = threading.Lock()
        self.fail: Callable[[], MooncakeError | None] = lambda: None  # asked at the start of each exchange
        self.gate = threading.Event()  # cleared: every exchange waits
        self.gate.set()
        self.put_result: PutResult | None = None  # what every put ends with, if not what it should
        self.got: list[tuple[list[bytes], list[str], bool]] = []  # keys, sources and locate of each get
        self.puts: list[list[bytes]] = []

    def get_into_batch(
        self,
        keys: Sequence[bytes],
        targets: Sequence[object],
        *,
        sources: Sequence[str] = (),
        locate: bool = False,
    ) -> list[int | None]:
        self._enter()
        with self.lock:
            self.got.append((list(keys), list(sources), locate))
            return [self._get(key, target) for key, target in zip(keys, targets, strict=True)]

    def _get(self, key: bytes, target: object) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        copy_out(memoryview(value), as_views(target, writable=True))
        return len(value)

    def put_batch(
        self,
        keys: Sequence[bytes],
        values: Sequence[object],
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> list[PutResult]:
        self._enter()
        with self.lock:
            self.puts.append(list(keys))
            if self.put_result is not None:
                return [self.put_result] * len(keys)
            return [
                self._put(key, value, parent)
                for key, value, parent in zip(keys, values, parents or [None] * len(keys), strict=True)
            ]

    def _put(self, key: bytes, value: object, parent: bytes | None) -> PutResult:
        if key in self.values:
            return PutResult.EXISTS
        self.values[key] = b"".join(bytes(view) for view in as_views(value))
        self.parents[key] = parent
        return PutResult.STORED

    def _enter(self) -> None:
        self.gate.wait()
        if (error := self.fail()) is not None:
            raise error

    def close(self) -> None:
        """The engine has stopped."""

    def damage(self, key: bytes) -> None:
        """Make the value of `key` one that no engine can have computed."""
        self.values[key] = np.full(len(self.values[key]) // 4, 7.5, np.float32).tobytes()
