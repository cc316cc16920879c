"""Blocks that lie on this node's disks: brought up for engines, peers and orders, before others are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import xxhash

from mooncaked.api.fetch import Fetcher
from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import Fetch, FetchReply, Kind, Order, OrderReply, Side, StoredItem, decode_reply
from mooncaked.clock import Deadline, SystemClock
from mooncaked.store import Store
from mooncaked.tiers import Tiers
from mooncaked.tiers.admission import ALL
from mooncaked.verifier import Verifier
from tests.fakes.fake_disks import FakeDisks
from tests.fakes.fake_transport import FakeTransport
from tests.fakes.heap_pool import HeapPool
from tests.node.daemons import until
from tests.node.raw import Raw

NS = "n"


class Here:
    """A node with disks and a fake network, in which n1 is at a1."""

    def __init__(self) -> None:
        clock = SystemClock()
        self.store = Store(HeapPool(1 << 20), high_watermark=1, low_watermark=1, epoch=1, clock=clock)
        self.tiers = Tiers(self.store, clock, Verifier(self.store, clock).verify_keys, admission=ALL)
        self.disks = FakeDisks(self.tiers.lost)
        self.transport = FakeTransport()
        self.transport.nodes["a1"] = {}

    def on_disk(self, *keys: bytes) -> None:
        for key in keys:
            self.disks.put(NS, key, key * 1000, meta=b"meta")

    def at_n1(self, *keys: bytes) -> None:
        self.transport.nodes["a1"].update({(NS, key): key * 1000 for key in keys})

    def value(self, key: bytes) -> bytes | None:
        info = self.store.block_info(NS, key)
        return None if info is None else bytes(self.store.view(info.region, info.offset, info.size))

    def close(self) -> None:
        self.tiers.close()
        stats = self.store.stats()
        assert (stats.owners, stats.filling, stats.pinned) == (0, 0, 0)
        self.store.check_integrity()


@pytest.fixture
def here() -> Iterator[Here]:
    here = Here()
    here.tiers.attach(here.disks)
    yield here
    here.close()


@pytest.fixture
async def fetcher(here: Here) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(
        here.store, here.transport, {"n1": "a1"}.get, node_id="me", ask=here.tiers.ask, clock=SystemClock()
    )
    yield fetcher
    here.transport.close()
    await fetcher.close()


async def fetch(fetcher: Fetcher, keys: list[bytes], seconds: float = 10.0) -> dict[bytes, str]:
    return await fetcher.fetch(NS, keys, ["n1"], False, Deadline(SystemClock(), seconds))


async def test_what_lies_on_a_disk_of_ours_comes_from_there(here: Here, fetcher: Fetcher) -> None:
    here.on_disk(b"a", b"b")
    here.at_n1(b"a", b"b", b"c")
    assert await fetch(fetcher, [b"a", b"b", b"c", b"d"]) == {b"a": "", b"b": "", b"c": "n1"}
    assert here.transport.calls == [("a1", [b"c", b"d"])]
    assert [here.value(key) for key in (b"a", b"b", b"c")] == [b"a" * 1000, b"b" * 1000, b"c" * 1000]
    info = here.store.block_info(NS, b"a")
    assert info is not None
    assert info.meta == b"meta"


async def test_what_a_disk_cannot_read_comes_from_another_node(here: Here, fetcher: Fetcher) -> None:
    here.on_disk(b"a", b"b")
    here.disks.damaged = {b"a"}
    here.at_n1(b"a")
    assert await fetch(fetcher, [b"a", b"b"]) == {b"a": "n1", b"b": ""}
    assert here.value(b"a") == b"a" * 1000


async def test_a_slow_disk_holds_nobody_beyond_the_deadline(here: Here, fetcher: Fetcher) -> None:
    here.on_disk(b"a")
    here.at_n1(b"b")
    here.disks.reading.clear()
    assert await fetch(fetcher, [b"a", b"b"], seconds=0.3) == {b"b": "n1"}
    here.disks.reading.set()
    until(lambda: here.value(b"a") == b"a" * 1000, "a coming up", 10)


# --- peers -------------------------------------------------------------------------------------------------


@pytest.fixture
def peers(here: Here) -> Iterator[str]:
    server = PeerServer(
        here.store,
        node_id="me",
        address="127.0.0.1:0",
        bring_up=here.tiers.bring_up,
        expect=here.tiers.expect,
    )
    yield server.start()
    server.close()


def fetched(raw: Raw, keys: list[bytes]) -> dict[bytes, bytes]:
    """What a peer gets for `keys`, in one exchange."""
    raw.tell(Kind.FETCH, Fetch(namespace=NS, keys=keys))
    head, data = raw.frame()
    reply = decode_reply(head, data, FetchReply, "the node")
    found: dict[bytes, bytes] = {}
    for key, block in zip(keys, reply.blocks, strict=True):
        if block is not None:
            found[key] = raw.exactly(block.size)
            assert xxhash.xxh3_64_intdigest(found[key]) == block.checksum
    return found


def test_a_peer_gets_what_lies_on_a_disk(here: Here, peers: str) -> None:
    keys = [b"%d" % number for number in range(100)]
    here.on_disk(*keys[:95])
    with Raw(peers) as raw:
        raw.greet(side=Side.PEER)
        assert fetched(raw, keys) == {key: key * 1000 for key in keys[:95]}


def test_a_peer_gets_a_block_whose_checksum_nobody_has_worked_out(here: Here, peers: str) -> None:
    owner = here.store.new_owner()
    (room,) = here.store.reserve(owner, [1000])
    here.store.view(room.region, room.offset, 1000)[:] = b"v" * 1000
    assert here.store.put_reserved(owner, NS, [StoredItem(token=room.token, key=b"k", size=1000)]) == [
        "stored"
    ]
    with Raw(peers) as raw:
        raw.greet(side=Side.PEER)
        assert fetched(raw, [b"k"]) == {b"k": b"v" * 1000}
    here.store.drop_owner(owner)


def test_an_order_to_prefetch_brings_blocks_up(here: Here, peers: str) -> None:
    here.on_disk(b"a", b"b")
    with Raw(peers) as raw:
        raw.greet(side=Side.CONDUCTOR)
        order = Order(term=3, action="prefetch", namespace=NS, keys=[b"a", b"b", b"c"])
        assert raw.ask(Kind.ORDER, order, OrderReply).done == [True, True, False]
        until(lambda: here.value(b"b") == b"b" * 1000, "they coming up", 10)
        assert raw.ask(Kind.ORDER, order, OrderReply).done == [True, True, False]


def test_without_disks_an_order_to_prefetch_finds_what_is_there(here: Here) -> None:
    server = PeerServer(here.store, node_id="me", address="127.0.0.1:0")
    try:
        with Raw(server.start()) as raw:
            raw.greet(side=Side.CONDUCTOR)
            order = Order(term=3, action="prefetch", namespace=NS, keys=[b"a"])
            assert raw.ask(Kind.ORDER, order, OrderReply).done == [False]
    finally:
        server.close()
