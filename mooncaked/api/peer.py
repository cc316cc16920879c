"""The TCP listener for nodes and conductors: a thread per connection, bytes straight from the pool."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from mooncaked.api.counters import ApiCounters
from mooncaked.api.feed import Feed
from mooncaked.api.frames import FrameSocket
from mooncaked.api.listen import bind_tcp, bound_address
from mooncaked.api.orders import Expect, FetchBlocking, Orders
from mooncaked.api.protocol import (
    FETCH_BYTES_TARGET,
    PAYLOAD_BYTES_MAX,
    Exists,
    Fetch,
    FetchedBlock,
    FetchReply,
    FrameHead,
    HelloReply,
    Kind,
    Order,
    PinnedBlock,
    PrefixMatch,
    Struct,
    Subscribe,
    decode_request,
    encode_error,
    encode_frame,
)
from mooncaked.api.service import (
    FRAME_TIMEOUT_S,
    HELLO_TIMEOUT_S,
    Reception,
    answer_exists,
    answer_prefix_match,
    check_keys,
)
from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.errors import ConnectionLost, DeadlineExceeded, MooncakeError, ProtocolError, Refused
from mooncaked.store import Store
from mooncaked.units import join_address

log = logging.getLogger(__name__)

BringUp = Callable[[str, Sequence[bytes], Deadline], object]

CONNECTIONS_MAX = 256  # each has a thread
IDLE_S = 300.0  # a connection that asks nothing for so long is closed; its other side makes a new one
_SEND_S = 10.0  # for a reply, and more for its payload:
_SLOWEST_BYTES_PER_S = 4 << 20
_PIN_KEYS = 64  # pinned at a time, until a reply is full
_CLOSE_S = 3.0
_RAISE_S = 5.0  # for blocks that are asked for and do not lie in memory; then they are misses
KEY = "listen.peer"


class PeerServer:
    """Serves fetches, questions, subscriptions and orders.

    What it sends is pinned while it is sent. A peer that sends rubbish, is too slow, or goes away loses its
    connection, and nobody else notices."""

    def __init__(
        self,
        store: Store,
        *,
        node_id: str,
        address: str,
        token: str | None = None,
        fetch: FetchBlocking | None = None,
        bring_up: BringUp | None = None,
        expect: Expect | None = None,
        counters: ApiCounters | None = None,
        clock: Clock | None = None,
        connections_max: int = CONNECTIONS_MAX,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """`address` is "host:port" to listen at, port 0 for any. `fetch` executes fetch orders and blocks.
        `bring_up` brings into memory what a peer asks for and lies elsewhere on this node, and blocks;
        `expect` has that done later, and does not wait."""
        self.store = store
        self.clock = clock or SystemClock()
        self.counters = counters or ApiCounters()
        self.reception = Reception(node_id, store.epoch, token, self.counters, self.clock)
        self.orders = Orders(store, fetch, self.clock, expect)
        self.bring_up = bring_up
        self.expect = expect
        self.frame_timeout_s = frame_timeout_s
        self.idle_s = idle_s
        self._address = address
        self._connections_max = connections_max
        self._connected = self.counters.connections.labels("peer")
        self._lock = threading.Lock()
        self._links: dict[_Link, threading.Thread] = {}
        self._listener: socket.socket | None = None
        self.closing = threading.Event()

    def start(self) -> str:
        """Listen; returns the address with the port that it has. Raises `AddressInUse` or `ConfigError`."""
        self._listener = bind_tcp(self._address, KEY)
        address = bound_address(self._listener)
        threading.Thread(target=self._accept, args=[self._listener], name="peer-accept", daemon=True).start()
        log.info("serving peers address=%s", address)
        return address

    def close(self) -> None:
        """Stop listening and end all connections; waits for their threads, but not for long."""
        self.closing.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
            self._listener.close()
        with self._lock:
            links = dict(self._links)
        for link in links:
            link.frames.shutdown()
        for thread in links.values():
            thread.join(_CLOSE_S)

    def _accept(self, listener: socket.socket) -> None:
        while not self.closing.is_set():
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self.closing.wait(0.1):
                    return
                # Out of descriptors, say: those who are connected must not suffer from it.
                log.warning("cannot accept a peer cause=%s", error)
                continue
            self._admit(_Link(self, sock, join_address(*address[:2])))

    def _admit(self, link: _Link) -> None:
        with self._lock:
            if len(self._links) < self._connections_max and self._start(link):
                return
        problem = f"{self._connections_max} peers are connected to this node already"
        link.refuse(0, Refused(problem=problem, remedy="Close connections that are not needed."))
        link.frames.close()

    def _start(self, link: _Link) -> bool:
        thread = threading.Thread(target=self._serve, args=[link], name=link.peer, daemon=True)
        self._links[link] = thread
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            log.warning("cannot serve a peer peer=%s cause=%s", link.peer, error)
            del self._links[link]
            return False
        self._connected.set(len(self._links))
        return True

    def _serve(self, link: _Link) -> None:
        try:
            link.serve()
        finally:
            with self._lock:
                self._links.pop(link, None)
                self._connected.set(len(self._links))


class _Link:
    """One connection, in a thread of its own."""

    def __init__(self, server: PeerServer, sock: socket.socket, peer: str) -> None:
        self._server = server
        self._store = server.store
        self.peer = f"peer {peer}"
        self.frames = FrameSocket(sock, self.peer, server.clock)
        self._version = 0
        self._request_id = 0
        self._owner = 0
        self._handlers: dict[Kind, Callable[[Any], None]] = {
            Kind.FETCH: self._fetch,
            Kind.SUBSCRIBE: self._subscribe,
            Kind.ORDER: self._order,
            Kind.EXISTS: self._exists,
            Kind.PREFIX_MATCH: self._prefix_match,
        }

    def serve(self) -> None:
        """Greet and answer until the connection ends, for whatever reason."""
        try:
            with suppress(OSError):  # it may be gone already; the next receive will say so
                self.frames.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.frames.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._greet():
                self._answer_all()
        except (ConnectionLost, DeadlineExceeded) as error:
            log.debug("peer gone peer=%s cause=%s", self.peer, error)
        except MooncakeError as error:
            self.refuse(self._request_id, error)
        finally:
            self.frames.close()

    def refuse(self, request_id: int, error: MooncakeError) -> None:
        """Count and log why this connection ends, and say so to the other side if it still listens."""
        self._server.reception.refused(error, self.peer)
        with suppress(ConnectionLost, DeadlineExceeded):
            self.frames.send([encode_error(request_id, error)], _SEND_S)

    def _greet(self) -> bool:
        received = self.frames.receive(HELLO_TIMEOUT_S)
        if received is None:
            return False
        head, data = received
        self._request_id = head.request_id
        reception = self._server.reception
        hello, self._version = reception.greet(head, data, self.peer)
        self.peer = self.frames.peer = (
            f"{hello.side.name.lower()} {hello.node_id or hello.name} at {self.peer}"
        )
        self._reply(
            Kind.HELLO,
            HelloReply(version=self._version, node_id=reception.node_id, epoch=reception.epoch),
        )
        log.debug("connected peer=%s version=%d", self.peer, self._version)
        return True

    def _answer_all(self) -> None:
        self._owner = self._store.new_owner()
        try:
            while received := self.frames.receive(self._server.frame_timeout_s, self._server.idle_s):
                self._answer(*received)
        finally:
            self._store.drop_owner(self._owner)

    def _answer(self, head: FrameHead, data: memoryview) -> None:
        self._request_id = head.request_id
        if head.version != self._version or head.payload_len:
            problem = f"a frame of version {head.version} with {head.payload_len} bytes of payload"
            raise ProtocolError(peer=self.peer, problem=problem)
        request = decode_request(head, data, self.peer)
        handler = self._handlers.get(head.kind)
        if handler is None:
            raise ProtocolError(peer=self.peer, problem=f"{head.kind.name} is no request of a peer")
        self._server.counters.requests[head.kind].inc()
        try:
            handler(request)
        except (ConnectionLost, DeadlineExceeded, ProtocolError):
            raise
        except MooncakeError as error:
            self.frames.send([encode_error(head.request_id, error, version=self._version)], _SEND_S)

    def _reply(self, kind: Kind, body: Struct, is_reply: bool = True) -> None:
        frame = encode_frame(kind, self._request_id, body, reply=is_reply, version=self._version)
        self.frames.send([frame], _SEND_S)

    # --- requests ----------------------------------------------------------------------------------

    def _exists(self, request: Exists) -> None:
        self._reply(Kind.EXISTS, answer_exists(self._store, request, self.peer))

    def _prefix_match(self, request: PrefixMatch) -> None:
        self._reply(Kind.PREFIX_MATCH, answer_prefix_match(self._store, request, self.peer))

    def _order(self, request: Order) -> None:
        self._reply(Kind.ORDER, self._server.orders.obey(request, self.peer))

    def _subscribe(self, request: Subscribe) -> None:
        """Feed the subscriber for good; afterwards the connection ends."""
        Feed(self._store, self._reply).run(request, self._server.closing.is_set)
        raise ConnectionLost(what=self.peer, operation="a subscription", cause="it is too far behind")

    def _fetch(self, request: Fetch) -> None:
        check_keys(request.namespace, request.keys, self.peer)
        pinned = self._pin_some(request)
        found = [block for block in pinned if block is not None]
        pins = [block.pin for block in found]
        try:
            parents = iter([info.parent for info in self._store.pinned_info(self._owner, pins)])
            reply = FetchReply(
                blocks=[None if block is None else self._describe(block, next(parents)) for block in pinned]
            )
            self._send_blocks(reply, found)
        finally:
            self._store.unpin(self._owner, pins)

    def _pin_some(self, request: Fetch) -> list[PinnedBlock | None]:
        """Pin the first of the keys, as many as one reply takes: at least one."""
        taken: list[PinnedBlock | None] = []
        total = 0
        for start in range(0, len(request.keys), _PIN_KEYS):
            keys = request.keys[start : start + _PIN_KEYS]
            self._bring_up(request, start)
            blocks = self._store.pin(self._owner, request.namespace, keys, count=False)
            for index, block in enumerate(blocks):
                size = 0 if block is None else block.size
                if total and total + size > FETCH_BYTES_TARGET:
                    self._unpin(blocks[index:])
                    return taken
                if size > PAYLOAD_BYTES_MAX:  # no frame can carry it
                    self._unpin([block])
                    block, size = None, 0
                taken.append(block)
                total += size
        return taken

    def _bring_up(self, request: Fetch, start: int) -> None:
        """Have the next keys in memory before they are pinned, and those after them soon."""
        bring_up, expect = self._server.bring_up, self._server.expect
        if bring_up is None:
            return
        if start == 0 and len(request.keys) > _PIN_KEYS and expect is not None:
            expect(request.namespace, request.keys[_PIN_KEYS:])
        keys = request.keys[start : start + _PIN_KEYS]
        bring_up(request.namespace, keys, Deadline(self._server.clock, _RAISE_S))

    def _unpin(self, blocks: Sequence[PinnedBlock | None]) -> None:
        self._store.unpin(self._owner, [block.pin for block in blocks if block is not None])

    def _send_blocks(self, reply: FetchReply, blocks: Sequence[PinnedBlock]) -> None:
        size = sum(block.size for block in blocks)
        frame = encode_frame(
            Kind.FETCH, self._request_id, reply, payload_len=size, reply=True, version=self._version
        )
        views = [self._store.view(block.region, block.offset, block.size) for block in blocks]
        self.frames.send([frame, *views], _SEND_S + size / _SLOWEST_BYTES_PER_S)
        self._server.counters.sent_bytes.inc(size)

    def _describe(self, block: PinnedBlock, parent: bytes | None) -> FetchedBlock:
        checksum = block.checksum
        if checksum is None:  # stored just now, and nobody has come to work it out
            checksum = xxhash.xxh3_64_intdigest(self._store.view(block.region, block.offset, block.size))
        return FetchedBlock(size=block.size, checksum=checksum, parent=parent, meta=block.meta)
