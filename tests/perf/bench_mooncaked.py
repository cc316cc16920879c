"""Our node beside other stores: an adapter for a harness `peerbench` that is found on the module path.

    PYTHONPATH=HARNESS:. python tests/perf/bench_mooncaked.py [--reps N] [--sizes BYTES,...] [--ops OP,...]

The harness gives `aligned_buffer`, `Adapter`, `std_args` and `std_run`. The node is a process of its own,
started here, that knows of no others; everything goes through `mooncaked.client.Client`.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from peerbench import Adapter, aligned_buffer, std_args, std_run  # type: ignore[import-not-found]

from mooncakectl.commands.bench_store import lone_node
from mooncaked.bench.store import listener_pid
from mooncaked.client import Client

POOL = os.environ.get("BENCH_POOL", "4GiB")


class Mooncaked(Adapter):  # type: ignore[misc]
    """The operations of the harness on a client, with its buffer as the caller's memory."""

    name = "mooncaked"

    def __init__(self) -> None:
        self.buf = aligned_buffer()
        self._view = memoryview(self.buf[0])
        self._stack = ExitStack()
        path = self._stack.enter_context(lone_node(POOL))
        self._pid = listener_pid(path)
        self._client = self._stack.enter_context(Client(path, "peers"))
        self._live: list[str] = []

    def server_pids(self) -> list[int]:
        """The node's process."""
        return [] if self._pid is None else [self._pid]

    def clear(self) -> None:
        """Remove what was put."""
        self._client.remove_batch(self._live)
        self._live.clear()

    def close(self) -> None:
        """End the node."""
        self._stack.close()

    def put(self, key: str, value: bytes) -> None:
        """One value."""
        self._stored([key], [self._client.put(key, value)])

    def put_from(self, key: str, offset: int, size: int) -> None:
        """One value, from the buffer."""
        self._stored([key], [self._client.put(key, self._view[offset : offset + size])])

    def batch_put_from(self, keys: list[str], offsets: list[int], size: int) -> None:
        """Many values, from the buffer."""
        self._stored(keys, self._client.put_batch(keys, [self._view[o : o + size] for o in offsets]))

    def _stored(self, keys: list[str], results: Any) -> None:
        if any(result != "stored" for result in results):
            raise AssertionError(results)
        self._live += keys

    def get(self, key: str) -> bytes | None:
        """One value as bytes."""
        return self._client.get(key)

    def get_view(self, key: str) -> int:
        """One value without a copy."""
        with self._client.get_view(key) as view:
            return 0 if view is None else len(view)

    def get_into(self, key: str, offset: int, size: int) -> None:
        """One value, into the buffer."""
        if self._client.get_into(key, self._view[offset : offset + size]) != size:
            raise AssertionError(key)

    def batch_get_into(self, keys: list[str], offsets: list[int], size: int) -> None:
        """Many values, into the buffer."""
        targets = [self._view[o : o + size] for o in offsets]
        if self._client.get_into_batch(keys, targets) != [size] * len(keys):
            raise AssertionError(keys)

    def exist(self, key: str) -> bool:
        """One question."""
        return self._client.exists(key)

    def batch_exist(self, keys: list[str]) -> list[bool]:
        """Many questions at once."""
        return self._client.exists_batch(keys)


if __name__ == "__main__":
    adapter = Mooncaked()
    try:
        std_run(adapter, std_args().parse_args())
    finally:
        adapter.close()
