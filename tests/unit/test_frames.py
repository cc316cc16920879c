"""Frames over sockets: pieces, limits, deadlines."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mooncaked.api.frames import RECEIVE_BYTES, FrameParser, FrameSocket
from mooncaked.api.protocol import (
    HEADER,
    Exists,
    ExistsReply,
    Kind,
    PutAbort,
    decode_reply,
    decode_request,
    encode_error,
    encode_frame,
)
from mooncaked.clock import SystemClock
from mooncaked.errors import (
    ConnectionLost,
    DeadlineExceeded,
    PoolFull,
    ProtocolError,
    RemoteError,
)

Pair = tuple[FrameSocket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    frames = FrameSocket(near, "far", SystemClock())
    yield frames, far
    frames.close()
    far.close()


def frame(keys: int = 1, size: int = 10, request_id: int = 1, payload: int = 0) -> bytes:
    body = Exists(namespace="n", keys=[os.urandom(size) for _ in range(keys)])
    return encode_frame(Kind.EXISTS, request_id, body, payload_len=payload)


def in_pieces(sock: socket.socket, data: bytes, size: int) -> threading.Thread:
    def send() -> None:
        for start in range(0, len(data), size):
            sock.sendall(data[start : start + size])

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("size", [1, 7, 20, 1000, 100_000])
def test_frames_in_pieces_of_any_size_are_the_same_frames(pair: Pair, size: int) -> None:
    near, far = pair
    frames = [frame(keys=count, request_id=count) for count in (1, 0, 50, 3000, 2)]
    sender = in_pieces(far, b"".join(frames), size)
    for count, sent in zip((1, 0, 50, 3000, 2), frames, strict=True):
        received = near.receive(5)
        assert received is not None
        head, body = received
        assert head.request_id == count
        assert bytes(body) == sent[HEADER.size :]
    sender.join()
    far.close()
    assert near.receive(5) is None


@pytest.mark.parametrize("sizes", [[5], [0, 3, 0], [100_000, 1, 70_000], [10] * 2000])
def test_a_payload_lands_in_its_views_and_the_next_frame_follows(pair: Pair, sizes: list[int]) -> None:
    near, far = pair
    payload = os.urandom(sum(sizes))
    sender = in_pieces(far, frame(payload=len(payload)) + payload + frame(request_id=7), 50_000)
    received = near.receive(5)
    assert received is not None
    assert received[0].payload_len == len(payload)
    buffers = [bytearray(size) for size in sizes]
    near.receive_into([memoryview(buffer) for buffer in buffers], 5)
    assert b"".join(buffers) == payload
    following = near.receive(5)
    assert following is not None
    assert following[0].request_id == 7
    sender.join()


def test_a_payload_that_nobody_wants(pair: Pair) -> None:
    near, far = pair
    sender = in_pieces(far, frame(payload=3_000_000) + bytes(3_000_000) + frame(request_id=7), 1 << 20)
    assert near.receive(5) is not None
    near.drain(3_000_000, 5)
    following = near.receive(5)
    assert following is not None
    assert following[0].request_id == 7
    sender.join()


def test_many_parts_larger_than_the_sockets_buffer_are_sent_in_order(pair: Pair) -> None:
    near, far = pair
    parts = [os.urandom(3000) for _ in range(1500)]
    received = bytearray()

    def read() -> None:
        while len(received) < 4_500_000:
            received.extend(far.recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    near.send(parts, 10)
    reader.join()
    assert received == b"".join(parts)


@pytest.mark.parametrize("keep", [1, HEADER.size - 1, HEADER.size, HEADER.size + 4])
def test_an_end_in_the_middle_of_a_frame(pair: Pair, keep: int) -> None:
    near, far = pair
    far.sendall(frame()[:keep])
    far.close()
    with pytest.raises(ConnectionLost, match="closed in the middle"):
        near.receive(5)


def test_an_end_in_the_middle_of_a_payload(pair: Pair) -> None:
    near, far = pair
    far.sendall(frame(payload=10) + b"12345")
    assert near.receive(5) is not None
    far.close()
    with pytest.raises(ConnectionLost, match="middle of a payload"):
        near.receive_into([memoryview(bytearray(10))], 5)


@pytest.mark.parametrize("keep", [0, 5, HEADER.size + 1])
def test_silence_is_late_and_not_for_ever(pair: Pair, keep: int) -> None:
    near, far = pair
    far.sendall(frame()[:keep])
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="100 ms"):
        near.receive(0.1)
    assert time.monotonic() - begin < 1


def test_drops_do_not_extend_the_time(pair: Pair) -> None:
    near, far = pair
    data = frame(keys=100)
    stop = threading.Event()

    def drip() -> None:
        for byte in data:
            if stop.wait(0.01):
                return
            far.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        near.receive(0.15)
    assert time.monotonic() - begin < 0.6
    stop.set()
    thread.join()


def test_waiting_for_a_frame_to_begin_may_take_longer_than_the_frame(pair: Pair) -> None:
    near, far = pair
    timer = threading.Timer(0.2, lambda: far.sendall(frame()))
    timer.start()
    assert near.receive(0.05, idle_s=5) is not None
    timer.join()


def test_who_does_not_read_is_not_waited_for(pair: Pair) -> None:
    near, _far = pair
    with pytest.raises(DeadlineExceeded):
        near.send([bytes(1 << 20)] * 20, 0.1)


def test_sending_to_who_has_gone(pair: Pair) -> None:
    near, far = pair
    far.close()
    with pytest.raises(ConnectionLost):
        near.send([frame()], 1)


def test_lengths_are_checked_before_anything_is_allocated(pair: Pair) -> None:
    near, far = pair
    far.sendall(HEADER.pack(0x4B4D, 1, Kind.EXISTS, 1, 0xFFFFFFFF, 1 << 62))
    with pytest.raises(ProtocolError, match="over the limits"):
        near.receive(1)


def test_a_header_larger_than_the_buffer(pair: Pair) -> None:
    near, far = pair
    data = frame(keys=5000, size=100)
    assert len(data) > 5 * RECEIVE_BYTES
    sender = in_pieces(far, data, 1 << 20)
    received = near.receive(5)
    assert received is not None
    assert len(received[1]) == len(data) - HEADER.size
    sender.join()


def test_errors_travel_with_their_fields() -> None:
    error = PoolFull(size=1, capacity=2, pinned=3, key="dram.size")
    parser = FrameParser("far")
    ((head, body),) = parser.feed(encode_error(5, error))
    with pytest.raises(PoolFull) as caught:
        decode_reply(head, body, ExistsReply, "far")
    assert caught.value.fields == error.fields
    assert head.request_id == 5


def test_an_error_of_a_newer_version_is_an_error() -> None:
    class Newer(PoolFull):
        """Something new: {what}"""

        code = "newer_than_this"

    data = encode_error(5, Newer(what="x"))
    del Newer
    ((head, body),) = FrameParser("far").feed(data.replace(b"newer_than_this", b"newer_than_that"))
    with pytest.raises(RemoteError, match="newer_than_that: Something new: x"):
        decode_reply(head, body, ExistsReply, "far")


def test_requests_and_replies_are_not_taken_for_each_other() -> None:
    ((head, body),) = FrameParser("far").feed(frame())
    with pytest.raises(ProtocolError):
        decode_reply(head, body, ExistsReply, "far")
    reply = encode_frame(Kind.EXISTS, 1, ExistsReply(found=[]), reply=True)
    ((head, body),) = FrameParser("far").feed(reply)
    with pytest.raises(ProtocolError):
        decode_request(head, body, "far")
    ((head, body),) = FrameParser("far").feed(
        encode_frame(Kind.PUT_ABORT, 1, PutAbort(tokens=[]), reply=True)
    )
    with pytest.raises(ProtocolError):
        decode_reply(head, body, ExistsReply, "far")
