"""The unix socket, met by those who break the protocol: they get an error, and nobody else notices."""

from __future__ import annotations

import logging
import os
import random
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncaked.api.listen import UnixListener
from mooncaked.api.protocol import (
    BATCH_KEYS_MAX,
    HEADER,
    HEADER_BYTES_MAX,
    MAGIC,
    Exists,
    ExistsReply,
    Kind,
    Order,
    Pin,
    PinReply,
    PutBegin,
    PutBeginReply,
    PutCommit,
    PutCommitReply,
    PutItem,
    Remove,
    Subscribe,
    Unpin,
    encode_frame,
)
from mooncaked.client import Client
from mooncaked.client.connection import engine_hello
from mooncaked.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidKey,
    InvalidRequest,
    ProtocolError,
    Refused,
    SocketInUse,
    Unauthenticated,
    VersionMismatch,
)
from tests.node.raw import Raw
from tests.node.running import node_thread, until
from tests.node.small_node import SmallNode

FAST = {"hello_timeout_s": 0.3, "frame_timeout_s": 0.3, "grace_s": 0.2, "connections_max": 20}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    path = tmp_path_factory.mktemp("node") / "c.sock"
    with node_thread(path, size=4 << 20, unix_options=FAST) as node:
        yield node
        until(lambda: node.store.stats().owners == 0, "every connection's holdings are given back")


@pytest.fixture
def other(node: SmallNode) -> Iterator[Client]:
    """A well-behaved client, which holds a view throughout the test: it would not end well had its
    connection been lost."""
    with Client(node.socket, namespace="other") as client:
        client.put_batch(["k", "held"], [b"v", b"w"])
        with client.get_view("held") as view:
            yield client
            assert view == b"w"
            assert client.get("k") == b"v"


@pytest.fixture
def raw(node: SmallNode, other: Client) -> Iterator[Raw]:
    with Raw(node.socket) as raw:
        yield raw


def exists(key: bytes = b"k") -> Exists:
    return Exists(namespace="n", keys=[key])


# --- the greeting -------------------------------------------------------------------------------------


def test_the_greeting_chooses_the_highest_common_version(raw: Raw) -> None:
    assert raw.greet(version_min=1, version_max=200).version == 1


def test_no_common_version_is_refused_and_logged(
    raw: Raw, node: SmallNode, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(VersionMismatch, match="speaks protocol versions 7-9, this side 1-1"),
    ):
        raw.greet(version_min=7, version_max=9)
    assert raw.ended()
    assert "code=version_mismatch" in caplog.text
    assert "test[1]" in caplog.text


def test_anything_before_the_greeting_is_refused(raw: Raw) -> None:
    with pytest.raises(ProtocolError, match="EXISTS came where HELLO was due"):
        raw.ask(Kind.EXISTS, exists(), ExistsReply)
    assert raw.ended()


def test_a_second_greeting_is_refused(raw: Raw) -> None:
    raw.greet()
    with pytest.raises(ProtocolError):
        raw.greet()
    assert raw.ended()


def test_who_never_greets_is_cut_off(raw: Raw) -> None:
    with pytest.raises(DeadlineExceeded, match="a greeting"):
        raw.reply(ExistsReply)
    assert raw.ended()


def test_a_frame_of_another_version_than_was_agreed(raw: Raw) -> None:
    raw.greet()
    raw.tell(Kind.EXISTS, exists(), version=2)
    with pytest.raises(ProtocolError, match="version 2 on a connection of version 1"):
        raw.reply(ExistsReply)
    assert raw.ended()


@pytest.mark.parametrize("token", [None, "wrong", "", "secret2", "geheimniß"])
def test_a_wrong_token_is_refused_and_not_logged(
    token: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        node_thread(tmp_path / "c.sock", size=1 << 20, token="secret1") as node,
        caplog.at_level(logging.DEBUG),
    ):
        with Client(node.socket, token=token) as client, pytest.raises(Unauthenticated):
            client.get("k")
        with Client(node.socket, token="secret1") as client:
            assert client.get("k") is None
    assert "code=unauthenticated" in caplog.text
    assert "secret" not in caplog.text


# --- frames -------------------------------------------------------------------------------------------


def head(**changes: int) -> bytes:
    fields = {
        "magic": MAGIC,
        "version": 1,
        "kind": Kind.EXISTS,
        "id": 9,
        "header": 0,
        "payload": 0,
        **changes,
    }
    return HEADER.pack(*fields.values())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "starts with"),
        (head(kind=66), "unknown frame kind"),
        (head(header=HEADER_BYTES_MAX + 1), "over the limits"),
        (head(header=0xFFFFFFFF), "over the limits"),
        (head(payload=1 << 60), "over the limits"),
        (head(payload=5) + b"12345", "carries a payload"),
        (head(kind=Kind.EXISTS | 0x80), "is no request"),
        (head(kind=Kind.ERROR), "is no request"),
        (head(header=3) + b"\xc1\xc1\xc1", "Exists:"),
        (encode_frame(Kind.EXISTS, 9, Unpin(pins=[1])), "Exists:"),
        (encode_frame(Kind.SUBSCRIBE, 9, Subscribe()), "no request of an engine"),
        (encode_frame(Kind.ORDER, 9, Order(term=1, action="drop", namespace="n", keys=[])), "no request of"),
        (
            encode_frame(Kind.EXISTS, 9, Exists(namespace="n", keys=[b"k"] * (BATCH_KEYS_MAX + 1))),
            "16385 keys",
        ),
        (encode_frame(Kind.UNPIN, 9, Unpin(pins=[123456])), "123456"),
    ],
)
def test_a_frame_that_breaks_the_rules_ends_its_connection(raw: Raw, data: bytes, problem: str) -> None:
    raw.greet()
    raw.send(data)
    with pytest.raises(ProtocolError, match=problem):
        raw.reply(ExistsReply)
    assert raw.ended()


@pytest.mark.parametrize("keep", [1, HEADER.size - 1, HEADER.size, HEADER.size + 3])
def test_a_frame_that_does_not_end_is_cut_off(raw: Raw, keep: int) -> None:
    raw.greet()
    raw.send(encode_frame(Kind.EXISTS, 9, exists())[:keep])
    with pytest.raises(DeadlineExceeded, match="the rest of a frame"):
        raw.reply(ExistsReply)
    assert raw.ended()


def test_a_stream_of_frames_is_not_one_slow_frame(raw: Raw) -> None:
    raw.greet()
    stream = b"".join(encode_frame(Kind.EXISTS, number, exists()) for number in range(100, 120))
    step = len(stream) // 20
    begin = time.monotonic()
    raw.send(stream[: step - 5])
    for piece in range(1, 20):  # each ends in the middle of a frame
        time.sleep(0.03)  # twice the time that one frame may take, in all
        raw.send(stream[piece * step - 5 : (piece + 1) * step - (5 if piece < 19 else 0)])
    assert time.monotonic() - begin > 1.5 * FAST["frame_timeout_s"]
    assert [raw.frame()[0].request_id for _ in range(20)] == list(range(100, 120))


def test_a_frame_byte_by_byte_is_a_frame(raw: Raw) -> None:
    raw.greet()
    for byte in encode_frame(Kind.EXISTS, 9, exists()):
        raw.send(bytes([byte]))
    assert raw.reply(ExistsReply).found == [False]


def test_frames_sent_together_are_answered_in_order(raw: Raw) -> None:
    raw.greet()
    frames = [encode_frame(Kind.EXISTS, number, exists()) for number in range(100, 600)]
    raw.send(b"".join(frames))
    assert [raw.frame()[0].request_id for _ in frames] == list(range(100, 600))


def test_who_leaves_in_the_middle_of_a_frame_harms_nobody(raw: Raw, other: Client) -> None:
    raw.greet()
    raw.send(encode_frame(Kind.EXISTS, 9, exists())[:-1])
    raw.sock.close()
    assert other.exists("k")


def test_who_reads_no_replies_is_not_read_from(raw: Raw, other: Client) -> None:
    raw.greet()
    frame = encode_frame(Kind.EXISTS, 9, Exists(namespace="n", keys=[b"k"] * BATCH_KEYS_MAX))
    raw.sock.settimeout(1)
    with pytest.raises(TimeoutError):
        raw.sock.sendall(frame * 200)  # some 10 MB of requests
    assert other.exists("k")


# --- requests that are well-formed and wrong: the connection stays ------------------------------------


@pytest.mark.parametrize(
    ("kind", "body", "error"),
    [
        (Kind.EXISTS, exists(b""), InvalidKey),
        (Kind.EXISTS, exists(b"x" * 513), InvalidKey),
        (Kind.EXISTS, Exists(namespace="", keys=[]), InvalidKey),
        (Kind.REMOVE, Remove(namespace="a\nb", keys=[]), InvalidKey),
        (Kind.PUT_BEGIN, PutBegin(namespace="n", items=[PutItem(key=b"k", size=-1)]), InvalidRequest),
        (Kind.PUT_BEGIN, PutBegin(namespace="n", items=[PutItem(key=b"", size=1)]), InvalidKey),
        (
            Kind.PUT_BEGIN,
            PutBegin(namespace="n", items=[PutItem(key=b"k", size=1, meta=bytes(1025))]),
            InvalidRequest,
        ),
        (Kind.PUT_COMMIT, PutCommit(tokens=[77], checksums=[1]), InvalidRequest),
        (Kind.PUT_COMMIT, PutCommit(tokens=[], checksums=[1]), InvalidRequest),
    ],
)
def test_a_wrong_request_is_answered_with_an_error(
    raw: Raw, kind: Kind, body: Any, error: type[Exception]
) -> None:
    raw.greet()
    with pytest.raises(error):
        raw.ask(kind, body, PinReply)
    assert raw.ask(Kind.EXISTS, exists(), ExistsReply).found == [False]


def test_a_size_of_no_possible_pool_is_too_large(raw: Raw) -> None:
    raw.greet()
    items = [PutItem(key=b"k", size=1 << 62)]
    reply = raw.ask(Kind.PUT_BEGIN, PutBegin(namespace="n", items=items), PutBeginReply)
    assert [slot.status for slot in reply.slots] == ["too_large"]


def test_a_commit_of_somebody_elses_write_is_refused(raw: Raw, node: SmallNode) -> None:
    raw.greet()
    begin = PutBegin(namespace="n", items=[PutItem(key=b"mine", size=10)])
    slot = raw.ask(Kind.PUT_BEGIN, begin, PutBeginReply).slots[0]
    with Raw(node.socket) as thief:
        thief.greet()
        with pytest.raises(InvalidRequest):
            thief.ask(Kind.PUT_COMMIT, PutCommit(tokens=[slot.token], checksums=[0]), PutCommitReply)
    assert raw.ask(Kind.PUT_COMMIT, PutCommit(tokens=[slot.token], checksums=[0]), PutCommitReply).stored == [
        True
    ]


# --- what a connection holds ends with it -------------------------------------------------------------


def test_writes_and_pins_end_with_the_connection(raw: Raw, other: Client, node: SmallNode) -> None:
    raw.greet()
    raw.ask(Kind.PUT_BEGIN, PutBegin(namespace="n", items=[PutItem(key=b"w", size=10)]), PutBeginReply)
    raw.ask(Kind.PIN, Pin(namespace="other", keys=[b"k"]), PinReply)
    stats = node.store.stats()
    assert (stats.filling, stats.pinned) == (1, 1)
    raw.sock.close()
    until(lambda: (node.store.stats().filling, node.store.stats().pinned) == (0, 0), "given back", 2)


def test_who_is_cut_off_keeps_its_memory_until_it_must_have_noticed(raw: Raw, node: SmallNode) -> None:
    raw.greet()
    raw.ask(Kind.PUT_BEGIN, PutBegin(namespace="n", items=[PutItem(key=b"w", size=10)]), PutBeginReply)
    raw.send(b"rubbish that is long enough for a header")
    assert raw.ended()
    assert node.store.stats().filling == 1  # a slot that it may still be copying into
    until(lambda: node.store.stats().filling == 0, "given back after the grace", 2)


def test_too_many_connections_are_refused_and_the_others_stay(node: SmallNode, other: Client) -> None:
    crowd = [Raw(node.socket) for _ in range(FAST["connections_max"] - 1)]  # type: ignore[call-overload]
    try:
        for raw in crowd:
            raw.greet()
        with Client(node.socket) as late, pytest.raises(Refused, match="20 engines are connected"):
            late.get("k")
    finally:
        for raw in crowd:
            raw.sock.close()


def test_a_missing_key_with_sources_does_not_hold_up_later_requests(tmp_path: Path) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    peers = {"n2": f"127.0.0.1:{silent.getsockname()[1]}"}
    with silent, node_thread(tmp_path / "c.sock", size=1 << 20, peers=peers) as node, Raw(node.socket) as raw:
        raw.greet()
        slow = raw.tell(Kind.PIN, Pin(namespace="n", keys=[b"k"], sources=["n2"], deadline_ms=500))
        quick = raw.tell(Kind.EXISTS, exists())
        assert raw.frame()[0].request_id == quick
        assert raw.frame()[0].request_id == slow


# --- rubbish, at random -------------------------------------------------------------------------------

frames = st.one_of(
    st.binary(max_size=100),
    st.builds(
        lambda kind, body: head(kind=kind, header=len(body)) + body,
        st.sampled_from([int(kind) for kind in Kind] + [0, 200]),
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda body: encode_frame(Kind.HELLO, 0, body)[HEADER.size :],
                st.one_of(
                    st.builds(Exists, namespace=st.text(max_size=5), keys=st.lists(st.binary(max_size=4))),
                    st.builds(Pin, namespace=st.text(max_size=5), keys=st.lists(st.binary(max_size=4))),
                    st.builds(Unpin, pins=st.lists(st.integers(-(2**63), 2**63))),
                    st.builds(
                        PutCommit,
                        tokens=st.lists(st.integers(-(2**63), 2**64 - 1)),
                        checksums=st.lists(st.integers(-(2**63), 2**64 - 1)),
                    ),
                    st.builds(
                        PutBegin,
                        namespace=st.just("n"),
                        items=st.lists(
                            st.builds(
                                PutItem, key=st.binary(max_size=3), size=st.integers(-(2**63), 2**64 - 1)
                            )
                        ),
                    ),
                ),
            ),
        ),
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(frames, max_size=4).map(b"".join), greeted=st.booleans())
def test_no_bytes_whatever_harm_the_daemon(
    node: SmallNode, other: Client, data: bytes, greeted: bool
) -> None:
    with Raw(node.socket) as raw:
        if greeted:
            raw.greet()
        raw.send(data)
        raw.sock.shutdown(socket.SHUT_WR)
        raw.sock.settimeout(5)
        while raw.sock.recv(1 << 16):
            pass
    assert other.exists("k")


def test_truncations_of_a_good_conversation(node: SmallNode, other: Client) -> None:
    with Raw(node.socket) as raw:
        raw.greet()
    hello = encode_frame(Kind.HELLO, 0, engine_hello(None))
    whole = hello + encode_frame(
        Kind.PUT_BEGIN, 1, PutBegin(namespace="n", items=[PutItem(key=b"t", size=9)])
    )
    for end in random.Random(4).sample(range(len(whole)), 15):
        with Raw(node.socket) as raw:
            raw.send(whole[:end])
    until(lambda: node.store.stats().filling == 0, "all given back")
    assert other.exists("k")


# --- the socket file ----------------------------------------------------------------------------------


def test_the_socket_file_is_for_its_group_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "c.sock"
    with node_thread(path, size=1 << 20):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    assert path.exists()
    with node_thread(path, size=1 << 20), Client(path) as client:
        assert client.get("k") is None


def test_a_second_daemon_on_a_socket_is_refused_with_the_pid_of_the_first(
    node: SmallNode, other: Client
) -> None:
    with (
        pytest.raises(SocketInUse, match=rf"pid {os.getpid()}.*c\.sock.*listen\.client_socket"),
        node_thread(node.socket),
    ):
        pass
    assert node.socket.exists()


def test_a_socket_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        with pytest.raises(SocketInUse, match=f"pid {os.getpid()}"):
            UnixListener(path)
        foreign.close()
    UnixListener(path).close()


def test_a_file_that_is_no_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="it exists and is no socket"):
        UnixListener(path)
    assert path.read_text() == "data"


def test_a_path_too_long_for_a_socket_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen\.client_socket: .*limit for a socket is 107"):
        UnixListener(tmp_path / ("x" * 120))


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"listen\.client_socket: .*c\.sock"):
        UnixListener(tmp_path / "file" / "c.sock")
