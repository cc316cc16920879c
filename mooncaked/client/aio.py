"""The asyncio client: the operations of the blocking one, performed on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mooncaked.api.protocol import HelloReply, Kind, PinnedBlock, Unpin
from mooncaked.client.aioconnection import AsyncConnection
from mooncaked.client.buffers import Buffer, Value, close_view, describe_tensor
from mooncaked.client.connection import Greeting
from mooncaked.client.direct import ASK, Ask
from mooncaked.client.gpu_regions import lock_mapping
from mooncaked.client.mapping import Mapping
from mooncaked.client.operations import Call, Operation, Post, PutResult, Send, Step, Undo, Work
from mooncaked.client.requests import Key, Reading, Requests, as_keys, put_source, put_sources
from mooncaked.clock import Clock, SystemClock
from mooncaked.errors import ConnectionLost, Refused
from mooncaked.keys import as_key

if TYPE_CHECKING:
    from mooncaked.pinning import HostPins

T = TypeVar("T")
_INLINE_BYTES = 256 << 10  # a larger copy is made in a thread, and the loop goes on


class _Abandoned(Exception):
    """Thrown into an operation so that it gives back what it holds."""


class _Driver:
    """Performs one operation; ends on `connection`."""

    def __init__(self, client: AsyncClient, connection: AsyncConnection) -> None:
        self._client = client
        self.connection = connection

    async def drive(self, operation: Operation[T]) -> T:
        """See `Borrowed.drive`. A cancelled one gives back what it holds before the cancellation goes on."""
        cancelled: asyncio.CancelledError | None = None
        try:
            step = next(operation)
            while True:
                try:
                    result = await self._perform(step)
                except asyncio.CancelledError as error:
                    cancelled = error
                    step = operation.throw(_Abandoned())
                except (
                    Exception
                ) as error:  # the operation gives back what it holds after any, and raises it again
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as stop:
            result_of_all: T = stop.value
            return result_of_all
        except _Abandoned:
            raise cancelled or asyncio.CancelledError from None

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Work):
            return await self._work(step)
        if isinstance(step, Post):
            return self.connection.post(step.kind, step.body)
        if isinstance(step, Send):
            return self.connection.send(step.kind, step.body, step.payload)
        if isinstance(step, Undo):
            return self.connection.undo(step)
        return await self._call(step)

    async def _call(self, step: Call) -> Any:
        timeout_s = self._client.timeout_s
        try:
            return await self.connection.call(step, timeout_s)
        except ConnectionLost:
            if self.connection.fresh or not step.restartable:
                raise
        self.connection = await self._client.connect()
        return await self.connection.call(step, timeout_s)

    async def _work(self, step: Work) -> Any:
        if step.size <= _INLINE_BYTES:
            return step.run(self.connection.mapping)
        work = asyncio.get_running_loop().run_in_executor(None, step.run, self.connection.mapping)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await _ended(work)  # the memory is not free while the thread still copies
            raise


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait for the end of `future`, however often this task is cancelled."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    future.exception()  # seen


class AsyncClient:
    """`Client` for an event loop: the same methods, to be awaited. Belongs to the loop that first uses it.

    All tasks share one connection. See `Client` for what the methods mean and raise."""

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
        self._path = str(socket_path)
        self._token = token
        self.timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._connecting = asyncio.Lock()
        self._connection: AsyncConnection | None = None
        self._mapping: Mapping | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way end with `ConnectionLost`, later ones with `Refused`."""
        self._closed = True
        async with self._connecting:
            if self._connection is not None:
                self._connection.close()
        await asyncio.sleep(0)  # the loop closes the socket in its next round

    async def connect(self) -> AsyncConnection:
        """The connection, made anew if there is none that works."""
        connection = self._connection
        if connection is not None and connection.ready and not self._closed:
            return connection
        async with self._connecting:
            if self._closed:
                raise Refused(problem="this client is closed", remedy="Make a new one.")
            if self._connection is None or self._connection.lost is not None:
                self._connection = await self._greet()
            return self._connection

    async def _greet(self) -> AsyncConnection:
        greeting = await _in_thread(
            lambda: Greeting(self._path, self._token, self.timeout_s, self._clock), Greeting.close
        )
        try:
            self._mapping = greeting.map(self._mapping)
            connection = AsyncConnection(greeting, self._mapping)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: connection, sock=greeting.frames.sock)
            await connection.open_direct(self._requests.namespace, self.timeout_s)
        except BaseException:
            greeting.close()
            raise
        return connection

    async def hello(self) -> HelloReply:
        """See `Client.hello`."""
        return (await self.connect()).hello

    async def _run(self, operation: Operation[T]) -> T:
        return await _Driver(self, await self.connect()).drive(operation)

    # --- writing -----------------------------------------------------------------------------------

    async def put(
        self, key: Key, value: Value, *, parent: Key | None = None, ttl_s: float = 0.0, hold: str = ""
    ) -> PutResult:
        """See `Client.put`."""
        return await self._run(self._requests.put(put_source(key, value, parent, ttl_s=ttl_s, hold=hold)))

    async def put_batch(
        self,
        keys: Sequence[Key],
        values: Sequence[Value],
        *,
        parents: Sequence[Key | None] | None = None,
        ttl_s: float = 0.0,
        hold: str = "",
    ) -> list[PutResult]:
        """See `Client.put_batch`."""
        return await self._run(self._requests.put_batch(put_sources(keys, values, parents, ttl_s, hold)))

    async def put_tensor(
        self, key: Key, tensor: Buffer, *, parent: Key | None = None, ttl_s: float = 0.0, hold: str = ""
    ) -> PutResult:
        """See `Client.put_tensor`."""
        meta = describe_tensor(tensor)
        return await self._run(
            self._requests.put(put_source(key, tensor, parent, meta=meta, ttl_s=ttl_s, hold=hold))
        )

    # --- reading -----------------------------------------------------------------------------------

    async def get(self, key: Key, *, sources: Sequence[str] = (), locate: bool = False) -> bytes | None:
        """See `Client.get`."""
        value: bytes | None = (await self._read(self._requests.get([as_key(key)]), sources, locate))[0]
        return value

    async def get_batch(
        self, keys: Sequence[Key], *, sources: Sequence[str] = (), locate: bool = False
    ) -> list[bytes | None]:
        """See `Client.get_batch`."""
        return await self._read(self._requests.get(keys), sources, locate)

    async def get_into(
        self, key: Key, target: Value, *, sources: Sequence[str] = (), locate: bool = False
    ) -> int | None:
        """See `Client.get_into`."""
        reading = self._requests.get_into([key], [target])
        size: int | None = (await self._read(reading, sources, locate))[0]
        return size

    async def get_into_batch(
        self,
        keys: Sequence[Key],
        targets: Sequence[Value],
        *,
        sources: Sequence[str] = (),
        locate: bool = False,
    ) -> list[int | None]:
        """See `Client.get_into_batch`."""
        return await self._read(self._requests.get_into(keys, targets), sources, locate)

    async def get_tensor(
        self, key: Key, *, framework: str | None = None, sources: Sequence[str] = (), locate: bool = False
    ) -> Any | None:
        """See `Client.get_tensor`."""
        return (await self._read(self._requests.get_tensor(key, framework), sources, locate))[0]

    async def _read(self, reading: Reading, sources: Sequence[str], locate: bool) -> list[Any]:
        direct = (await self.connect()).direct
        if direct is None or not reading.direct:
            return await self._run(self._requests.read(reading, sources, locate))
        if direct.size(reading.keys) <= _INLINE_BYTES:
            results = self._requests.read_direct(direct, reading)
        else:
            results = await self._in_thread_to_the_end(lambda: self._requests.read_direct(direct, reading))
        left, rest = self._requests.rest(reading, results, misses=locate or bool(sources))
        if left:
            found = await self._run(self._requests.read(rest, sources, locate))
            for index, result in zip(left, found, strict=True):
                results[index] = result
        return results

    @staticmethod
    async def _in_thread_to_the_end(work: Callable[[], T]) -> T:
        """What `work` returns, run in a thread; a cancellation waits for its end, since it writes to
        buffers."""
        running = asyncio.get_running_loop().run_in_executor(None, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await _ended(running)
            raise

    @asynccontextmanager
    async def get_view(
        self, key: Key, *, sources: Sequence[str] = (), locate: bool = False
    ) -> AsyncIterator[memoryview | None]:
        """See `Client.get_view`."""
        direct = (await self.connect()).direct
        held = ASK if direct is None else direct.hold(as_key(key))
        if direct is None or isinstance(held, Ask) or (held is None and (locate or sources)):
            async with self._pinned_view(key, sources, locate) as view:
                yield view
        elif held is None:
            yield None
        elif not self._requests.trusts(held.found):
            direct.let_go(held)
            async with self._pinned_view(key, sources, locate) as view:
                yield view
        else:
            with direct.holding(held) as view:
                yield view

    @asynccontextmanager
    async def _pinned_view(
        self, key: Key, sources: Sequence[str], locate: bool
    ) -> AsyncIterator[memoryview | None]:
        driver = _Driver(self, await self.connect())
        (block,) = await driver.drive(self._requests.pin(key, sources, locate))
        if block is None:
            yield None
            return
        async with _pinned(driver.connection, block):
            view = self._requests.open_view(key, block, driver.connection.mapping)
            try:
                yield view
            finally:
                close_view(view)

    @asynccontextmanager
    async def get_gpu_view(self, key: Key) -> AsyncIterator[Any | None]:
        """See `Client.get_gpu_view`."""
        driver = _Driver(self, await self.connect())
        block = await driver.drive(self._requests.pin_gpu(key))
        if block is None:
            yield None
            return
        place = (block.region, block.offset, block.size)
        async with _pinned(driver.connection, block):
            yield await _in_thread(lambda: driver.connection.mapping.gpu_view(*place), lambda _: None)

    async def lock_host_memory(self) -> HostPins:
        """See `Client.lock_host_memory`."""
        mapping = (await self.connect()).mapping
        return await _in_thread(lambda: lock_mapping(mapping.views()), lambda pins: pins.close())

    # --- questions and removal ---------------------------------------------------------------------

    async def exists(self, key: Key) -> bool:
        """See `Client.exists`."""
        return (await self.exists_batch((key,)))[0]

    async def exists_batch(self, keys: Sequence[Key]) -> list[bool]:
        """See `Client.exists_batch`."""
        raw, direct = as_keys(keys), (await self.connect()).direct
        if direct is not None and (found := direct.exists(raw)) is not None:
            return found
        return await self._run(self._requests.exists(raw))

    async def prefix_match(self, keys: Sequence[Key]) -> int:
        """See `Client.prefix_match`."""
        raw, direct = as_keys(keys), (await self.connect()).direct
        if direct is not None and (matched := direct.prefix_match(raw)) is not None:
            return matched
        return await self._run(self._requests.prefix_match(raw))

    async def remove(self, key: Key) -> bool:
        """See `Client.remove`."""
        return (await self._run(self._requests.remove([key])))[0]

    async def remove_batch(self, keys: Sequence[Key]) -> list[bool]:
        """See `Client.remove_batch`."""
        return await self._run(self._requests.remove(keys))


@asynccontextmanager
async def _pinned(connection: AsyncConnection, block: PinnedBlock) -> AsyncIterator[None]:
    body = Unpin(pins=[block.pin])
    try:
        yield
    except BaseException:
        connection.undo(Undo(Kind.UNPIN, body))
        raise
    connection.post(Kind.UNPIN, body)


async def _in_thread(make: Callable[[], T], discard: Callable[[T], None]) -> T:
    """What `make` returns; if this task is cancelled meanwhile, `discard` gets it."""
    work = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(lambda done: None if done.exception() else discard(done.result()))
        raise
