"""The frame decoder on any bytes, cut in any way: the frames that were sent, or a typed error, never more."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import socket
import types
import typing
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncaked.api.frames import FrameParser, FrameSocket
from mooncaked.api.protocol import (
    HEADER,
    REPLIES,
    REQUESTS,
    Kind,
    Struct,
    decode_reply,
    decode_request,
    encode_frame,
)
from mooncaked.clock import SystemClock
from mooncaked.errors import ConnectionLost, DeadlineExceeded, MooncakeError, ProtocolError

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    bool: st.booleans(),
    str: st.text(max_size=5),
    bytes: st.binary(max_size=5),
    type(None): st.none(),
}


@functools.cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages are made of."""
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, types.UnionType):
        return st.one_of([values(part) for part in typing.get_args(kind)])
    if typing.get_origin(kind) is list:
        return st.lists(values(typing.get_args(kind)[0]), max_size=4)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return st.builds(kind, **{field.name: values(field.type) for field in msgspec.structs.fields(kind)})


messages = st.one_of([st.tuples(st.just(kind), values(body)) for kind, body in REQUESTS.items()])


def feed_in_pieces(data: bytes, cuts: list[int]) -> list[tuple[Any, bytes]]:
    parser = FrameParser("far")
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [frame for start, end in itertools.pairwise(edges) for frame in parser.feed(data[start:end])]


@given(sent=st.lists(messages, max_size=4), cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_what_was_sent_is_received_however_it_is_cut(
    sent: list[tuple[Kind, Struct]], cuts: list[int]
) -> None:
    data = b"".join(encode_frame(kind, number, body) for number, (kind, body) in enumerate(sent))
    received = feed_in_pieces(data, cuts)
    assert [head.request_id for head, _ in received] == list(range(len(sent)))
    for (_, body), (head, raw) in zip(sent, received, strict=True):
        assert decode_request(head, raw, "far") == body


def decode_all(data: bytes, cuts: list[int]) -> None:
    for head, body in feed_in_pieces(data, cuts):
        with contextlib.suppress(MooncakeError):
            decode_request(head, body, "far")
        with contextlib.suppress(MooncakeError):
            decode_reply(head, body, REPLIES[Kind.HELLO], "far")


@settings(max_examples=300)
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_any_bytes_give_frames_or_a_protocol_error(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(ProtocolError):
        decode_all(data, cuts)


@settings(max_examples=300)
@given(
    sent=messages,
    at=st.integers(0, 1000),
    value=st.integers(0, 255),
    cuts=st.lists(st.integers(0, 200), max_size=3),
)
def test_a_damaged_frame_gives_frames_or_a_protocol_error(
    sent: tuple[Kind, Struct], at: int, value: int, cuts: list[int]
) -> None:
    data = bytearray(encode_frame(sent[0], 1, sent[1]))
    data[at % len(data)] = value
    with contextlib.suppress(ProtocolError):
        decode_all(bytes(data), cuts)


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=100) | messages.map(lambda m: encode_frame(m[0], 1, m[1])[:-1]))
def test_a_socket_gives_frames_or_a_typed_error_and_then_ends(data: bytes) -> None:
    near, far = socket.socketpair()
    frames = FrameSocket(near, "far", SystemClock())
    far.sendall(data)
    far.close()
    try:
        while (received := frames.receive(1)) is not None:
            frames.drain(min(received[0].payload_len, 1 << 20), 1)
    except (ProtocolError, ConnectionLost, DeadlineExceeded):
        pass
    finally:
        frames.close()


@given(header=st.integers(0, 2**32 - 1), payload=st.integers(0, 2**64 - 1))
def test_announced_lengths_cost_no_memory(header: int, payload: int) -> None:
    parser = FrameParser("far")
    with contextlib.suppress(ProtocolError):
        list(parser.feed(HEADER.pack(0x4B4D, 1, Kind.EXISTS, 1, header, payload)))
    assert len(parser._rest) <= HEADER.size


@given(values(REQUESTS[Kind.PIN]))
def test_unknown_fields_of_a_newer_version_are_ignored(body: Struct) -> None:
    plain = {**msgspec.to_builtins(body, builtin_types=[bytes]), "newer": [1, 2]}
    raw = msgspec.msgpack.encode(plain)
    data = HEADER.pack(0x4B4D, 1, Kind.PIN, 1, len(raw), 0) + raw
    ((head, received),) = FrameParser("far").feed(data)
    assert decode_request(head, received, "far") == body
