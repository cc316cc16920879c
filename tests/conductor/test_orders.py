"""Orders on their way to nodes: delivered over real sockets, and lost without harm."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import BATCH_KEYS_MAX
from mooncaked.clock import SystemClock
from mooncaked.conductor import orders as ordering
from mooncaked.conductor.messages import Prefetch
from mooncaked.conductor.orders import QUEUE_MAX, Orders
from mooncaked.keys import chain_keys
from mooncaked.store import Store
from mooncaked.tiers import Tiers
from mooncaked.tiers.admission import ALL
from mooncaked.types import NodeRecord, Tier
from mooncaked.verifier import Verifier
from tests.cluster.waiting import eventually
from tests.conductor.harness import pair, running
from tests.fakes.cluster_view import node_record
from tests.fakes.fake_disks import FakeDisks
from tests.fakes.heap_pool import HeapPool


class Node:
    """A node that notes what it is told to prefetch."""

    def __init__(self, node_id: str = "n1", token: str | None = None) -> None:
        store = Store(HeapPool(1 << 16), high_watermark=1, low_watermark=1, epoch=1, clock=SystemClock())
        self.told: list[tuple[str, list[bytes]]] = []
        self.heeding = threading.Event()  # orders are answered once it is set
        self.heeding.set()
        self.server = PeerServer(
            store, node_id=node_id, address="127.0.0.1:0", token=token, expect=self._expect
        )
        self.record = node_record(node_id, self.server.start())

    def _expect(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        assert self.heeding.wait(10)
        self.told.append((namespace, list(keys)))
        return [True] * len(keys)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(token="secret")
    yield node
    node.heeding.set()
    node.server.close()


class Setup:
    """Orders to the nodes in `nodes`, and what became of them."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.results: Counter[str] = Counter()
        self.orders = Orders(lambda: self.nodes, "secret", lambda result: self.results.update([result]))

    def order(self, *keys: bytes, node_id: str = "n1", term: int = 1) -> None:
        self.orders.prefetch(term, [Prefetch(node_id=node_id, namespace="ns", keys=list(keys))])


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup()
    yield setup
    async with asyncio.timeout(2):
        await setup.orders.close()


async def test_orders_arrive_in_turn_over_one_connection(setup: Setup, node: Node) -> None:
    setup.nodes = {"n1": node.record}
    setup.order(b"a", b"b")
    setup.order(b"c")
    assert not node.told  # nobody waited
    await eventually(lambda: setup.results == {"obeyed": 2}, 5)
    setup.order(b"d")
    await eventually(lambda: setup.results == {"obeyed": 3}, 5)
    assert node.told == [("ns", [b"a", b"b"]), ("ns", [b"c"]), ("ns", [b"d"])]
    assert len(node.server._links) == 1


async def test_a_connection_is_closed_when_nothing_is_left_to_say(
    setup: Setup, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordering, "LINGER_S", 0.05)
    setup.nodes = {"n1": node.record}
    for count in (1, 2):
        setup.order(b"a")
        await eventually(lambda n=count: setup.results == {"obeyed": n}, 5)  # type: ignore[misc]
        await eventually(lambda: not node.server._links, 5)


async def test_more_keys_than_an_order_may_name(setup: Setup, node: Node) -> None:
    setup.nodes = {"n1": node.record}
    keys = [b"%016d" % number for number in range(BATCH_KEYS_MAX + 1)]
    setup.order(*keys)
    await eventually(lambda: setup.results == {"obeyed": 1}, 5)
    assert node.told == [("ns", keys[:-1])]


async def test_a_node_that_does_not_answer_is_told_nothing_until_the_next_order(
    setup: Setup, node: Node
) -> None:
    setup.nodes = {"n1": node_record("n1", "127.0.0.1:1")}
    setup.order(b"a")
    setup.order(b"b")
    setup.order(b"c", node_id="nobody")
    await eventually(lambda: setup.results == {"failed": 3}, 5)
    setup.nodes = {"n1": node.record}
    setup.order(b"d")
    await eventually(lambda: setup.results == {"failed": 3, "obeyed": 1}, 5)
    assert node.told == [("ns", [b"d"])]


async def test_a_node_that_dies_loses_what_was_on_its_way(setup: Setup, node: Node) -> None:
    setup.nodes = {"n1": node.record}
    setup.order(b"a")
    await eventually(lambda: setup.results == {"obeyed": 1}, 5)
    node.server.close()
    setup.order(b"b")
    setup.order(b"c")
    await eventually(lambda: setup.results == {"obeyed": 1, "failed": 2}, 5)


async def test_a_full_queue_turns_orders_away(setup: Setup, node: Node) -> None:
    other = Node("n2", token="secret")
    setup.nodes = {"n1": node.record, "n2": other.record}
    node.heeding.clear()
    for _ in range(QUEUE_MAX + 3):
        setup.order(b"a")
    assert setup.results == {"full": 3}
    setup.order(b"b", node_id="n2")
    await eventually(lambda: setup.results == {"full": 3, "obeyed": 1}, 5)  # the slow one holds nobody up
    node.heeding.set()
    await eventually(lambda: setup.results == {"full": 3, "obeyed": 1 + QUEUE_MAX}, 5)
    other.server.close()


async def test_a_term_that_is_over_is_said_once(
    setup: Setup, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    setup.nodes = {"n1": node.record}
    node.server.orders.fence.pass_(7)
    setup.order(b"a", term=6)
    setup.order(b"b", term=6)
    setup.order(b"c", term=7)
    await eventually(lambda: setup.results == {"stale": 2, "obeyed": 1}, 5)
    assert node.told == [("ns", [b"c"])]
    refused = [r for r in caplog.records if r.name == ordering.__name__]
    assert len(refused) == 1


# --- all together ------------------------------------------------------------------------------------------


class NodeWithDisks:
    """Everything of a node but its process: store, disks, and the server that the conductor talks to."""

    def __init__(self, node_id: str) -> None:
        clock = SystemClock()
        self.store = Store(HeapPool(1 << 20), high_watermark=1, low_watermark=1, epoch=1, clock=clock)
        self.tiers = Tiers(self.store, clock, Verifier(self.store, clock).verify_keys, admission=ALL)
        self.disks = FakeDisks(self.tiers.lost)
        self.server = PeerServer(
            self.store,
            node_id=node_id,
            address="127.0.0.1:0",
            bring_up=self.tiers.bring_up,
            expect=self.tiers.expect,
        )
        self.record = node_record(node_id, self.server.start())

    def close(self) -> None:
        self.server.close()
        self.tiers.close()


@pytest.fixture
def disks() -> Iterator[NodeWithDisks]:
    node = NodeWithDisks("n1")
    yield node
    node.close()


async def test_a_placed_request_finds_its_blocks_in_memory(disks: NodeWithDisks) -> None:
    tokens = list(range(100, 140))
    keys = chain_keys("tiny", tokens, 4)
    for parent, key in zip([None, *keys], keys, strict=False):
        disks.disks.put("tiny", key, key * 100, parent=parent)
    disks.tiers.attach(disks.disks)
    async with running() as candidate:
        index, subscriber = candidate.candidate.conductor.index, candidate.candidate.subscriber
        candidate.view.nodes = {"n1": disks.record}
        await candidate.add(*pair())
        following = asyncio.create_task(subscriber.run())
        subscriber.update({"n1": disks.record})

        def tiers() -> list[set[Tier]]:
            return [{holder.tier for holder in index.holders("tiny", key)} for key in keys]

        await eventually(lambda: tiers() == [{Tier.SSD}] * len(keys), 5)
        _, decision, _ = await candidate.post("/v1/schedule", {"model": "tiny", "prompt": tokens})
        assert decision["prefill"] == "p1"
        assert "prefetch" not in decision
        await eventually(lambda: tiers() == [{Tier.DRAM, Tier.SSD}] * len(keys), 5)
        assert 'mooncaked_conductor_prefetch_orders_total{result="obeyed"} 1.0' in await candidate.metrics()
        assert disks.server.orders.fence.highest == 1

        await candidate.post("/v1/schedule", {"model": "tiny", "prompt": tokens})  # nothing is left to order
        assert 'mooncaked_conductor_prefetch_orders_total{result="obeyed"} 1.0' in await candidate.metrics()
        following.cancel()
        await asyncio.wait([following])
