"""Talking to a listener frame by frame, well or badly."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

from mooncaked.api.protocol import (
    HEADER,
    VERSION_MAX,
    VERSION_MIN,
    FrameHead,
    Hello,
    HelloReply,
    Kind,
    Side,
    Struct,
    decode_head,
    decode_reply,
    encode_frame,
)
from mooncaked.units import split_address

M = TypeVar("M", bound=Struct)


class Raw:
    """A connection that sends whatever bytes the test wants, and reads frames."""

    def __init__(self, where: Path | str) -> None:
        """A path is a unix socket, text is "host:port"."""
        if isinstance(where, Path):
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.settimeout(10)
            self.sock.connect(str(where))
        else:
            self.sock = socket.create_connection(split_address(where), 10)
        self._next_id = 1

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def greet(self, **changes: object) -> HelloReply:
        """Say hello, with some fields changed."""
        fields = {
            "version_min": VERSION_MIN,
            "version_max": VERSION_MAX,
            "side": Side.ENGINE,
            "name": "test[1]",
            **changes,
        }
        return self.ask(Kind.HELLO, Hello(**fields), HelloReply)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        """Send bytes as they are; a connection that the other side ended is no error."""
        try:
            self.sock.sendall(data)
        except OSError:
            return

    def tell(self, kind: Kind, body: Struct, *, version: int = VERSION_MAX, payload_len: int = 0) -> int:
        """Send a frame; its request id."""
        self._next_id += 1
        self.send(encode_frame(kind, self._next_id, body, version=version, payload_len=payload_len))
        return self._next_id

    def ask(self, kind: Kind, body: Struct, reply: type[M]) -> M:
        """Send a request and return its reply, or raise the error that came instead."""
        self.tell(kind, body)
        return self.reply(reply)

    def reply(self, reply: type[M]) -> M:
        """The next frame, as a reply of this type."""
        head, data = self.frame()
        return decode_reply(head, data, reply, "the listener")

    def frame(self) -> tuple[FrameHead, bytes]:
        """The next frame's head and header."""
        head = decode_head(self.exactly(HEADER.size), "the listener")
        return head, self.exactly(head.header_len)

    def exactly(self, count: int) -> bytes:
        """This many bytes; raises `EOFError` when the connection ends before."""
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.sock.recv(count - len(data))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def ended(self) -> bool:
        """Whether the other side ends the connection, having said nothing more than error frames."""
        try:
            while True:
                head, _ = self.frame()
                assert head.kind is Kind.ERROR
        except EOFError:
            return True
        except TimeoutError:
            return False
