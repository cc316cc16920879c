"""The index follows the nodes: snapshots, deltas, gaps, deaths and returns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mooncaked.clock import SystemClock
from mooncaked.conductor import link
from mooncaked.conductor import subscriber as subscribing
from mooncaked.conductor.index import PrefixIndex
from mooncaked.conductor.subscriber import Subscriber
from tests.cluster.waiting import eventually
from tests.fakes.node import FakeNode, key, removed, stored


class Setup:
    """A subscriber that runs, and what it has said of nodes that are away."""

    def __init__(self, token: str | None = None) -> None:
        self.index = PrefixIndex(10_000)
        self.away: list[frozenset[str]] = []
        self.subscriber = Subscriber(
            self.index,
            token=token,
            clock=SystemClock(),
            rng=random.Random(1),
            on_away=self.away.append,
        )
        self.nodes: list[FakeNode] = []

    async def node(self, name: str, *numbers: int, **fields: object) -> FakeNode:
        node = FakeNode(name, events=stored(*numbers), **fields)  # type: ignore[arg-type]
        await node.start()
        self.nodes.append(node)
        return node

    def follow(self, *nodes: FakeNode) -> None:
        self.subscriber.update({node.node_id: node.record for node in nodes})

    def holds(self, node_id: str, *numbers: int) -> bool:
        """Whether lookups see exactly these blocks (of 0 to 19) at the node."""
        seen = {n for n in range(20) if node_id in {h.node_id for h in self.index.holders("ns", key(n))}}
        return seen == set(numbers)

    def state(self, node_id: str) -> subscribing.SubscriptionState:
        return next(s for s in self.subscriber.states() if s.node_id == node_id)


@pytest.fixture
async def setup() -> AsyncIterator[Callable[..., Awaitable[Setup]]]:
    made: list[tuple[Setup, asyncio.Task[None]]] = []

    async def make(token: str | None = None) -> Setup:
        result = Setup(token)
        made.append((result, asyncio.create_task(result.subscriber.run())))
        return result

    yield make
    for result, task in made:
        task.cancel()
        await asyncio.wait([task])
        for node in result.nodes:
            await node.kill()
        result.index.check_integrity()


Make = Callable[..., Awaitable[Setup]]


async def test_a_snapshot_and_then_deltas(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1, 2, 3, 4, 5)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1, 2, 3, 4, 5), 5)
    assert s.subscriber.settled()
    node.say(stored(6) + removed(2))
    await eventually(lambda: s.holds("n1", 1, 3, 4, 5, 6), 5)
    assert s.state("n1").sequence == 7
    assert s.state("n1").snapshots == 1


async def test_an_empty_node_has_an_empty_snapshot(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1")
    s.follow(node)
    await eventually(lambda: s.state("n1").state == "live", 5)
    node.say(stored(1))
    await eventually(lambda: s.holds("n1", 1), 5)


async def test_several_nodes(setup: Make) -> None:
    s = await setup()
    first, second = await s.node("n1", 1, 2), await s.node("n2", 2, 3)
    s.follow(first, second)
    await eventually(lambda: s.holds("n1", 1, 2) and s.holds("n2", 2, 3), 5)


async def test_a_gap_asks_for_a_snapshot_and_keeps_the_blocks_meanwhile(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1, 2)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1, 2), 5)
    node.skip(removed(1))
    node.say(stored(3))
    assert s.holds("n1", 1, 2)
    await eventually(lambda: s.holds("n1", 2, 3), 5)
    assert s.state("n1").snapshots == 2
    assert s.away in ([], [frozenset()])


async def test_a_killed_node_leaves_the_index_at_once(setup: Make) -> None:
    s = await setup()
    node, other = await s.node("n1", 1, 2), await s.node("n2", 2)
    s.follow(node, other)
    await eventually(lambda: s.holds("n1", 1, 2) and s.holds("n2", 2), 5)
    await node.kill()
    took = await eventually(lambda: s.holds("n1"), 5)
    assert took < 1
    assert s.holds("n2", 2)
    assert s.away[-1] == frozenset({"n1"})
    assert "refused" in s.state("n1").problem or "closed" in s.state("n1").problem


async def test_a_node_that_falls_silent_leaves_the_index(
    setup: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.3)
    s = await setup()
    node = await s.node("n1", 1)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1), 5)
    node.silent = True
    await eventually(lambda: s.holds("n1"), 5)
    assert "nothing came" in s.state("n1").problem


async def test_a_broken_connection_is_resumed_without_a_snapshot(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1, 2)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1, 2), 5)
    node.skip(stored(3))
    node.disconnect()
    await eventually(lambda: s.holds("n1", 1, 2, 3), 5)
    assert s.state("n1").snapshots == 1
    assert node.subscribes[-1].sequence == 2
    assert s.away[-1] == frozenset()


async def test_a_node_that_began_anew_gives_a_snapshot(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1, 2)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1, 2), 5)
    await node.kill()
    node.epoch, node.events = 2, stored(9)
    await node.start()
    s.follow(node)
    await eventually(lambda: s.holds("n1", 9), 5)
    await eventually(lambda: s.index.blocks == 1, 5, "what the old one held is swept out")


async def test_a_node_that_moves_is_found_at_its_new_address(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1)
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1), 5)
    await node.kill()
    await eventually(lambda: s.state("n1").state == "away", 5)
    node.port, node.epoch = 0, 2
    await node.start()
    s.follow(node)
    await eventually(lambda: s.holds("n1", 1), 2)


async def test_a_node_that_leaves_etcd_is_forgotten(setup: Make) -> None:
    s = await setup()
    node, other = await s.node("n1", 1), await s.node("n2", 1)
    s.follow(node, other)
    await eventually(lambda: s.holds("n1", 1) and s.holds("n2", 1), 5)
    s.follow(other)
    assert s.holds("n1")
    assert [state.node_id for state in s.subscriber.states()] == ["n2"]


async def test_the_token_is_shown(setup: Make) -> None:
    s = await setup("secret")
    node, strict = await s.node("n1", 1, token="secret"), await s.node("n2", 1, token="other")
    s.follow(node, strict)
    await eventually(lambda: s.holds("n1", 1), 5)
    await eventually(lambda: s.state("n2").state == "away", 5)
    assert "the token is wrong" in s.state("n2").problem


async def test_another_node_at_the_address_is_not_taken_for_it(setup: Make) -> None:
    s = await setup()
    node = await s.node("n1", 1)
    impostor = node.record
    s.subscriber.update({"n9": type(impostor)(**{**_fields(impostor), "node_id": "n9"})})
    await eventually(lambda: s.state("n9").state == "away", 5)
    assert "node n1 answers there" in s.state("n9").problem


async def test_garbage_is_survived(setup: Make) -> None:
    s = await setup()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
        await reader.read(1)
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    node = await s.node("n1", 1)
    bad = FakeNode("n2", port=server.sockets[0].getsockname()[1])
    s.follow(node, bad)
    await eventually(lambda: s.holds("n1", 1) and s.state("n2").state == "away", 5)
    assert "Malformed" in s.state("n2").problem
    server.close()


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]
