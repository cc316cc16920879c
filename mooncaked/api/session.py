"""One engine's connection to the daemon, on the event loop: frames in, frames out, no bytes of values."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

import msgspec

from mooncaked.api.counters import ApiCounters
from mooncaked.api.engine import EngineRequests
from mooncaked.api.frames import FrameParser
from mooncaked.api.listen import peer_pid
from mooncaked.api.protocol import (
    FrameHead,
    HelloReply,
    Kind,
    Pin,
    PinReply,
    RegionInfo,
    Struct,
    decode_request,
    encode_error,
    encode_frame,
)
from mooncaked.api.service import FRAME_TIMEOUT_S, HELLO_TIMEOUT_S, Reception
from mooncaked.clock import Clock, Deadline
from mooncaked.errors import DeadlineExceeded, IntegrityError, MooncakeError, ProtocolError
from mooncaked.store import Store

log = logging.getLogger(__name__)

FETCHES_MAX = 256  # pins of one connection that wait for other nodes; a further one finds only what is here
FETCH_SECONDS_MAX = 600.0
READ_TIMEOUT_S = 30.0  # for a client to take replies off its socket
GRACE_S = 5.0  # for a client that was cut off in the middle of copying to notice


class Fetches(Protocol):
    """Brings blocks of other nodes into the store."""

    async def fetch(
        self, namespace: str, keys: Sequence[bytes], sources: Sequence[str], locate: bool, deadline: Deadline
    ) -> dict[bytes, str]:
        """Fetch what can be had by the deadline; the node that each key came from. A failure is a miss."""


class SharedRegion(msgspec.Struct, frozen=True):
    """A region of the pool, and the memfd that clients map."""

    info: RegionInfo
    fd: int


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """What all sessions of a server share."""

    store: Store
    fetcher: Fetches | None
    regions: Sequence[SharedRegion]
    reception: Reception
    counters: ApiCounters
    clock: Clock
    admit: Callable[[EngineSession], None]  # raises when there are too many
    leave: Callable[[EngineSession], None]
    hello_timeout_s: float = HELLO_TIMEOUT_S
    frame_timeout_s: float = FRAME_TIMEOUT_S
    grace_s: float = GRACE_S


class EngineSession(asyncio.Protocol):
    """The daemon's end of one connection. What the engine begins and pins belongs to it, and ends with it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._peer = "an engine"
        self._parser = FrameParser(self._peer)
        self._engine: EngineRequests | None = None  # set by the greeting
        self._version = 0
        self._cut_off = False  # by this side, without the client's doing
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._fetching: set[asyncio.Task[None]] = set()

    # --- the connection's life ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has accepted a connection."""
        self._transport = cast(asyncio.Transport, transport)
        # A descriptor of our own: to pass memfds, and to end the connection for the other side at a defined
        # moment, namely before what it had pinned can be given to others.
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._peer = self._parser.peer = f"engine[{peer_pid(self._socket)}]"
        self._start_timer(self._hub.hello_timeout_s, "a greeting from")
        try:
            self._hub.admit(self)
        except MooncakeError as error:
            self._refuse(0, error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, whoever ended it."""
        self._ended = True
        self._stop_timer()
        for task in self._fetching:
            task.cancel()
        with suppress(OSError):  # the other side may have gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._engine is not None and self._cut_off:
            # The client may be copying just now: nobody else may get its memory until it has noticed.
            self._loop.call_later(self._hub.grace_s, self._engine.end)
        elif self._engine is not None:
            self._engine.end()
        self._hub.leave(self)
        log.debug("engine left peer=%s cause=%s", self._peer, exc or "closed")

    def end(self) -> None:
        """End the connection because the daemon stops."""
        self._transport.close()

    def _start_timer(self, seconds: float, awaited: str) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._too_slow, seconds, awaited)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self, seconds: float, awaited: str) -> None:
        error = DeadlineExceeded(
            operation=f"receiving {awaited} {self._peer}", limit_ms=round(seconds * 1000)
        )
        self._refuse(0, error)
        self._transport.abort()  # without this, a client that reads nothing would be waited for

    def _refuse(self, request_id: int, error: MooncakeError) -> None:
        """Say why, and end the connection."""
        self._hub.reception.refused(error, self._peer)
        self._cut_off = self._ended = True
        self._transport.write(encode_error(request_id, error))
        self._transport.close()

    def pause_writing(self) -> None:
        """The client does not take its replies: take no more requests, and wait for so long only."""
        self._transport.pause_reading()
        self._start_timer(READ_TIMEOUT_S, "room for replies to")

    def resume_writing(self) -> None:
        """The client takes its replies again."""
        self._stop_timer()
        if not self._ended:
            self._transport.resume_reading()

    # --- frames ------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Answer each frame that is complete."""
        request_id = 0
        try:
            for head, body in self._parser.feed(data):
                request_id = head.request_id
                if self._ended:
                    return
                self._receive(head, body)
        except MooncakeError as error:
            self._refuse(request_id, error)
            return
        if self._engine is not None:
            self._watch_rest()

    def _watch_rest(self) -> None:
        """Give a frame that has begun to arrive a limited time; the others began a new one."""
        if not self._parser.partial:
            if self._timer is not None:
                self._stop_timer()
        elif self._timer is None:
            self._start_timer(self._hub.frame_timeout_s, "the rest of a frame from")

    def _receive(self, head: FrameHead, body: bytes) -> None:
        if self._engine is None:
            self._greet(head, body)
            return
        if head.version != self._version:
            problem = f"a frame of version {head.version} on a connection of version {self._version}"
            raise ProtocolError(peer=self._peer, problem=problem)
        request = decode_request(head, body, self._peer)
        try:
            self._answer(self._engine, head, request)
        except (ProtocolError, IntegrityError):
            raise
        except MooncakeError as error:
            self._transport.write(encode_error(head.request_id, error, version=self._version))

    def _answer(self, engine: EngineRequests, head: FrameHead, request: Struct) -> None:
        reply = engine.answer(head.kind, request)
        self._hub.counters.requests[head.kind].inc()
        if isinstance(request, Pin) and isinstance(reply, PinReply) and self._may_fetch(request, reply):
            task = self._loop.create_task(self._fetch(engine, head, request, reply))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        elif reply is not None:
            self._reply(head, reply)

    def _reply(self, head: FrameHead, reply: Struct) -> None:
        frame = encode_frame(head.kind, head.request_id, reply, reply=True, version=self._version)
        self._transport.write(frame)

    # --- the greeting ------------------------------------------------------------------------------

    def _greet(self, head: FrameHead, body: bytes) -> None:
        reception = self._hub.reception
        hello, self._version = reception.greet(head, body, self._peer)
        self._stop_timer()
        self._peer = self._parser.peer = f"{hello.name}/{self._peer}"
        self._engine = EngineRequests(self._hub.store, self._peer)
        regions = self._hub.regions
        reply = HelloReply(
            version=self._version,
            node_id=reception.node_id,
            epoch=reception.epoch,
            regions=[region.info for region in regions],
        )
        frame = encode_frame(Kind.HELLO, head.request_id, reply, reply=True, version=self._version)
        self._send_with_fds(frame, [region.fd for region in regions])
        log.debug("engine connected peer=%s version=%d", self._peer, self._version)

    def _send_with_fds(self, frame: bytes, fds: list[int]) -> None:
        """Send past the transport, which cannot pass descriptors; its buffer is empty at the first reply."""
        try:
            sent = socket.send_fds(self._socket, [frame], fds)
        except OSError as error:
            raise ProtocolError(peer=self._peer, problem=f"it does not take the greeting: {error}") from error
        if sent < len(frame):
            self._transport.write(frame[sent:])

    # --- fetches -----------------------------------------------------------------------------------

    def _may_fetch(self, request: Pin, reply: PinReply) -> bool:
        return (
            (bool(request.sources) or request.locate)
            and None in reply.blocks
            and request.deadline_ms > 0
            and self._hub.fetcher is not None
            and len(self._fetching) < FETCHES_MAX
        )

    async def _fetch(self, engine: EngineRequests, head: FrameHead, request: Pin, first: PinReply) -> None:
        """Fetch what is missing, then answer; later requests of the connection do not wait for this."""
        fetcher = cast(Fetches, self._hub.fetcher)
        missing = [key for key, block in zip(request.keys, first.blocks, strict=True) if block is None]
        deadline = Deadline(self._hub.clock, min(request.deadline_ms / 1000, FETCH_SECONDS_MAX))
        try:
            sources = await fetcher.fetch(
                request.namespace, missing, request.sources, request.locate, deadline
            )
            if not self._ended:  # else its owner has ended, or is about to
                self._reply(head, engine.pin_fetched(request, first, sources))
        except MooncakeError as error:
            if not self._ended:
                engine.unpin_reply(first)
                self._transport.write(encode_error(head.request_id, error, version=self._version))
