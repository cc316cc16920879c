"""One connection to the node's daemon on an event loop, with many requests under way at once."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import msgspec

from mooncaked.api.frames import FrameParser
from mooncaked.api.protocol import FrameHead, Kind, Open, OpenReply, Struct, decode_reply, encode_frame
from mooncaked.client.connection import Greeting
from mooncaked.client.direct import Direct
from mooncaked.client.mapping import Mapping
from mooncaked.client.operations import Call, Undo
from mooncaked.errors import ConnectionLost, DeadlineExceeded, MooncakeError

T = TypeVar("T")
_GONE = select.POLLHUP | select.POLLRDHUP | select.POLLERR


class _Waiter(msgspec.Struct, frozen=True):
    call: Call
    future: asyncio.Future[Struct]


class AsyncConnection(asyncio.Protocol):
    """A greeted connection. Replies find their requests by number, so they may come in any order."""

    def __init__(self, greeting: Greeting, mapping: Mapping) -> None:
        self.hello = greeting.hello
        self.mapping = mapping
        self.fresh = True  # has answered nothing yet, so its loss says that the daemon is not well
        self.lost: MooncakeError | None = None
        self.ready = False  # all is done that comes before the first request
        self.direct: Direct | None = None  # set by `open_direct`
        self._page = greeting.page
        self._peer = greeting.frames.peer
        self._parser = FrameParser(self._peer)
        self._poll = select.poll()
        self._poll.register(greeting.frames.sock.fileno(), select.POLLRDHUP)
        self._transport: asyncio.Transport | None = None
        self._waiters: dict[int, _Waiter] = {}
        self._next_id = 1

    # --- the loop calls these ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has taken the socket over."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand each complete reply to whoever waits for it."""
        try:
            for head, body in self._parser.feed(data):
                self._receive(head, body)
        except MooncakeError as error:  # out of step with the daemon
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        cause = exc or "the daemon closed it"
        self._fail(ConnectionLost(what=self._peer, operation="a request", cause=cause))

    async def open_direct(self, namespace: str, timeout_s: float) -> None:
        """Make `direct`, if the daemon shares its index."""
        shared, page = self.mapping.shared, self._page
        if shared is not None and page is not None and self._transport is not None:
            if not shared.knows(namespace):
                call = Call(Kind.OPEN, Open(namespace=namespace), OpenReply)
                reply: OpenReply = await self.call(call, timeout_s)
                shared.learn(namespace, (reply.seed1, reply.seed2))
                self.fresh = True
            fileno = self._transport.get_extra_info("socket").fileno()
            self.direct = Direct(self.mapping, shared, page, namespace, fileno)
        self.ready = self.lost is None

    # --- exchanges ---------------------------------------------------------------------------------

    async def call(self, call: Call, timeout_s: float) -> Any:
        """Send a request and return its reply; raises the daemon's error, or that of the connection.

        When the wait ends early, what the late reply brings is given back at once."""
        waiter = _Waiter(call, asyncio.get_running_loop().create_future())
        self._waiters[self._send(call.kind, call.body)] = waiter
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError as error:
            operation, limit_ms = f"{call.kind.name} at {self._peer}", round(timeout_s * 1000)
            raise DeadlineExceeded(operation=operation, limit_ms=limit_ms) from error

    def post(self, kind: Kind, body: Struct) -> None:
        """Send a frame without waiting; raises `ConnectionLost` when the connection has ended by now."""
        if self._poll.poll(0) and self.lost is None:  # the loop may not have heard of it yet
            cause = "the daemon closed it"
            self._fail(ConnectionLost(what=self._peer, operation="a request", cause=cause))
        self._send(kind, body)

    def send(self, kind: Kind, body: Struct, payload: Sequence[memoryview]) -> None:
        """Send a frame with a payload, that gets no reply; raises as `post` does."""
        if self.lost is not None or self._transport is None:
            raise self.lost or ConnectionLost(what=self._peer, operation="a send", cause="not connected")
        size = sum(map(len, payload))
        self._transport.writelines(
            [encode_frame(kind, 0, body, payload_len=size, version=self.hello.version), *payload]
        )

    def undo(self, undo: Undo) -> None:
        """Send what gives back something held; if the connection is gone, it was given back with it."""
        if self.lost is None:
            self._send(undo.kind, undo.body)

    def close(self) -> None:
        """End the connection: the daemon then takes back all that it holds."""
        self._fail(ConnectionLost(what=self._peer, operation="a request", cause="this client closed it"))

    def _send(self, kind: Kind, body: Struct) -> int:
        if self.lost is not None or self._transport is None:
            raise self.lost or ConnectionLost(what=self._peer, operation="a request", cause="not connected")
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        self._transport.write(encode_frame(kind, request_id, body, version=self.hello.version))
        return request_id

    def _receive(self, head: FrameHead, body: bytes) -> None:
        if head.kind is Kind.ERROR and head.request_id == 0:  # why the daemon ends this connection
            decode_reply(head, body, Struct, self._peer)
        waiter = self._waiters.pop(head.request_id, None)
        if waiter is None:
            return  # the reply to an undo
        self.fresh = False
        try:
            reply = decode_reply(head, body, waiter.call.reply, self._peer)
        except MooncakeError as error:
            if not waiter.future.done():
                waiter.future.set_exception(error)
            return
        if not waiter.future.done():
            waiter.future.set_result(reply)
        elif waiter.call.undo is not None and (undo := waiter.call.undo(reply)) is not None:
            self.undo(undo)

    def _fail(self, error: MooncakeError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self.ready = False
        if self.direct is not None:
            self.direct.end()
        self._poll = select.poll()  # the descriptor's number may soon be another file's
        for waiter in self._waiters.values():
            if not waiter.future.done():
                waiter.future.set_exception(error)
        self._waiters.clear()
        if self._transport is not None:
            self._transport.close()
