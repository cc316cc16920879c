"""Frames over sockets: `FrameSocket` for threads that block, `FrameParser` for whoever is handed bytes.

Both check every length against the caps of `mooncaked.api.protocol` before they allocate for it, and
both turn what can go wrong with a connection into typed errors.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

from mooncaked.api.protocol import HEADER, FrameHead, Kind, decode_head
from mooncaked.clock import Clock, Deadline
from mooncaked.errors import ConnectionLost, DeadlineExceeded, ProtocolError

RECEIVE_BYTES = (
    64 << 10
)  # one receive call of small frames; a frame's header beyond it gets a buffer of its own
PARTS_MAX = 512  # buffers in one sendmsg or recvmsg_into; the kernel takes at most 1024
_TIMEVAL = struct.Struct("ll")

Part = bytes | bytearray | memoryview


class FrameSocket:
    """A connected blocking socket that carries frames. One thread sends and one receives at a time.

    Waiting is bounded by the kernel (`SO_RCVTIMEO`, `SO_SNDTIMEO`) rather than by a poll before each call,
    which would double the system calls of a small request. After any error the connection is unusable."""

    def __init__(self, sock: socket.socket, peer: str, clock: Clock) -> None:
        self.sock = sock
        self.peer = peer
        self._clock = clock
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0  # received and not yet consumed bytes are _view[_start:_end]
        self._end = 0
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.setblocking(True)

    def close(self) -> None:
        """Close the socket; never raises."""
        self.sock.close()

    def shutdown(self) -> None:
        """Wake every thread that waits on this socket, and refuse all further bytes."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected any more: nobody waits

    def _set_timeout(self, option: int, seconds: float) -> None:
        if self._timeouts[option] == seconds:
            return
        micros = max(1, int(seconds * 1e6))  # zero would mean for ever
        self.sock.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        )
        self._timeouts[option] = seconds

    def _lost(self, operation: str, cause: object) -> ConnectionLost:
        return ConnectionLost(what=self.peer, operation=operation, cause=cause)

    def _late(self, operation: str, seconds: float) -> DeadlineExceeded:
        return DeadlineExceeded(operation=f"{operation} {self.peer}", limit_ms=round(seconds * 1000))

    # --- sending -----------------------------------------------------------------------------------

    def send(self, parts: Sequence[Part], timeout_s: float) -> None:
        """Send all of `parts` within `timeout_s`; raises `ConnectionLost` or `DeadlineExceeded`."""
        try:
            self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
            sent = self.sock.sendmsg(parts[:PARTS_MAX])
            if len(parts) > 1 or sent != len(parts[0]):
                self._send_rest(parts, sent, timeout_s)
        except BlockingIOError as error:
            raise self._late("sending to", timeout_s) from error
        except OSError as error:
            raise self._lost("a send", error) from error

    def _send_rest(self, parts: Sequence[Part], sent: int, timeout_s: float) -> None:
        deadline = Deadline(self._clock, timeout_s)
        rest = [memoryview(part) for part in parts]
        first = 0
        while True:
            first, sent = _skip(rest, first, sent)
            if first == len(rest):
                return
            if deadline.passed():
                raise self._late("sending to", timeout_s)
            self._set_timeout(socket.SO_SNDTIMEO, deadline.left())
            sent = self.sock.sendmsg(rest[first : first + PARTS_MAX])

    # --- receiving ---------------------------------------------------------------------------------

    def receive_fds(self, count_max: int, timeout_s: float) -> list[int]:
        """File descriptors that come with the first bytes of the next frame; the caller owns them.

        Raises `ConnectionLost` or `DeadlineExceeded`."""
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
            data, fds, _, _ = socket.recv_fds(self.sock, HEADER.size, count_max, flags)
        except BlockingIOError as error:
            raise self._late("a reply from", timeout_s) from error
        except OSError as error:
            raise self._lost("a receive", error) from error
        self._view[: len(data)] = data
        self._start, self._end = 0, len(data)
        return fds

    def receive(self, timeout_s: float, idle_s: float | None = None) -> tuple[FrameHead, memoryview] | None:
        """The next frame's head and msgpack header, or None when the other side closed between two frames.

        The header is valid until the next call. The payload, if any, is still to be received. A server
        passes `idle_s`: how long to wait for the first byte, after which all must be there in `timeout_s`.
        Raises `ConnectionLost`, `DeadlineExceeded` or `ProtocolError`."""
        try:
            if self._start == self._end and not self._fill(timeout_s if idle_s is None else idle_s):
                return None
            if self._end - self._start < HEADER.size:
                self._fill_to(HEADER.size, timeout_s)
            head = decode_head(self._view[self._start : self._start + HEADER.size], self.peer)
            self._start += HEADER.size
            return head, self._take(head.header_len, timeout_s)
        except BlockingIOError as error:
            raise self._late("a reply from", timeout_s) from error
        except OSError as error:
            raise self._lost("a receive", error) from error

    def _fill(self, timeout_s: float) -> int:
        """Receive once behind what is buffered; 0 at the end of the stream."""
        if self._start == self._end:
            self._start = self._end = 0
        self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
        count = self.sock.recv_into(self._view[self._end :])
        self._end += count
        return count

    def _fill_to(self, count: int, timeout_s: float) -> None:
        """Have at least `count` (at most `RECEIVE_BYTES`) bytes buffered."""
        if self._start + count > RECEIVE_BYTES:
            kept = self._end - self._start
            self._view[:kept] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, kept
        deadline = Deadline(self._clock, timeout_s)
        while self._end - self._start < count:
            if deadline.passed():
                raise self._late("a reply from", timeout_s)
            if not self._fill(deadline.left()):
                raise self._lost("a receive", "it closed in the middle of a frame")

    def _take(self, count: int, timeout_s: float) -> memoryview:
        if count > RECEIVE_BYTES:
            large = memoryview(bytearray(count))
            self.receive_into([large], timeout_s)
            return large
        if self._end - self._start < count:
            self._fill_to(count, timeout_s)
        taken = self._view[self._start : self._start + count]
        self._start += count
        return taken

    def receive_into(self, views: Sequence[memoryview], timeout_s: float) -> None:
        """Receive exactly the bytes that fill `views`, in order, straight into them.

        Raises `ConnectionLost` or `DeadlineExceeded`; the views then hold part of the bytes."""
        try:
            self._receive_into(views, timeout_s)
        except BlockingIOError as error:
            raise self._late("a payload from", timeout_s) from error
        except OSError as error:
            raise self._lost("a receive", error) from error

    def _receive_into(self, views: Sequence[memoryview], timeout_s: float) -> None:
        deadline = Deadline(self._clock, timeout_s)
        rest = list(views)
        first, got = 0, self._from_buffer(rest)
        while True:
            first, got = _skip(rest, first, got)
            if first == len(rest):
                return
            if deadline.passed():
                raise self._late("a payload from", timeout_s)
            self._set_timeout(socket.SO_RCVTIMEO, deadline.left())
            got = self.sock.recvmsg_into(rest[first : first + PARTS_MAX])[0]
            if got == 0:
                raise self._lost("a receive", "it closed in the middle of a payload")

    def _from_buffer(self, views: Sequence[memoryview]) -> int:
        """Copy what an earlier receive already took off the socket; returns how many bytes that was."""
        copied = 0
        for view in views:
            count = min(len(view), self._end - self._start)
            view[:count] = self._view[self._start : self._start + count]
            self._start += count
            copied += count
            if self._start == self._end:
                break
        return copied

    def drain(self, count: int, timeout_s: float) -> None:
        """Receive and forget `count` bytes of payload."""
        scratch = memoryview(bytearray(min(count, 1 << 20)))
        while count:
            step = min(count, len(scratch))
            self.receive_into([scratch[:step]], timeout_s)
            count -= step


def _skip(parts: list[memoryview], first: int, done: int) -> tuple[int, int]:
    """Drop `done` bytes from the front of `parts[first:]`, in place; returns the new first and 0."""
    while first < len(parts) and done >= len(parts[first]):
        done -= len(parts[first])
        first += 1
    if done:
        parts[first] = parts[first][done:]
    return first, 0


class FrameParser:
    """Cuts a stream of bytes into frames; does no I/O, so that any loop can drive it.

    Only frames of the kinds `payloads` may carry a payload. After such a frame nothing more is yielded: what
    came of the payload is to be taken with `take`, and `feed` goes on with what comes after it."""

    def __init__(self, peer: str, payloads: frozenset[Kind] = frozenset()) -> None:
        self.peer = peer
        self._payloads = payloads
        self._rest = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a frame has begun to arrive and is not complete."""
        return bool(self._rest)

    def feed(self, data: bytes) -> Iterator[tuple[FrameHead, bytes]]:
        """Yield each frame that is complete now; raises `ProtocolError` on one that breaks the rules."""
        if self._rest:
            self._rest += data
            data = bytes(self._rest) if self._complete(self._rest) else b""
            if not data:
                return
            self._rest.clear()
        start = 0
        while len(data) - start >= HEADER.size:
            head = self._head(data, start)
            end = start + HEADER.size + head.header_len
            if end > len(data):
                break
            body = data[start + HEADER.size : end]
            start = end
            if head.payload_len:
                self._rest += data[start:]
                yield head, body
                return
            yield head, body
        if start < len(data):
            self._rest += data[start:]

    def take(self, count: int) -> bytes:
        """Up to `count` bytes that came after the last frame."""
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken

    def _head(self, data: bytes | bytearray, start: int) -> FrameHead:
        head = decode_head(data[start : start + HEADER.size], self.peer)
        if head.payload_len and head.kind not in self._payloads:
            raise ProtocolError(
                peer=self.peer, problem=f"{head.kind.name} carries a payload, which none may here"
            )
        return head

    def _complete(self, data: bytearray) -> bool:
        return len(data) >= HEADER.size and len(data) >= HEADER.size + self._head(data, 0).header_len
