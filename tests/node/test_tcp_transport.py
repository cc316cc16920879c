"""The TCP transport against peers that die, hang, lie and come back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mooncaked.api.frames import FrameSocket
from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import HEADER, MAGIC, Fetch, Kind
from mooncaked.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    Unauthenticated,
    Unreachable,
)
from mooncaked.transports import tcp
from mooncaked.transports.base import Outcome
from mooncaked.transports.tcp import TcpTransport
from tests.contract.test_transport_contract import Memory, TcpFar, soon
from tests.node.rude_peer import Answer, RudePeer, block, reply

VALUE = b"0123456789" * 50_000


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    transport = TcpTransport("here", rng=random.Random(1))
    yield transport
    transport.close()


@contextmanager
def rude(answer: Answer) -> Iterator[RudePeer]:
    peer = RudePeer(answer)
    try:
        yield peer
    finally:
        peer.close()


def fetch(
    transport: TcpTransport, address: str, keys: list[bytes], memory: Memory, seconds: float = 10
) -> Outcome:
    return transport.fetch(address, "n", keys, memory.place, soon(seconds))


def dies_in_the_second_block(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [block(VALUE)] * 3, 3 * len(VALUE)), VALUE, VALUE[:1000]], 5)


def test_a_peer_that_dies_in_the_middle(transport: TcpTransport) -> None:
    with rude(dies_in_the_second_block) as peer:
        memory = Memory()
        outcome = fetch(transport, peer.address, [b"a", b"b", b"c"], memory)
        assert isinstance(outcome.error, ConnectionLost)
        # What was received before may count, a part of a block never does.
        assert outcome.landed[1:] == [False, False]
        assert not outcome.landed[0] or memory.buffers[0] == VALUE


def hangs(_frames: FrameSocket, _request_id: int, _request: Fetch) -> None:
    time.sleep(3)


def hangs_in_the_payload(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [block(VALUE)], len(VALUE)), VALUE[:-1]], 5)
    time.sleep(3)


def drips(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [block(VALUE)], len(VALUE))], 5)
    for byte in VALUE[:300]:
        frames.send([bytes([byte])], 5)
        time.sleep(0.01)


@pytest.mark.parametrize("answer", [hangs, hangs_in_the_payload, drips])
def test_a_peer_that_is_slow_is_left_at_the_deadline(transport: TcpTransport, answer: Answer) -> None:
    with rude(answer) as peer:
        begin = time.monotonic()
        outcome = fetch(transport, peer.address, [b"a"], Memory(), 0.4)
        assert time.monotonic() - begin < 1.5
        assert isinstance(outcome.error, DeadlineExceeded)
        assert not any(outcome.landed)


def garbage(frames: FrameSocket, _request_id: int, _: Fetch) -> None:
    frames.send([b"HTTP/1.1 400 Bad Request\r\n\r\n"], 5)


def oversized(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([HEADER.pack(MAGIC, 1, Kind.FETCH | 0x80, request_id, 10, 1 << 50)], 5)


def another_reply(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id + 1, [None], 0)], 5)


def too_many_blocks(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [None] * 5, 0)], 5)


def no_blocks(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [], 0)], 5)


def other_sizes(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send([reply(request_id, [block(b"12345")], 4), b"1234"], 5)


@pytest.mark.parametrize(
    "answer", [garbage, oversized, another_reply, too_many_blocks, no_blocks, other_sizes]
)
def test_a_peer_that_breaks_the_protocol(transport: TcpTransport, answer: Answer) -> None:
    with rude(answer) as peer:
        memory = Memory()
        outcome = fetch(transport, peer.address, [b"a"], memory)
        assert isinstance(outcome.error, ProtocolError)
        assert memory.calls == 0


def wrong_bytes(frames: FrameSocket, request_id: int, _: Fetch) -> None:
    frames.send(
        [reply(request_id, [block(VALUE), block(b"good")], len(VALUE) + 4), bytes(len(VALUE)), b"good"], 5
    )


def test_wrong_bytes_are_a_miss_and_logged(transport: TcpTransport, caplog: pytest.LogCaptureFixture) -> None:
    with rude(wrong_bytes) as peer:
        assert fetch(transport, peer.address, [b"a", b"b"], Memory()) == Outcome([False, True])
    assert "block arrived damaged" in caplog.text
    assert "key=a" in caplog.text


def test_a_dead_peer_costs_time_once(transport: TcpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.transports.breaker.FIRST_S", 30)
    monkeypatch.setattr("mooncaked.transports.breaker.LONGEST_S", 30)
    with rude(hangs) as peer:
        assert isinstance(fetch(transport, peer.address, [b"a"], Memory(), 0.6).error, DeadlineExceeded)
        begin = time.monotonic()
        for _ in range(100):
            outcome = fetch(transport, peer.address, [b"a"], Memory())
            assert isinstance(outcome.error, Unreachable)
        assert "failed 1 times" in str(outcome.error)
        assert time.monotonic() - begin < 1
        assert peer.connections == 1


def test_a_short_deadline_says_nothing_about_a_peer(transport: TcpTransport) -> None:
    with rude(hangs) as peer:
        for _ in range(3):
            assert isinstance(fetch(transport, peer.address, [b"a"], Memory(), 0.05).error, DeadlineExceeded)


def test_a_peer_that_comes_back_is_used_again(transport: TcpTransport) -> None:
    far = TcpFar()
    far.put(b"k", b"value")
    address = far.address
    assert fetch(transport, address, [b"k"], Memory()).landed == [True]
    far.close()
    assert fetch(transport, address, [b"k"], Memory()).error is not None
    again = _far_at(address)
    again.put(b"k", b"value")
    deadline = soon(10)
    while fetch(transport, address, [b"k"], Memory()).landed != [True]:
        assert not deadline.passed()
        time.sleep(0.02)
    again.close()


def _far_at(address: str) -> TcpFar:
    far = TcpFar()
    far.server.close()
    far.server = PeerServer(far.store, node_id="far", address=address)
    far.address = far.server.start()
    return far


def test_a_restarted_peer_is_not_noticed_by_an_idle_connection(transport: TcpTransport) -> None:
    far = TcpFar()
    far.put(b"k", b"value")
    address = far.address
    assert fetch(transport, address, [b"k"], Memory()).landed == [True]
    far.close()
    again = _far_at(address)
    again.put(b"k", b"value")
    assert fetch(transport, address, [b"k"], Memory()).landed == [True]
    again.close()


def test_connections_to_a_peer_are_bounded(transport: TcpTransport) -> None:
    go_on = threading.Event()

    def waits(frames: FrameSocket, request_id: int, _: Fetch) -> None:
        go_on.wait(10)
        frames.send([reply(request_id, [block(b"v")], 1), b"v"], 5)
        frames.receive(1)

    with rude(waits) as peer:
        results: list[Outcome] = []
        threads = [
            threading.Thread(target=lambda: results.append(fetch(transport, peer.address, [b"a"], Memory())))
            for _ in range(tcp.CONNECTIONS_MAX)
        ]
        for thread in threads:
            thread.start()
        deadline = soon()
        while peer.connections < tcp.CONNECTIONS_MAX:
            assert not deadline.passed()
            time.sleep(0.005)
        late = fetch(transport, peer.address, [b"a"], Memory(), 0.2)
        assert isinstance(late.error, DeadlineExceeded)
        assert "waiting for a free connection" in str(late.error)
        go_on.set()
        for thread in threads:
            thread.join()
        assert [outcome.landed for outcome in results] == [[True]] * tcp.CONNECTIONS_MAX
        assert peer.connections == tcp.CONNECTIONS_MAX


def test_closing_wakes_who_waits(transport: TcpTransport) -> None:
    with rude(hangs) as peer:
        results: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: results.append(fetch(transport, peer.address, [b"a"], Memory()))
        )
        thread.start()
        deadline = soon()
        while not peer.connections:
            assert not deadline.passed()
            time.sleep(0.005)
        begin = time.monotonic()
        transport.close()
        thread.join(5)
        assert time.monotonic() - begin < 1
        assert results[0].error is not None


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:0", "127.0.0.1:1"])
def test_addresses_that_lead_nowhere(transport: TcpTransport, address: str) -> None:
    assert isinstance(fetch(transport, address, [b"a"], Memory()).error, Unreachable)


def test_a_refusal_of_the_greeting_says_why(transport: TcpTransport) -> None:
    far = TcpFar()
    far.server.close()
    far.server = PeerServer(far.store, node_id="far", address="127.0.0.1:0", token="secret")
    outcome = fetch(transport, far.server.start(), [b"k"], Memory())
    assert isinstance(outcome.error, Unauthenticated)
    far.close()
