"""One engine's connection to the daemon, on the event loop: frames in, frames out.

The bytes of values move through shared memory. Only a client that may not write there sends them here; they
are received right into their place in the pool, as much at a time as the socket holds, so that others get
their turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import msgspec

from mooncaked.api.counters import ApiCounters
from mooncaked.api.engine import EngineRequests, lacks
from mooncaked.api.frames import FrameParser
from mooncaked.api.listen import peer_pid
from mooncaked.api.pages import ClientPages
from mooncaked.api.protocol import (
    FrameHead,
    HelloReply,
    Kind,
    Pin,
    PinReply,
    PutData,
    Struct,
    decode_request,
    encode_error,
    encode_frame,
)
from mooncaked.api.service import FRAME_TIMEOUT_S, HELLO_TIMEOUT_S, Reception
from mooncaked.api.sharing import SharedRegion, Sharing
from mooncaked.clock import Clock, Deadline
from mooncaked.errors import DeadlineExceeded, IntegrityError, MooncakeError, ProtocolError
from mooncaked.store import Store
from mooncaked.tiers.gpus import Gpus

log = logging.getLogger(__name__)

FETCHES_MAX = 256  # pins of one connection that wait for other nodes; a further one finds only what is here
FETCH_SECONDS_MAX = 600.0
READ_TIMEOUT_S = 30.0  # for a client to take replies off its socket
GRACE_S = 5.0  # for a client that was cut off in the middle of copying to notice
RESERVED_S = 10.0  # without use, after which room that a client has reserved is taken back
_PAYLOADS = frozenset({Kind.PUT_DATA})


class Fetches(Protocol):
    """Brings blocks of other nodes into the store."""

    async def fetch(
        self, namespace: str, keys: Sequence[bytes], sources: Sequence[str], locate: bool, deadline: Deadline
    ) -> dict[bytes, str]:
        """Fetch what can be had by the deadline; the node that each key came from. A failure is a miss."""


class Hub(msgspec.Struct, frozen=True, kw_only=True):
    """What all sessions of a server share."""

    store: Store
    fetcher: Fetches | None
    regions: Callable[[], Sequence[SharedRegion]]  # as they are now
    pages: ClientPages | None  # for clients that read through shared memory
    writable: bool  # whether clients may write into the regions
    buffer: memoryview  # what a session receives into; each has done with it when it returns to the loop
    reception: Reception
    counters: ApiCounters
    clock: Clock
    admit: Callable[[EngineSession], None]  # raises when there are too many
    leave: Callable[[EngineSession], None]
    gpus: Gpus | None = None
    hello_timeout_s: float = HELLO_TIMEOUT_S
    frame_timeout_s: float = FRAME_TIMEOUT_S
    grace_s: float = GRACE_S
    reserved_s: float = RESERVED_S


class EngineSession(asyncio.BufferedProtocol):
    """The daemon's end of one connection. What the engine begins and pins belongs to it, and ends with it."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._loop = asyncio.get_running_loop()
        self._peer = "an engine"
        self._parser = FrameParser(self._peer, _PAYLOADS)
        self._payload: memoryview | None = None  # the rest of a place that is being received into
        self._sharing: Sharing | None = None  # with a client that reads through shared memory
        self._engine: EngineRequests | None = None  # set by the greeting
        self._version = 0
        self._cut_off = False  # by this side, without the client's doing
        self._ended = False
        self._paused = False  # waits for the client to take replies
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
        if self._sharing is not None:
            self._sharing.ended()
        if self._cut_off:
            # The client may be copying just now: nobody else may get its memory until it has noticed.
            self._loop.call_later(self._hub.grace_s, self._let_go)
        else:
            self._let_go()
        self._hub.leave(self)
        log.debug("engine left peer=%s cause=%s", self._peer, exc or "closed")

    def _let_go(self) -> None:
        if self._engine is not None:
            self._engine.end()
        if self._sharing is not None:
            self._sharing.let_go()

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
        self._paused = True
        self._start_timer(READ_TIMEOUT_S, "room for replies to")

    def resume_writing(self) -> None:
        """The client takes its replies again."""
        self._paused = False
        self._stop_timer()
        if not self._ended:
            self._transport.resume_reading()

    # --- frames ------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop is to put what it receives next."""
        return self._hub.buffer if self._payload is None else self._payload

    def buffer_updated(self, nbytes: int) -> None:
        """Answer each frame that is complete."""
        if self._payload is None:
            self._feed(bytes(self._hub.buffer[:nbytes]))
            return
        self._payload = self._payload[nbytes:] if nbytes < len(self._payload) else None
        self._stop_timer()
        self._feed(b"")

    def _feed(self, data: bytes) -> None:
        request_id, frames = 0, 0
        try:
            more = True
            while more:
                for head, body in self._parser.feed(data):
                    request_id = head.request_id
                    frames += 1
                    if self._ended:
                        return
                    self._receive(head, body)
                data, more = b"", self._take_payload()
        except MooncakeError as error:
            self._refuse(request_id, error)
            return
        if self._engine is not None and not self._paused:
            self._watch_rest(new=frames > 0)

    def _take_payload(self) -> bool:
        """Put what has come of a payload with its frame in place; whether it is all there."""
        if self._payload is None:
            return False
        taken = self._parser.take(len(self._payload))
        self._payload[: len(taken)] = taken
        self._payload = self._payload[len(taken) :] if len(taken) < len(self._payload) else None
        return self._payload is None

    def _watch_rest(self, *, new: bool) -> None:
        """Give a frame that has begun to arrive a limited time, `new` if it began only now."""
        if new and self._timer is not None:
            self._stop_timer()
        if not self._parser.partial and self._payload is None:
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
            if isinstance(request, PutData):
                place = self._engine.place(request, head.payload_len)
                self._payload = place if len(place) else None
            elif head.kind is Kind.PUT_STORED:
                self._store_posted(self._engine, request)
            else:
                self._answer(self._engine, head, request)
        except (ProtocolError, IntegrityError):
            raise
        except MooncakeError as error:
            self._transport.write(encode_error(head.request_id, error, version=self._version))

    def _answer(self, engine: EngineRequests, head: FrameHead, request: Struct) -> None:
        pages = self._hub.pages
        if head.kind is Kind.REMOVE and pages is not None and pages.behind():
            self._spawn(self._remove_later(engine, head, request, pages))
            return
        reply = engine.answer(head.kind, request)
        self._hub.counters.requests[head.kind].inc()
        if pages is not None and lacks(request, reply) and pages.behind():
            self._spawn(self._look_again(engine, head, request, reply, pages))
        elif isinstance(request, Pin) and isinstance(reply, PinReply) and self._may_fetch(request, reply):
            self._spawn(self._fetch(engine, head, request, reply))
        else:
            if head.kind is Kind.RESERVE and self._sharing is not None:
                self._sharing.reserved(engine)
            self._reply(head, reply)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)

    def _reply(self, head: FrameHead, reply: Struct | None) -> None:
        if reply is None:
            return
        frame = encode_frame(head.kind, head.request_id, reply, reply=True, version=self._version)
        self._transport.write(frame)

    # --- what others have posted --------------------------------------------------------------------

    async def _look_again(
        self,
        engine: EngineRequests,
        head: FrameHead,
        request: Struct,
        first: Struct | None,
        pages: ClientPages,
    ) -> None:
        """Answer with what is here once all is read that others had posted before they were told of it."""
        await pages.caught_up(self._hub.clock)
        if self._ended:
            return
        try:
            if not isinstance(request, Pin) or not isinstance(first, PinReply):
                self._reply(head, engine.answer(head.kind, request))
                return
            reply = engine.pin_fetched(request, first, {})
            if self._may_fetch(request, reply):
                await self._fetch(engine, head, request, reply)
            else:
                self._reply(head, reply)
        except MooncakeError as error:
            self._transport.write(encode_error(head.request_id, error, version=self._version))

    async def _remove_later(
        self, engine: EngineRequests, head: FrameHead, request: Struct, pages: ClientPages
    ) -> None:
        await pages.caught_up(self._hub.clock)
        if not self._ended:
            await self._look_again(engine, head, request, None, pages)

    def _store_posted(self, engine: EngineRequests, request: Struct) -> None:
        self._hub.counters.requests[Kind.PUT_STORED].inc()
        try:
            engine.answer(Kind.PUT_STORED, request)
        finally:
            if self._sharing is not None:
                self._sharing.posted()

    # --- the greeting ------------------------------------------------------------------------------

    def _greet(self, head: FrameHead, body: bytes) -> None:
        hub, reception = self._hub, self._hub.reception
        hello, self._version = reception.greet(head, body, self._peer)
        self._stop_timer()
        self._peer = self._parser.peer = f"{hello.name}/{self._peer}"
        index = None
        if hello.direct and hub.pages is not None:
            self._sharing = Sharing(hub.pages, writable=hub.writable, reserved_s=hub.reserved_s)
            index = hub.pages.index
        self._engine = EngineRequests(hub.store, self._peer, index, hub.gpus)
        self._send_greeting(head)
        log.debug("engine connected peer=%s version=%d", self._peer, self._version)

    def _send_greeting(self, head: FrameHead) -> None:
        hub, reception, sharing = self._hub, self._hub.reception, self._sharing
        regions = hub.regions()
        reply = HelloReply(
            version=self._version,
            node_id=reception.node_id,
            epoch=reception.epoch,
            regions=[region.info for region in regions],
            writable=hub.writable,
            direct=None if sharing is None else sharing.describe(),
            gpus=[] if hub.gpus is None else hub.gpus.regions,
        )
        frame = encode_frame(Kind.HELLO, head.request_id, reply, reply=True, version=self._version)
        own = [] if hub.writable else [region.read_only_fd() for region in regions]
        try:
            fds = own or [region.fd for region in regions]
            self._send_with_fds(frame, fds if sharing is None else [*fds, *sharing.fds()])
        finally:
            for fd in own:
                os.close(fd)
            if sharing is not None:
                sharing.sent()

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
        missing = [key for key, block in zip(request.keys, reply.blocks, strict=True) if block is None]
        return (
            bool(missing)
            and request.deadline_ms > 0
            and self._hub.fetcher is not None
            and len(self._fetching) < FETCHES_MAX
            and (
                bool(request.sources)
                or request.locate
                or any(self._hub.store.below(request.namespace, missing))
            )
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
