"""The blocking client, for the threads of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mooncaked.api.protocol import HelloReply, Kind, PinnedBlock, Unpin
from mooncaked.client.buffers import Buffer, Value
from mooncaked.client.connection import Connection
from mooncaked.client.operations import Operation, PutResult
from mooncaked.client.pool import ConnectionPool
from mooncaked.client.requests import Key, Requests, close_view
from mooncaked.clock import Clock, SystemClock

T = TypeVar("T")


class Client:
    """Stores and reads blocks through the daemon of this node. Safe to use from several threads.

    Keys are bytes or text (UTF-8), values never change, a miss is None or False and never an exception.
    `timeout_s` bounds each exchange with the daemon, not a whole batch; `verify` compares what is read with
    its checksum. It connects when first used, and again by itself after the daemon was away.

    Every method raises `Unreachable` while no daemon listens, `ConnectionLost` when the daemon went away in
    the middle (a read is then to be treated as a miss, a write as not done), `DeadlineExceeded`,
    `Unauthenticated`, `VersionMismatch`, and `InvalidRequest` or `InvalidKey` for arguments that cannot be
    used."""

    def __init__(
        self,
        socket_path: str | Path,
        namespace: str = "default",
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        verify: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._requests = Requests(namespace, timeout_s, verify)
        self._pool = ConnectionPool(str(socket_path), token, timeout_s, clock or SystemClock())
        self._timeout_s = timeout_s

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the daemon takes back what they held. Calls after this raise `Refused`."""
        self._pool.close()

    def hello(self) -> HelloReply:
        """What the daemon says of itself: its node id, its epoch (random at each start), its regions."""
        with self._pool.borrow() as borrowed:
            return borrowed.connection.hello

    def _run(self, operation: Operation[T]) -> T:
        with self._pool.borrow() as borrowed:
            return borrowed.drive(operation)

    # --- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, value: Value, *, parent: Key | None = None) -> PutResult:
        """Store `value` (one buffer, or several that follow one another) under `key`.

        `parent` is the key of the block before it in its prefix chain. Returns `STORED`, `EXISTS`, `BUSY` or
        `DROPPED`; raises `PoolFull` or `ValueTooLarge`."""
        return self._run(self._requests.put(key, value, parent))

    def put_batch(
        self, keys: Sequence[Key], values: Sequence[Value], *, parents: Sequence[Key | None] | None = None
    ) -> list[PutResult]:
        """Store each value under its key. Here no room is a result (`FULL`, `TOO_LARGE`), not an error."""
        return self._run(self._requests.put_batch(keys, values, parents))

    def put_tensor(self, key: Key, tensor: Buffer, *, parent: Key | None = None) -> PutResult:
        """Store a numpy array or torch tensor with its shape and type; otherwise as `put`."""
        return self._run(self._requests.put_tensor(key, tensor, parent))

    # --- reading -----------------------------------------------------------------------------------

    def get(self, key: Key, *, sources: Sequence[str] = (), locate: bool = False) -> bytes | None:
        """The value of `key`, or None.

        A key that this node lacks is fetched from the nodes `sources`, tried in order, and with `locate` from
        whichever node the conductor names; what did not come in time is a miss."""
        return self._run(self._requests.get([key], sources, locate))[0]

    def get_batch(
        self, keys: Sequence[Key], *, sources: Sequence[str] = (), locate: bool = False
    ) -> list[bytes | None]:
        """The value of each key, or None; see `get`."""
        return self._run(self._requests.get(keys, sources, locate))

    def get_into(
        self, key: Key, target: Value, *, sources: Sequence[str] = (), locate: bool = False
    ) -> int | None:
        """Read the value into one writable buffer, or spread it over several; returns its size, or None.

        Raises `BufferTooSmall`. See `get` for `sources` and `locate`."""
        return self._run(self._requests.get_into([key], [target], sources, locate))[0]

    def get_into_batch(
        self,
        keys: Sequence[Key],
        targets: Sequence[Value],
        *,
        sources: Sequence[str] = (),
        locate: bool = False,
    ) -> list[int | None]:
        """Read each value into its buffer or buffers; see `get_into`."""
        return self._run(self._requests.get_into(keys, targets, sources, locate))

    def get_tensor(
        self, key: Key, *, framework: str | None = None, sources: Sequence[str] = (), locate: bool = False
    ) -> Any | None:
        """A new tensor with the stored shape, type and bytes, or None.

        `framework` is "numpy" or "torch"; without it, what was put. Raises `InvalidRequest` when the value
        is no tensor, or one that the framework cannot hold."""
        return self._run(self._requests.get_tensor(key, framework, sources, locate))[0]

    @contextmanager
    def get_view(
        self, key: Key, *, sources: Sequence[str] = (), locate: bool = False
    ) -> Iterator[memoryview | None]:
        """The value in the daemon's own memory, read-only and without a copy; None is a miss.

        It is pinned until the `with` block is left, and must not be used after. If the connection was lost
        meanwhile, leaving raises `ConnectionLost`: what was read may then be wrong."""
        with self._pool.borrow() as borrowed:
            (block,) = borrowed.drive(self._requests.pin(key, sources, locate))
            connection = borrowed.connection
        if block is None:
            yield None
            return
        with self._pinned(connection, block):
            view = self._requests.open_view(key, block, connection.mapping)
            try:
                yield view
            finally:
                close_view(view)

    @contextmanager
    def _pinned(self, connection: Connection, block: PinnedBlock) -> Iterator[None]:
        body = Unpin(pins=[block.pin])
        try:
            yield
        except BaseException:
            connection.undo(Kind.UNPIN, body, None, self._timeout_s)
            raise
        connection.post(Kind.UNPIN, body, self._timeout_s)

    # --- questions and removal ---------------------------------------------------------------------

    def exists(self, key: Key) -> bool:
        """Whether this node has a value for `key`. Asking protects nothing from eviction."""
        return self._run(self._requests.exists([key]))[0]

    def exists_batch(self, keys: Sequence[Key]) -> list[bool]:
        """Whether this node has a value for each key."""
        return self._run(self._requests.exists(keys))

    def prefix_match(self, keys: Sequence[Key]) -> int:
        """How many of `keys` (a chain, root first) this node has without a gap."""
        return self._run(self._requests.prefix_match(keys))

    def remove(self, key: Key) -> bool:
        """Remove the value; False if it was not there, or goes only when its last reader ends."""
        return self._run(self._requests.remove([key]))[0]

    def remove_batch(self, keys: Sequence[Key]) -> list[bool]:
        """Remove each value; see `remove`."""
        return self._run(self._requests.remove(keys))
