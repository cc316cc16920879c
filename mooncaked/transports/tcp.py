"""Blocks over TCP: pooled blocking connections, received straight into the pool."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from mooncaked.api.frames import FrameSocket
from mooncaked.api.protocol import (
    VERSION_MAX,
    VERSION_MIN,
    Fetch,
    FetchReply,
    FrameHead,
    Hello,
    HelloReply,
    Kind,
    Side,
    decode_reply,
    encode_frame,
)
from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.errors import ConnectionLost, DeadlineExceeded, MooncakeError, ProtocolError, Unreachable
from mooncaked.keys import show_key
from mooncaked.transports.base import Outcome, Place
from mooncaked.transports.breaker import Breaker
from mooncaked.transports.landing import Landing
from mooncaked.units import split_address

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8  # to one peer
PEERS_MAX = 4096
CONNECT_S = 1.0  # for the connection and the greeting: a peer on the same network answers in far less
_FAIR_S = 0.5  # a fetch that had less time than this and was late says nothing about the peer


class _Line:
    """A greeted connection to a peer."""

    def __init__(self, frames: FrameSocket, version: int) -> None:
        self.frames = frames
        self.version = version
        self.fresh = True  # has carried nothing yet
        self._next_id = 1

    def ask(self, namespace: str, keys: Sequence[bytes], deadline: Deadline) -> tuple[FrameHead, FetchReply]:
        """Send a fetch and receive the header of its reply; the payload is still to come."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        body = Fetch(namespace=namespace, keys=list(keys))
        frame = encode_frame(Kind.FETCH, request_id, body, version=self.version)
        self.frames.send([frame], deadline.left())
        received = self.frames.receive(deadline.left())
        if received is None:
            raise ConnectionLost(what=self.frames.peer, operation="a fetch", cause="it closed the connection")
        head, data = received
        reply = decode_reply(head, data, FetchReply, self.frames.peer)
        if head.request_id != request_id:
            problem = f"reply {head.request_id} came where {request_id} was due"
            raise ProtocolError(peer=self.frames.peer, problem=problem)
        self.fresh = False
        return head, reply


class _Peer:
    """The connections to one peer, and whether it works. Its lock guards all of it."""

    def __init__(self, address: str, clock: Clock, rng: random.Random) -> None:
        self.address = address
        self.changed = threading.Condition()
        self.breaker = Breaker(clock, rng)
        self.idle: list[_Line] = []
        self.busy: set[_Line] = set()
        self.reserved = 0  # connections being made


class TcpTransport:
    """Fetches over TCP. Up to `CONNECTIONS_MAX` connections per peer, kept open between fetches.

    A peer that failed is left alone for a while by its breaker, so that it costs the others no time."""

    def __init__(
        self,
        node_id: str,
        token: str | None = None,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        self._hello = Hello(
            version_min=VERSION_MIN,
            version_max=VERSION_MAX,
            side=Side.PEER,
            name=f"mooncaked[{os.getpid()}]",
            node_id=node_id,
            token=token,
        )
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}  # by address, the one used last at the end
        self._closed = False

    def fetch(
        self, address: str, namespace: str, keys: Sequence[bytes], place: Place, deadline: Deadline
    ) -> Outcome:
        """See `Transport.fetch`."""
        if deadline.passed():
            return Outcome([], _late(f"a fetch from {address}", deadline))
        peer = self._peer(address)
        with peer.changed:
            if not peer.breaker.allow():
                breaker = peer.breaker
                cause = f"it failed {breaker.failures} times; the next try is in {breaker.wait_s():.1f} s"
                return Outcome([], _unreachable(address, cause))
        budget_s = deadline.left()
        decided = False
        try:
            outcome = self._fetch(peer, namespace, keys, place, deadline)
            self._judge(peer, outcome.error, budget_s)
            decided = True
            return outcome
        finally:
            if not decided:  # `place` raised
                with peer.changed:
                    peer.breaker.undecided()

    def _fetch(
        self, peer: _Peer, namespace: str, keys: Sequence[bytes], place: Place, deadline: Deadline
    ) -> Outcome:
        line: _Line | None = None
        try:
            line = self._take(peer, deadline)
            try:
                head, reply = line.ask(namespace, keys, deadline)
            except ConnectionLost:
                if line.fresh:
                    raise
                # The peer ended the idle connection, e.g. because it was restarted: a new one will tell.
                line = self._renew(peer, line, deadline)
                head, reply = line.ask(namespace, keys, deadline)
            outcome = _receive(line.frames, head, reply, keys, place, deadline)
        except MooncakeError as error:
            if line is not None:
                self._drop(peer, line)
            return Outcome([], error)
        except BaseException:
            if line is not None:
                self._drop(peer, line)
            raise
        if outcome.error is None:
            self._give_back(peer, line)
        else:
            self._drop(peer, line)
        return outcome

    def _judge(self, peer: _Peer, error: MooncakeError | None, budget_s: float) -> None:
        """Tell the breaker what an attempt says about the peer."""
        with peer.changed:
            if error is None:
                peer.breaker.succeeded()
            elif isinstance(error, DeadlineExceeded) and budget_s < _FAIR_S:
                peer.breaker.undecided()
            elif peer.breaker.failed():
                log.info("peer does not answer fetches peer=%s cause=%s", peer.address, error)

    # --- connections -------------------------------------------------------------------------------

    def _peer(self, address: str) -> _Peer:
        with self._lock:
            peer = self._peers.pop(address, None) or _Peer(address, self._clock, self._rng)
            self._peers[address] = peer
            if len(self._peers) <= PEERS_MAX:
                return peer
            oldest = self._peers.pop(next(iter(self._peers)))
        with oldest.changed:
            for line in oldest.idle:
                line.frames.close()
        return peer

    def _take(self, peer: _Peer, deadline: Deadline) -> _Line:
        with peer.changed:
            while True:
                if self._closed:
                    raise _unreachable(peer.address, "this node is closing")
                if peer.idle:
                    line = peer.idle.pop()
                    peer.busy.add(line)
                    return line
                if len(peer.busy) + peer.reserved < CONNECTIONS_MAX:
                    peer.reserved += 1
                    break
                if not peer.changed.wait(deadline.left()):
                    raise _late(f"waiting for a free connection to {peer.address}", deadline)
        return self._make(peer, deadline)

    def _make(self, peer: _Peer, deadline: Deadline) -> _Line:
        """Connect, for the connection that was reserved."""
        line: _Line | None = None
        try:
            line = self._connect(peer.address, min(self._connect_s, deadline.left()))
        finally:
            with peer.changed:
                peer.reserved -= 1
                if line is not None:
                    peer.busy.add(line)
                peer.changed.notify()
        if self._closed:  # after the line is among the busy ones, so that `close` or this sees it
            self._drop(peer, line)
            raise _unreachable(peer.address, "this node is closing")
        return line

    def _renew(self, peer: _Peer, line: _Line, deadline: Deadline) -> _Line:
        """A new connection for one that turned out to be dead, as all idle ones then are."""
        with peer.changed:
            peer.busy.discard(line)
            stale, peer.idle = [line, *peer.idle], []
            peer.reserved += 1
        for old in stale:
            old.frames.close()
        return self._make(peer, deadline)

    def _connect(self, address: str, timeout_s: float) -> _Line:
        deadline = Deadline(self._clock, timeout_s)
        try:
            sock = socket.create_connection(split_address(address), max(0.001, timeout_s))
        except (OSError, ValueError) as error:
            raise _unreachable(address, getattr(error, "strerror", None) or str(error)) from error
        frames = FrameSocket(sock, f"node at {address}", self._clock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(ConnectionLost):  # refused unread: the peer's reason can still be received
                frames.send([encode_frame(Kind.HELLO, 0, self._hello)], deadline.left())
            received = frames.receive(deadline.left())
            if received is None:
                raise ConnectionLost(what=frames.peer, operation="the greeting", cause="it closed")
            hello = decode_reply(*received, HelloReply, frames.peer)
        except BaseException:
            frames.close()
            raise
        log.debug("connected peer=%s node=%s version=%d", address, hello.node_id, hello.version)
        return _Line(frames, hello.version)

    def _give_back(self, peer: _Peer, line: _Line) -> None:
        with peer.changed:
            peer.busy.discard(line)
            if self._closed:
                line.frames.close()
            else:
                peer.idle.append(line)
            peer.changed.notify()

    def _drop(self, peer: _Peer, line: _Line) -> None:
        with peer.changed:
            peer.busy.discard(line)
            line.frames.close()
            peer.changed.notify()

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            with peer.changed:
                for line in peer.idle:
                    line.frames.close()
                for line in peer.busy:
                    line.frames.shutdown()  # its thread wakes, and closes it
                peer.idle.clear()
                peer.changed.notify_all()


def _receive(
    frames: FrameSocket,
    head: FrameHead,
    reply: FetchReply,
    keys: Sequence[bytes],
    place: Place,
    deadline: Deadline,
) -> Outcome:
    blocks = reply.blocks
    sizes = [block.size for block in blocks if block is not None]
    if not 0 < len(blocks) <= len(keys) or min(sizes, default=0) < 0 or sum(sizes) != head.payload_len:
        problem = f"{len(blocks)} blocks of {sum(sizes)} bytes answer {len(keys)} keys"
        raise ProtocolError(peer=frames.peer, problem=f"{problem}, and {head.payload_len} bytes follow")
    landing = Landing(blocks, place(blocks), frames.peer)
    outcome = landing.receive(frames, deadline)
    for index in landing.damaged:
        key = show_key(keys[index])
        log.warning("block arrived damaged and counts as a miss key=%s source=%s", key, frames.peer)
    return outcome


def _late(operation: str, deadline: Deadline) -> DeadlineExceeded:
    return DeadlineExceeded(operation=operation, limit_ms=round(deadline.limit_s * 1000))


def _unreachable(address: str, cause: str) -> Unreachable:
    remedy = "Its blocks count as misses meanwhile; see `mooncakectl node list`."
    return Unreachable(what="the node", address=address, cause=cause, remedy=remedy)
