"""One blocking connection to the node's daemon: the greeting, the mapping that comes with it, exchanges."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from mooncaked.api import shm
from mooncaked.api.frames import FrameSocket
from mooncaked.api.protocol import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    HelloReply,
    Kind,
    Open,
    OpenReply,
    Side,
    Struct,
    decode_reply,
    encode_frame,
)
from mooncaked.client.direct import Direct
from mooncaked.client.mapping import Mapping
from mooncaked.client.shared import Page
from mooncaked.clock import Clock
from mooncaked.errors import ConnectionLost, MooncakeError, ProtocolError, Unreachable

FDS_MAX = 250  # what Linux passes at once, about; of regions, index, page and posted words
M = TypeVar("M", bound=Struct)


def engine_hello(token: str | None) -> Hello:
    """How this process greets a daemon."""
    name = f"{Path(sys.argv[0]).name if sys.argv else 'python'}[{os.getpid()}]"
    return Hello(
        version_min=VERSION_MIN,
        version_max=VERSION_MAX,
        side=Side.ENGINE,
        name=name,
        token=token,
        direct=shm.ORDERED,
    )


class Greeting:
    """A connected socket, the daemon's greeting, and descriptors of its memory until `map` or `close`."""

    def __init__(self, path: str, token: str | None, timeout_s: float, clock: Clock) -> None:
        """Connect and greet; raises `Unreachable` when nobody listens, or the daemon's refusal."""
        self.fds: list[int] = []
        self.page: Page | None = None  # set by `map`
        self._again = (path, token, timeout_s, clock)
        self.frames = FrameSocket(_connect(path, timeout_s), f"mooncaked at {path}", clock)
        try:
            self.hello = self._greet(token, timeout_s)
        except BaseException:
            self.close()
            raise

    def _greet(self, token: str | None, timeout_s: float) -> HelloReply:
        with suppress(ConnectionLost):  # refused unread: the daemon's reason can still be received
            self.frames.send([encode_frame(Kind.HELLO, 0, engine_hello(token))], timeout_s)
        self.fds = self.frames.receive_fds(FDS_MAX, timeout_s)
        received = self.frames.receive(timeout_s)
        if received is None:
            raise ConnectionLost(
                what=self.frames.peer, operation="the greeting", cause="the daemon closed it"
            )
        return decode_reply(*received, HelloReply, self.frames.peer)

    def map(self, known: Mapping | None) -> Mapping:
        """The daemon's memory: `known`, brought up to date, if it is of the same life of the daemon, else a
        new mapping. And `page`, if there is one."""
        try:
            direct = self.hello.direct
            if known is not None and known.epoch == self.hello.epoch:
                known.update(self.hello, self.fds)
            else:
                known = Mapping(self.hello, self.fds, self._renew)
            if direct is not None:
                self.page = Page(self.fds[len(self.hello.regions) + 1], direct.page_bytes, direct.slot)
            return known
        finally:
            self.close_fds()

    def _renew(self, mapping: Mapping) -> None:
        """Bring a mapping up to date by greeting the daemon once more."""
        again = Greeting(*self._again)
        try:
            if again.hello.epoch == mapping.epoch:
                mapping.update(again.hello, again.fds)
        finally:
            again.close()

    def close_fds(self) -> None:
        """Close the descriptors; a mapping made from them stays."""
        while self.fds:
            os.close(self.fds.pop())

    def close(self) -> None:
        """Close everything."""
        self.close_fds()
        self.frames.close()


def _connect(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(timeout_s)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        remedy = "Is mooncaked running on this node, with [listen] client_socket at this path?"
        cause = error.strerror or str(error)
        raise Unreachable(what="mooncaked", address=path, cause=cause, remedy=remedy) from error
    return sock


class Connection:
    """A greeted connection. One thread at a time calls; any thread may post."""

    def __init__(self, greeting: Greeting, mapping: Mapping) -> None:
        self._frames = greeting.frames
        self.page = greeting.page
        self.direct: Direct | None = None  # set by `open_direct`
        self.hello = greeting.hello
        self.mapping = mapping
        self.fresh = True  # has answered nothing yet, so its loss says that the daemon is not well
        self.broken = False  # out of step with the daemon: close it
        self._next_id = 1
        self._sending = threading.Lock()

    def open_direct(self, namespace: str, timeout_s: float) -> None:
        """Make `direct`, if the daemon shares its index."""
        shared = self.mapping.shared
        if shared is None or self.page is None:
            return
        if not shared.knows(namespace):
            reply = self.call(Kind.OPEN, Open(namespace=namespace), OpenReply, timeout_s)
            shared.learn(namespace, (reply.seed1, reply.seed2))
            self.fresh = True
        self.direct = Direct(self.mapping, shared, self.page, namespace, self._frames.sock.fileno())

    def call(self, kind: Kind, body: Struct, reply: type[M], timeout_s: float) -> M:
        """Send a request and return its reply; raises the daemon's error, or that of the connection."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFFFFFF + 1
        self._send(encode_frame(kind, request_id, body, version=self.hello.version), timeout_s)
        return self._receive(request_id, reply, timeout_s)

    def _receive(self, request_id: int, reply: type[M], timeout_s: float) -> M:
        in_step = False
        try:
            received = self._frames.receive(timeout_s)
            if received is None:
                raise ConnectionLost(
                    what=self._frames.peer, operation="a request", cause="the daemon closed it"
                )
            head, data = received
            if head.kind is Kind.ERROR and head.request_id == 0:  # why the daemon ends this connection
                return decode_reply(head, data, reply, self._frames.peer)
            if head.request_id != request_id or head.payload_len:
                problem = f"reply {head.request_id} came where {request_id} was due"
                raise ProtocolError(peer=self._frames.peer, problem=problem)
            in_step = True
            self.fresh = False
            return decode_reply(head, data, reply, self._frames.peer)
        finally:
            # Also when a signal ends the wait: the late reply must never be taken for another request's.
            self.broken |= not in_step

    def post(self, kind: Kind, body: Struct, timeout_s: float) -> None:
        """Send a frame that gets no reply; raises `ConnectionLost` when the connection has ended."""
        self._send(encode_frame(kind, 0, body, version=self.hello.version), timeout_s)

    def send(self, kind: Kind, body: Struct, payload: Sequence[memoryview], timeout_s: float) -> None:
        """Send a frame with a payload, that gets no reply; raises as `post` does."""
        size = sum(map(len, payload))
        frame = encode_frame(kind, 0, body, payload_len=size, version=self.hello.version)
        self._send(frame, timeout_s, payload)

    def undo(self, kind: Kind, body: Struct, reply: type[Struct] | None, timeout_s: float) -> None:
        """Send what gives back something held; if that fails, end the connection to the same effect."""
        try:
            if reply is None:
                self.post(kind, body, timeout_s)
            else:
                self.call(kind, body, reply, timeout_s)
        except MooncakeError:
            self.broken = True

    def _send(self, frame: bytes, timeout_s: float, payload: Sequence[memoryview] = ()) -> None:
        sent = False
        try:
            with self._sending:
                if self.broken:
                    raise ConnectionLost(what=self._frames.peer, operation="a send", cause="it broke before")
                self._frames.send([frame, *payload], timeout_s)
            sent = True
        finally:
            self.broken |= not sent

    def close(self) -> None:
        """Close the socket: the daemon then takes back all that this connection holds."""
        self.broken = True
        if self.direct is not None:
            self.direct.end()
        self._frames.close()
