"""The blocking client, for the threads of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mooncaked.api.protocol import HelloReply, Kind, PinnedBlock, Unpin
from mooncaked.client.buffers import Buffer, Value, close_view, describe_tensor, plain_view
from mooncaked.client.connection import Connection
from mooncaked.client.direct import ASK, Ask
from mooncaked.client.gpu_regions import lock_mapping
from mooncaked.client.operations import Operation, PutResult, Source, chunks
from mooncaked.client.pool import ConnectionPool
from mooncaked.client.requests import Key, Reading, Requests, as_keys, put_source, put_sources
from mooncaked.clock import Clock, SystemClock
from mooncaked.keys import as_key

if TYPE_CHECKING:
    from mooncaked.pinning import HostPins

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
        self._pool = ConnectionPool(str(socket_path), namespace, token, timeout_s, clock or SystemClock())
        self._timeout_s = timeout_s
        self._verify = verify

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

    def put(
        self, key: Key, value: Value, *, parent: Key | None = None, ttl_s: float = 0.0, hold: str = ""
    ) -> PutResult:
        """Store `value` (one buffer, or several that follow one another) under `key`.

        `parent` is the key of the block before it in its prefix chain. `ttl_s` is how long it stays readable
        at most (0: as the namespace is configured); `hold` is "soft" (goes only when nothing else can) or
        "hard" (is not evicted), within the node's limits. Returns `STORED`, `EXISTS`, `BUSY` or `DROPPED`;
        raises `PoolFull` or `ValueTooLarge`.

        When it returns, every reader on this node finds the value. The node may learn of it a moment later:
        of two clients that store under one key at the same time, both may hear `STORED`, and one of the
        values, which are equal by contract, stays. If the node ends in that moment, the value is lost."""
        posting, view = self._pool.posting, plain_view(value)
        if posting is not None and view is not None and not hold and not ttl_s:
            result = posting.put_one(as_key(key), view, None if parent is None else as_key(parent))
            if result is not None:
                return result
        return self._put_one(put_source(key, value, parent, ttl_s=ttl_s, hold=hold))

    def put_batch(
        self,
        keys: Sequence[Key],
        values: Sequence[Value],
        *,
        parents: Sequence[Key | None] | None = None,
        ttl_s: float = 0.0,
        hold: str = "",
    ) -> list[PutResult]:
        """Store each value under its key. Here no room is a result (`FULL`, `TOO_LARGE`), not an error."""
        sources = put_sources(keys, values, parents, ttl_s, hold)
        posting = self._pool.posting
        if posting is None:
            return self._run(self._requests.put_batch(sources))
        results: list[PutResult | None] = []
        for chunk in chunks([source.item.size for source in sources]):
            results += posting.put(sources[chunk.start : chunk.stop])
        if left := [index for index, result in enumerate(results) if result is None]:
            rest = self._run(self._requests.put_batch([sources[index] for index in left]))
            for index, result in zip(left, rest, strict=True):
                results[index] = result
        return [result for result in results if result is not None]

    def put_tensor(
        self, key: Key, tensor: Buffer, *, parent: Key | None = None, ttl_s: float = 0.0, hold: str = ""
    ) -> PutResult:
        """Store a numpy array or torch tensor with its shape and type; otherwise as `put`."""
        meta = describe_tensor(tensor)
        return self._put_one(put_source(key, tensor, parent, meta=meta, ttl_s=ttl_s, hold=hold))

    def _put_one(self, source: Source) -> PutResult:
        posting = self._pool.posting
        if posting is not None and (result := posting.put((source,))[0]) is not None:
            return result
        return self._run(self._requests.put(source))

    # --- reading -----------------------------------------------------------------------------------

    def get(self, key: Key, *, sources: Sequence[str] = (), locate: bool = False) -> bytes | None:
        """The value of `key`, or None.

        A key that this node lacks is fetched from the nodes `sources`, tried in order, and with `locate` from
        whichever node the conductor names; what did not come in time is a miss."""
        value: bytes | None = self._read(self._requests.get([as_key(key)]), sources, locate)[0]
        return value

    def get_batch(
        self, keys: Sequence[Key], *, sources: Sequence[str] = (), locate: bool = False
    ) -> list[bytes | None]:
        """The value of each key, or None; see `get`."""
        return self._read(self._requests.get(keys), sources, locate)

    def get_into(
        self, key: Key, target: Value, *, sources: Sequence[str] = (), locate: bool = False
    ) -> int | None:
        """Read the value into one writable buffer, or spread it over several; returns its size, or None.

        What is in the buffer after a miss is not defined. Raises `BufferTooSmall`. See `get` for `sources`
        and `locate`."""
        direct, view = self._pool.direct, plain_view(target)
        if direct is not None and view is not None and not view.readonly and not self._verify:
            size = direct.copy_to(as_key(key), view)
            if size is not None and direct.connected():
                return size
        read: int | None = self._read(self._requests.get_into([key], [target]), sources, locate)[0]
        return read

    def get_into_batch(
        self,
        keys: Sequence[Key],
        targets: Sequence[Value],
        *,
        sources: Sequence[str] = (),
        locate: bool = False,
    ) -> list[int | None]:
        """Read each value into its buffer or buffers; see `get_into`."""
        return self._read(self._requests.get_into(keys, targets), sources, locate)

    def get_tensor(
        self, key: Key, *, framework: str | None = None, sources: Sequence[str] = (), locate: bool = False
    ) -> Any | None:
        """A new tensor with the stored shape, type and bytes, or None.

        `framework` is "numpy" or "torch"; without it, what was put. Raises `InvalidRequest` when the value
        is no tensor, or one that the framework cannot hold."""
        return self._read(self._requests.get_tensor(key, framework), sources, locate)[0]

    def _read(self, reading: Reading, sources: Sequence[str], locate: bool) -> list[Any]:
        direct = self._pool.direct
        if direct is None or not reading.direct:
            return self._run(self._requests.read(reading, sources, locate))
        results = self._requests.read_direct(direct, reading)
        left, rest = self._requests.rest(reading, results, misses=locate or bool(sources))
        if left:
            for index, result in zip(
                left, self._run(self._requests.read(rest, sources, locate)), strict=True
            ):
                results[index] = result
        return results

    @contextmanager
    def get_view(
        self, key: Key, *, sources: Sequence[str] = (), locate: bool = False
    ) -> Iterator[memoryview | None]:
        """The value in the daemon's own memory, read-only and without a copy; None is a miss.

        It is pinned until the `with` block is left, and must not be used after. If the connection was lost
        meanwhile, leaving raises `ConnectionLost`: what was read may then be wrong."""
        direct = self._pool.direct
        held = ASK if direct is None else direct.hold(as_key(key))
        if direct is None or isinstance(held, Ask) or (held is None and (locate or sources)):
            with self._pinned_view(key, sources, locate) as view:
                yield view
        elif held is None:
            yield None
        elif not self._requests.trusts(held.found):
            direct.let_go(held)
            with self._pinned_view(key, sources, locate) as view:
                yield view
        else:
            with direct.holding(held) as view:
                yield view

    @contextmanager
    def _pinned_view(self, key: Key, sources: Sequence[str], locate: bool) -> Iterator[memoryview | None]:
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
    def get_gpu_view(self, key: Key) -> Iterator[Any | None]:
        """The value in the memory of one of the node's GPUs, as a flat torch tensor of bytes and without a
        copy; None when it is not there. The node brings up what is read often (`gpu.promote_uses`), and to
        ask for it here is a read.

        It is pinned until the `with` block is left; kernels that read it must have ended by then, the tensor
        must not be written, and leaving raises as for `get_view`. Raises also `MissingDependency` (no torch)
        and `GpuUnavailable` (this process does not see the device)."""
        with self._pool.borrow() as borrowed:
            block = borrowed.drive(self._requests.pin_gpu(key))
            connection = borrowed.connection
        if block is None:
            yield None
            return
        with self._pinned(connection, block):
            yield connection.mapping.gpu_view(block.region, block.offset, block.size)

    def lock_host_memory(self) -> HostPins:
        """Page-lock this process's mapping of the node's memory, so that cudaMemcpy between it and a GPU is
        fast and does not block. Takes about a second for a few GiB; ends with `close` of what it returns,
        whose `failure` says what could not be locked. Raises `GpuUnavailable` where there is no GPU."""
        with self._pool.borrow() as borrowed:
            return lock_mapping(borrowed.connection.mapping.views())

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
        raw, direct = as_key(key), self._pool.direct
        if direct is not None and (found := direct.has(raw)) is not None:
            return found
        return self._run(self._requests.exists((raw,)))[0]

    def exists_batch(self, keys: Sequence[Key]) -> list[bool]:
        """Whether this node has a value for each key."""
        raw, direct = as_keys(keys), self._pool.direct
        if direct is not None and (found := direct.exists(raw)) is not None:
            return found
        return self._run(self._requests.exists(raw))

    def prefix_match(self, keys: Sequence[Key]) -> int:
        """How many of `keys` (a chain, root first) this node has without a gap."""
        raw, direct = as_keys(keys), self._pool.direct
        if direct is not None and (matched := direct.prefix_match(raw)) is not None:
            return matched
        return self._run(self._requests.prefix_match(raw))

    def remove(self, key: Key) -> bool:
        """Remove the value; False if it was not there, or goes only when its last reader ends."""
        return self._run(self._requests.remove([key]))[0]

    def remove_batch(self, keys: Sequence[Key]) -> list[bool]:
        """Remove each value; see `remove`."""
        return self._run(self._requests.remove(keys))
