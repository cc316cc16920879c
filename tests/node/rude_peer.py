"""Peers that answer a fetch in ways that no healthy node does."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import xxhash

from mooncaked.api.frames import FrameSocket
from mooncaked.api.protocol import (
    Fetch,
    FetchedBlock,
    FetchReply,
    HelloReply,
    Kind,
    decode_request,
    encode_frame,
)
from mooncaked.clock import SystemClock
from mooncaked.errors import MooncakeError

Answer = Callable[[FrameSocket, int, Fetch], None]


class RudePeer:
    """Greets well, then hands each fetch to `answer`, and closes when that returns."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", port))
        self._open: list[FrameSocket] = []
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            frames = FrameSocket(sock, "asker", SystemClock())
            self._open.append(frames)
            threading.Thread(target=self._serve, args=[frames], daemon=True).start()

    def _serve(self, frames: FrameSocket) -> None:
        with contextlib.suppress(MooncakeError):
            if (received := frames.receive(5)) is None:
                return
            hello = HelloReply(version=1, node_id="rude", epoch=1)
            frames.send([encode_frame(Kind.HELLO, received[0].request_id, hello, reply=True)], 5)
            if (received := frames.receive(5)) is not None:
                request = decode_request(*received, "asker")
                assert isinstance(request, Fetch)
                self._answer(frames, received[0].request_id, request)
        frames.close()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for frames in self._open:
            frames.shutdown()


def block(value: bytes) -> FetchedBlock:
    """How a node describes a block of this value."""
    return FetchedBlock(size=len(value), checksum=xxhash.xxh3_64_intdigest(value))


def reply(request_id: int, blocks: list[FetchedBlock | None], payload_len: int) -> bytes:
    """The header of an answer."""
    return encode_frame(
        Kind.FETCH, request_id, FetchReply(blocks=blocks), payload_len=payload_len, reply=True
    )
