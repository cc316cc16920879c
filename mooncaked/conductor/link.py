"""Connections from a conductor to nodes, which carry frames: for the subscriptions and for orders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from mooncaked.api.frames import FrameParser
from mooncaked.api.protocol import (
    VERSION_MAX,
    VERSION_MIN,
    FrameHead,
    Hello,
    HelloReply,
    Kind,
    Side,
    Struct,
    decode_body,
    decode_reply,
    encode_frame,
)
from mooncaked.errors import ConnectionLost, ProtocolError, Unreachable
from mooncaked.types import NodeRecord
from mooncaked.units import split_address

CONNECT_S = 2.0
SILENCE_S = 3.0  # a node sends a heartbeat every second to whoever subscribes
_READ_BYTES = 256 << 10

R = TypeVar("R", bound=Struct)


class Link:
    """Makes connections to nodes. `purpose` says in errors what they are for, as "a subscription"."""

    def __init__(self, token: str | None, purpose: str) -> None:
        self._purpose = purpose
        self._hello = Hello(
            version_min=VERSION_MIN,
            version_max=VERSION_MAX,
            side=Side.CONDUCTOR,
            name=f"conductor[{os.getpid()}]",
            token=token,
        )

    @asynccontextmanager
    async def open(self, record: NodeRecord) -> AsyncIterator[Stream]:
        """A greeted connection; raises `Unreachable`, or what the node answered."""
        stream = None
        try:
            async with asyncio.timeout(CONNECT_S):
                host, port = split_address(record.peer_address)
                stream = Stream(
                    *await asyncio.open_connection(host, port), record.peer_address, self._purpose
                )
                reply = await stream.ask(Kind.HELLO, self._hello, HelloReply)
            if reply.node_id != record.node_id:
                problem = f"node {reply.node_id} answers there, not {record.node_id}"
                raise ProtocolError(peer=record.peer_address, problem=problem)
            stream.version = reply.version
            yield stream
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            cause = str(error) or f"no answer within {CONNECT_S:.0f} s"
            remedy = "Check that mooncaked runs there"
            what = f"node {record.node_id}"
            raise Unreachable(what=what, address=record.peer_address, cause=cause, remedy=remedy) from error
        finally:
            if stream is not None:
                await stream.close()


class Stream:
    """A connection that carries frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, purpose: str
    ) -> None:
        self.version = VERSION_MAX
        self._reader, self._writer = reader, writer
        self._peer, self._purpose = peer, purpose
        self._request_id = 0
        self._frames = self._receive(FrameParser(peer))

    async def ask(self, kind: Kind, body: Struct, cls: type[R]) -> R:
        """Send one request and wait for its reply; raises what the node answered, or `ConnectionLost`."""
        self._request_id += 1
        self._writer.write(encode_frame(kind, self._request_id, body, version=self.version))
        head, data = await self.next()
        return decode_reply(head, data, cls, self._peer)

    async def next(self) -> tuple[FrameHead, bytes]:
        """The next frame; raises `ConnectionLost` at the end of the stream, and after `SILENCE_S` without."""
        try:
            async with asyncio.timeout(SILENCE_S):
                return await anext(self._frames)
        except StopAsyncIteration:
            cause = "the node closed it"
        except TimeoutError:
            cause = f"nothing came for {SILENCE_S:.0f} s"
        raise ConnectionLost(what=self._peer, operation=self._purpose, cause=cause)

    def event(self, head: FrameHead, data: bytes, kind: Kind, cls: type[R]) -> R:
        """Decode a frame that must be of `kind`; raises the error that came instead, or `ProtocolError`."""
        if head.kind is Kind.ERROR:
            return decode_reply(head, data, cls, self._peer)
        if head.kind is not kind or head.reply:
            raise ProtocolError(peer=self._peer, problem=f"{head.kind.name} came where {kind.name} was due")
        return decode_body(data, cls, self._peer)

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()
        await self._frames.aclose()

    async def _receive(self, parser: FrameParser) -> AsyncGenerator[tuple[FrameHead, bytes], None]:
        while data := await self._reader.read(_READ_BYTES):
            for frame in parser.feed(data):
                yield frame
