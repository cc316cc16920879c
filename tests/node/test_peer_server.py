"""The peer listener: fetches, questions, subscriptions and orders, and those who break the protocol."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncaked.api.protocol import (
    BATCH_KEYS_MAX,
    FETCH_BYTES_TARGET,
    HEADER,
    MAGIC,
    Delta,
    Exists,
    ExistsReply,
    Fetch,
    FetchReply,
    Kind,
    Order,
    OrderReply,
    Pin,
    PrefixMatch,
    PrefixMatchReply,
    Side,
    Snapshot,
    Subscribe,
    SubscribeReply,
    decode_body,
    encode_frame,
)
from mooncaked.client import Client
from mooncaked.errors import (
    AddressInUse,
    ConfigError,
    InvalidKey,
    InvalidRequest,
    MooncakeError,
    ProtocolError,
    Refused,
    StaleTerm,
    Unauthenticated,
    VersionMismatch,
)
from tests.node.raw import Raw
from tests.node.running import node_thread, until
from tests.node.small_node import SmallNode

OPTIONS = {"frame_timeout_s": 0.3, "connections_max": 20}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    path = tmp_path_factory.mktemp("node") / "c.sock"
    with node_thread(path, size=80 << 20, peer_options=OPTIONS) as node:
        yield node
        until(lambda: node.store.stats().owners == 0, "every connection's holdings are given back")


@pytest.fixture
def client(node: SmallNode, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(node.socket, namespace=request.node.name[:120]) as client:
        yield client


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    name: str = request.node.name[:120]
    return name


@pytest.fixture
def raw(node: SmallNode) -> Iterator[Raw]:
    """A peer that has not greeted; another one asks before and after the test, on one connection."""
    with Raw(node.peer_address) as other, Raw(node.peer_address) as raw:
        other.greet(side=Side.PEER, node_id="other")
        yield raw
        assert other.ask(Kind.EXISTS, Exists(namespace="n", keys=[b"k"]), ExistsReply).found == [False]


def fetch(raw: Raw, namespace: str, keys: list[bytes]) -> tuple[FetchReply, bytes]:
    raw.tell(Kind.FETCH, Fetch(namespace=namespace, keys=keys))
    head, data = raw.frame()
    reply = decode_body(data, FetchReply, "node")
    return reply, raw.exactly(head.payload_len)


# --- fetches and questions ---------------------------------------------------------------------------


def test_a_fetch_brings_bytes_checksums_parents_and_misses(raw: Raw, client: Client, namespace: str) -> None:
    client.put_batch(["a", "b"], [b"first", b"second"], parents=[None, "a"])
    raw.greet(side=Side.PEER, node_id="n2")
    reply, payload = fetch(raw, namespace, [b"b", b"x", b"a"])
    assert payload == b"secondfirst"
    second, miss, first = reply.blocks
    assert miss is None
    assert first is not None
    assert second is not None
    assert (second.size, second.parent, first.parent) == (6, b"a", None)
    assert second.checksum == xxhash.xxh3_64_intdigest(b"second")


def test_a_large_fetch_is_answered_in_part(raw: Raw, client: Client, namespace: str, node: SmallNode) -> None:
    keys = [f"k{i}".encode() for i in range(70)]
    client.put_batch(keys, [bytes([i]) * (1 << 20) for i in range(70)])
    raw.greet(side=Side.PEER)
    got = 0
    while got < len(keys):
        reply, payload = fetch(raw, namespace, keys[got:])
        assert 0 < len(payload) <= FETCH_BYTES_TARGET
        assert [payload[i << 20] for i in range(len(reply.blocks))] == [*range(got, got + len(reply.blocks))]
        got += len(reply.blocks)
    until(lambda: node.store.stats().pinned == 0, "nothing stays pinned")


def test_what_is_fetched_is_pinned_while_it_is_sent(
    raw: Raw, client: Client, namespace: str, node: SmallNode
) -> None:
    client.put("k", bytes(30 << 20))
    raw.greet(side=Side.PEER)
    raw.tell(Kind.FETCH, Fetch(namespace=namespace, keys=[b"k"]))
    raw.frame()
    assert node.store.stats().pinned == 1  # more than the sockets hold, and none of it taken yet
    raw.sock.close()
    until(lambda: node.store.stats().pinned == 0, "the pin ends with the connection")


def test_questions(raw: Raw, client: Client, namespace: str) -> None:
    client.put_batch(["a", "b"], [b"1", b"2"])
    raw.greet(side=Side.CONDUCTOR)
    keys = [b"a", b"b", b"c"]
    exists = raw.ask(Kind.EXISTS, Exists(namespace=namespace, keys=keys), ExistsReply)
    assert exists.found == [True, True, False]
    prefix = raw.ask(Kind.PREFIX_MATCH, PrefixMatch(namespace=namespace, keys=keys), PrefixMatchReply)
    assert prefix.matched == 2


# --- subscriptions -----------------------------------------------------------------------------------


def subscribe(raw: Raw, request: Subscribe) -> SubscribeReply:
    raw.greet(side=Side.CONDUCTOR)
    return raw.ask(Kind.SUBSCRIBE, request, SubscribeReply)


def event(raw: Raw) -> Any:
    head, data = raw.frame()
    assert not head.reply
    return decode_body(data, {Kind.SNAPSHOT: Snapshot, Kind.DELTA: Delta}[head.kind], "node")


def test_a_subscription_is_a_snapshot_and_numbered_deltas(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=16 << 20) as node, Client(node.socket) as client:
        client.put_batch(["a", "b"], [b"1", b"22"], parents=[None, "a"])
        with Raw(node.peer_address) as raw:
            reply = subscribe(raw, Subscribe())
            assert (reply.epoch, reply.resumed) == (node.store.epoch, False)
            snapshot = event(raw)
            assert snapshot.last
            assert snapshot.sequence == 2
            assert sorted((e.key, e.parent, e.size) for e in snapshot.blocks) == [
                (b"a", None, 1),
                (b"b", b"a", 2),
            ]
            client.put("c", b"333")
            client.remove("a")
            events = []
            while len(events) < 2:
                delta = event(raw)
                assert delta.sequence == 3 + len(events)
                events += delta.events
            assert [(e.stored, e.key) for e in events] == [(True, b"c"), (False, b"a")]
            heartbeat = event(raw)
            assert (heartbeat.sequence, heartbeat.events) == (5, [])


def test_a_subscription_resumes_where_it_ended(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=16 << 20) as node, Client(node.socket) as client:
        client.put_batch(["a", "b", "c"], [b"1"] * 3)
        with Raw(node.peer_address) as raw:
            assert subscribe(raw, Subscribe(epoch=node.store.epoch, sequence=1)).resumed
            delta = event(raw)
            assert delta.sequence == 2
            assert [e.key for e in delta.events] == [b"b", b"c"]
        for request in (Subscribe(epoch=5, sequence=1), Subscribe(epoch=node.store.epoch, sequence=99)):
            with Raw(node.peer_address) as raw:
                assert not subscribe(raw, request).resumed
                assert len(event(raw).blocks) == 3


def test_a_large_snapshot_comes_in_several_frames(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=64 << 20) as node, Client(node.socket) as client:
        client.put_batch([f"k{i}" for i in range(10_000)], [b"x"] * 10_000)
        with Raw(node.peer_address) as raw:
            subscribe(raw, Subscribe())
            sizes, last = [], False
            while not last:
                snapshot = event(raw)
                sizes.append(len(snapshot.blocks))
                last = snapshot.last
            assert sizes == [4096, 4096, 1808]


def test_an_empty_snapshot_is_one_frame(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=1 << 20) as node, Raw(node.peer_address) as raw:
        subscribe(raw, Subscribe())
        assert event(raw) == Snapshot(sequence=0, blocks=[], last=True)


# --- orders --------------------------------------------------------------------------------------------


def order(namespace: str, term: int, action: str = "drop", **fields: Any) -> Order:
    return Order(term=term, action=action, namespace=namespace, keys=[b"k"], **fields)


def test_orders_of_a_lower_term_are_refused(tmp_path: Path) -> None:
    with (
        node_thread(tmp_path / "c.sock", size=1 << 20) as node,
        Client(node.socket) as client,
        Raw(node.peer_address) as old,
        Raw(node.peer_address) as new,
    ):
        old.greet(side=Side.CONDUCTOR)
        new.greet(side=Side.CONDUCTOR)
        client.put("k", b"1")
        assert old.ask(Kind.ORDER, order("default", 7), OrderReply).done == [True]
        client.put("k", b"1")
        assert new.ask(Kind.ORDER, order("default", 9), OrderReply).done == [True]
        client.put("k", b"1")
        with pytest.raises(StaleTerm, match="term 7 refused: this node has obeyed term 9"):
            old.ask(Kind.ORDER, order("default", 7), OrderReply)
        assert client.exists("k")
        assert new.ask(Kind.ORDER, order("default", 9), OrderReply).done == [True]
        assert old.ask(Kind.EXISTS, Exists(namespace="n", keys=[]), ExistsReply).found == []


def test_an_order_to_fetch(tmp_path: Path) -> None:
    with node_thread(tmp_path / "a.sock", size=1 << 20, node_id="a") as a, Client(a.socket) as client:
        client.put("k", b"value")
        peers = {"a": a.peer_address}
        with (
            node_thread(tmp_path / "b.sock", size=1 << 20, node_id="b", peers=peers) as b,
            Raw(b.peer_address) as raw,
            Client(b.socket) as reader,
        ):
            raw.greet(side=Side.CONDUCTOR)
            assert raw.ask(Kind.ORDER, order("default", 1, "fetch", source="a"), OrderReply).done == [True]
            assert raw.ask(Kind.ORDER, order("default", 1, "fetch", source="gone"), OrderReply).done == [True]
            assert raw.ask(Kind.ORDER, order("empty", 1, "fetch", source="a"), OrderReply).done == [False]
            assert reader.get("k") == b"value"


def test_an_order_that_makes_no_sense(raw: Raw) -> None:
    raw.greet(side=Side.CONDUCTOR)
    with pytest.raises(InvalidRequest, match="not to 'explode'"):
        raw.ask(Kind.ORDER, order("n", 1, "explode"), OrderReply)
    assert raw.ask(Kind.EXISTS, Exists(namespace="n", keys=[]), ExistsReply).found == []


# --- those who break the protocol ----------------------------------------------------------------------


def head(**changes: int) -> bytes:
    fields = {"magic": MAGIC, "version": 1, "kind": Kind.FETCH, "id": 9, "header": 0, "payload": 0, **changes}
    return HEADER.pack(*fields.values())


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", ProtocolError, "starts with"),
        (head(header=1 << 30), ProtocolError, "over the limits"),
        (head(payload=1 << 40), ProtocolError, "over the limits"),
        (head(payload=9), ProtocolError, "9 bytes of payload"),
        (head(version=3), ProtocolError, "version 3"),
        (head(header=2) + b"\xc1\xc1", ProtocolError, "Fetch:"),
        (encode_frame(Kind.PIN, 1, Pin(namespace="n", keys=[])), ProtocolError, "no request of a peer"),
        (
            encode_frame(Kind.FETCH, 1, Fetch(namespace="n", keys=[b"k"] * (BATCH_KEYS_MAX + 1))),
            ProtocolError,
            "16385 keys",
        ),
    ],
)
def test_a_frame_that_breaks_the_rules_ends_its_connection(
    raw: Raw, data: bytes, error: type[MooncakeError], problem: str
) -> None:
    raw.greet(side=Side.PEER)
    raw.send(data)
    with pytest.raises(error, match=problem):
        raw.reply(FetchReply)
    assert raw.ended()


def test_an_unusable_key_is_an_error_and_the_connection_stays(raw: Raw) -> None:
    raw.greet(side=Side.PEER)
    with pytest.raises(InvalidKey):
        raw.ask(Kind.FETCH, Fetch(namespace="n", keys=[b""]), FetchReply)
    assert raw.ask(Kind.EXISTS, Exists(namespace="n", keys=[b"k"]), ExistsReply).found == [False]


@pytest.mark.parametrize("keep", [1, HEADER.size + 1])
def test_a_frame_that_does_not_end_is_cut_off(raw: Raw, keep: int) -> None:
    raw.greet(side=Side.PEER)
    raw.send(encode_frame(Kind.FETCH, 1, Fetch(namespace="n", keys=[b"k"]))[:keep])
    raw.sock.settimeout(3)
    assert raw.ended()


def test_no_common_version(raw: Raw, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(VersionMismatch):
        raw.greet(version_min=2, version_max=3)
    assert raw.ended()
    assert "code=version_mismatch" in caplog.text


def test_the_token_of_a_peer(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=1 << 20, token="secret") as node:
        for token in (None, "wrong"):
            with Raw(node.peer_address) as raw, pytest.raises(Unauthenticated):
                raw.greet(token=token)
        with Raw(node.peer_address) as raw:
            assert raw.greet(token="secret").node_id == "n1"


def test_too_many_peers_are_refused(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=1 << 20, peer_options={"connections_max": 3}) as node:
        crowd = [Raw(node.peer_address) for _ in range(3)]
        for raw in crowd:
            raw.greet(side=Side.PEER)
        with Raw(node.peer_address) as late, pytest.raises(Refused, match="3 peers are connected"):
            late.greet(side=Side.PEER)
        crowd.pop().sock.close()

        def admitted() -> bool:
            with Raw(node.peer_address) as again:
                try:
                    return bool(again.greet(side=Side.PEER))
                except Refused:
                    return False

        until(admitted, "a place is free again")
        for raw in crowd:
            raw.sock.close()


def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    with (
        node_thread(tmp_path / "c.sock", size=1 << 20, peer_options={"idle_s": 0.1}) as node,
        Raw(node.peer_address) as raw,
    ):
        raw.greet(side=Side.PEER)
        assert raw.ended()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda kind, body: head(kind=kind, header=len(body)) + body,
                st.sampled_from([int(kind) for kind in Kind if kind is not Kind.SUBSCRIBE]),
                st.binary(max_size=60),
            ),
        ),
        max_size=3,
    ).map(b"".join),
    greeted=st.booleans(),
)
def test_no_bytes_whatever_harm_the_node(raw: Raw, node: SmallNode, data: bytes, greeted: bool) -> None:
    with Raw(node.peer_address) as fuzzer:
        if greeted:
            fuzzer.greet(side=Side.PEER)
        fuzzer.send(data)
        try:
            fuzzer.sock.shutdown(socket.SHUT_WR)
            while fuzzer.sock.recv(1 << 16):
                pass
        except OSError:
            return  # it was cut off already


# --- the port --------------------------------------------------------------------------------------------


def test_a_port_in_use_is_a_clear_error(tmp_path: Path, node: SmallNode) -> None:
    with (
        pytest.raises(AddressInUse, match=rf"{node.peer_address}.*listen\.peer"),
        node_thread(tmp_path / "c.sock", size=1 << 20, peer=node.peer_address),
    ):
        pass


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "203.0.113.77:0", "::1:x"])
def test_an_address_that_cannot_be_is_a_clear_error(tmp_path: Path, address: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"listen\.peer"),
        node_thread(tmp_path / "c.sock", size=1 << 20, peer=address),
    ):
        pass
