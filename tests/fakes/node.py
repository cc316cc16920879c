"""The part of a node that conductors talk to: greets, and sends a snapshot and deltas as the test says."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field

from mooncaked.api.protocol import (
    HEADER,
    Delta,
    ErrorReply,
    Hello,
    HelloReply,
    Kind,
    Snapshot,
    Struct,
    Subscribe,
    SubscribeReply,
    decode_head,
    decode_request,
    encode_error,
    encode_frame,
)
from mooncaked.errors import Unauthenticated
from mooncaked.types import BlockEvent, NodeRecord, Tier
from tests.fakes.cluster_view import node_record

__all__ = ["ErrorReply", "FakeNode", "key", "stored"]


def key(number: int) -> bytes:
    return struct.pack("<QQ", number, number)


def stored(*numbers: int, tier: Tier = Tier.DRAM) -> list[BlockEvent]:
    return [BlockEvent(True, "ns", key(n), None, 100, tier) for n in numbers]


def removed(*numbers: int) -> list[BlockEvent]:
    return [BlockEvent(False, "ns", key(n), None, 100, Tier.DRAM) for n in numbers]


@dataclass
class FakeNode:
    """Attributes may be changed while it runs."""

    node_id: str
    token: str | None = None
    epoch: int = 1
    events: list[BlockEvent] = field(default_factory=list)  # since the epoch began; number n is events[n - 1]
    frame_blocks: int = 2  # of a snapshot
    heartbeat_s: float = 0.05
    silent: bool = False  # no heartbeats and no deltas
    hellos: list[Hello] = field(default_factory=list)
    subscribes: list[Subscribe] = field(default_factory=list)
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def record(self) -> NodeRecord:
        return node_record(self.node_id, f"127.0.0.1:{self.port}", epoch=self.epoch)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As kill -9: every connection breaks, and new ones are refused."""
        if self._server is not None:
            self._server.close()
            self.disconnect()
            self._server = None

    def disconnect(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def say(self, events: list[BlockEvent]) -> None:
        """Something happened: everyone who follows is told."""
        first = len(self.events) + 1
        self.events += events
        self._broadcast(Delta(sequence=first, events=events))

    def skip(self, events: list[BlockEvent]) -> None:
        """Something happened that nobody is told: a gap."""
        self.events += events

    def _broadcast(self, delta: Delta) -> None:
        for writer in self._writers:
            writer.write(encode_frame(Kind.DELTA, 0, delta))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._greet(reader, writer)
            await self._subscription(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> tuple[int, Struct]:
        head = decode_head(await reader.readexactly(HEADER.size), "test")
        return head.request_id, decode_request(head, await reader.readexactly(head.header_len), "test")

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_id, hello = await self._receive(reader)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        if hello.token != self.token:
            error = Unauthenticated(what="the node", cause="the token is wrong", remedy="Use the right one.")
            writer.write(encode_error(request_id, error))
            raise ConnectionResetError
        reply = HelloReply(version=1, node_id=self.node_id, epoch=self.epoch)
        writer.write(encode_frame(Kind.HELLO, request_id, reply, reply=True))

    async def _subscription(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request_id, subscribe = await self._receive(reader)
        assert isinstance(subscribe, Subscribe)
        self.subscribes.append(subscribe)
        resumed = subscribe.epoch == self.epoch
        reply = SubscribeReply(epoch=self.epoch, resumed=resumed)
        writer.write(encode_frame(Kind.SUBSCRIBE, request_id, reply, reply=True))
        if resumed:
            missed = self.events[subscribe.sequence :]
            if missed:
                delta = Delta(sequence=subscribe.sequence + 1, events=missed)
                writer.write(encode_frame(Kind.DELTA, 0, delta))
        else:
            self._snapshot(writer)
        self._writers.add(writer)
        while True:
            await asyncio.sleep(self.heartbeat_s)
            if not self.silent:
                beat = Delta(sequence=len(self.events) + 1, events=[])
                writer.write(encode_frame(Kind.DELTA, 0, beat))
                await writer.drain()

    def _snapshot(self, writer: asyncio.StreamWriter) -> None:
        blocks: dict[tuple[bytes, Tier], BlockEvent] = {}
        for event in self.events:
            if event.stored:
                blocks[event.key, event.tier] = event
            else:
                blocks.pop((event.key, event.tier), None)
        held = list(blocks.values())
        step = self.frame_blocks
        frames = [held[i : i + step] for i in range(0, len(held), step)] or [[]]
        for i, frame in enumerate(frames):
            body = Snapshot(sequence=len(self.events), blocks=frame, last=i == len(frames) - 1)
            writer.write(encode_frame(Kind.SNAPSHOT, 0, body))
