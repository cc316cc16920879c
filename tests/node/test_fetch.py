"""Fetching from other nodes: what is shared, what is tried, what counts as a miss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
import xxhash

from mooncaked.api.fetch import KEYS_MAX, Fetcher
from mooncaked.api.protocol import PutItem
from mooncaked.clock import Deadline, SystemClock
from mooncaked.errors import Unreachable
from mooncaked.store import Store
from tests.fakes.fake_transport import FakeTransport
from tests.fakes.heap_pool import HeapPool


class Here:
    """A node of its own with a fake network: nodes n1, n2, n3 at addresses a1, a2, a3."""

    def __init__(self, size: int = 1 << 20, threads_max: int = 16) -> None:
        self.pool = HeapPool(size, 0)
        self.store = Store(self.pool, high_watermark=1, low_watermark=1, epoch=1, clock=SystemClock())
        self.transport = FakeTransport()
        self.addresses = {f"n{i}": f"a{i}" for i in range(1, 4)}
        self.located: dict[bytes, list[str]] = {}
        self.locate_fails = False
        self.fetcher = Fetcher(
            self.store,
            self.transport,
            self.addresses.get,
            self.locate,
            node_id="me",
            threads_max=threads_max,
        )

    async def locate(self, _namespace: str, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        if self.locate_fails:
            raise Unreachable(what="the conductor", address="x", cause="refused", remedy="")
        return {key: nodes for key, nodes in self.located.items() if key in keys}

    def has(self, node: str, *keys: bytes) -> None:
        """Let another node have blocks whose values are their keys, a thousand times."""
        self.transport.nodes.setdefault(self.addresses[node], {}).update(
            {("n", key): key * 1000 for key in keys}
        )

    async def fetch(
        self, keys: list[bytes], *sources: str, locate: bool = False, seconds: float = 10
    ) -> dict[bytes, str]:
        deadline = Deadline(SystemClock(), seconds)
        return await self.fetcher.fetch("n", keys, sources, locate, deadline)

    def value(self, key: bytes) -> bytes | None:
        """What this node has now."""
        info = self.store.block_info("n", key)
        return None if info is None else bytes(self.store.view(info.region, info.offset, info.size))

    async def close(self) -> None:
        self.transport.close()
        await self.fetcher.close()
        stats = self.store.stats()
        assert (stats.owners, stats.filling, stats.pinned) == (0, 0, 0)
        self.store.check_integrity()


@pytest.fixture
async def here() -> AsyncIterator[Here]:
    here = Here()
    yield here
    await here.close()


async def test_a_block_comes_from_its_source_and_stays(here: Here) -> None:
    here.has("n1", b"a", b"b")
    here.transport.parents[b"b"] = b"a"
    assert await here.fetch([b"a", b"b", b"x"], "n1") == {b"a": "n1", b"b": "n1"}
    assert here.value(b"a") == b"a" * 1000
    info = here.store.block_info("n", b"b")
    assert info is not None
    assert info.parent == b"a"
    assert info.checksum == xxhash.xxh3_64_intdigest(b"b" * 1000)


async def test_sources_are_tried_in_order_for_what_is_still_missing(here: Here) -> None:
    here.has("n2", b"a", b"b")
    here.has("n3", b"b", b"c")
    assert await here.fetch([b"a", b"b", b"c"], "n1", "n2", "n3") == {b"a": "n2", b"b": "n2", b"c": "n3"}
    assert here.transport.calls == [
        ("a1", [b"a", b"b", b"c"]),
        ("a2", [b"a", b"b", b"c"]),
        ("a3", [b"c"]),
    ]


async def test_this_node_and_unknown_nodes_are_not_asked(here: Here) -> None:
    assert await here.fetch([b"a"], "me", "nobody", "", "n1", "n1") == {}
    assert here.transport.calls == [("a1", [b"a"])]


async def test_the_conductor_is_asked_for_what_the_sources_lack(here: Here) -> None:
    here.has("n1", b"a")
    here.has("n2", b"b")
    here.has("n3", b"b", b"c")
    here.located = {b"a": ["n1"], b"b": ["n2", "n3"], b"c": ["n3"], b"d": ["n2", "gone"]}
    found = await here.fetch([b"a", b"b", b"c", b"d"], "n1", locate=True)
    assert found == {b"a": "n1", b"b": "n3", b"c": "n3"} or found == {b"a": "n1", b"b": "n2", b"c": "n3"}
    assert "a1" not in [address for address, _ in here.transport.calls[1:]]


async def test_a_conductor_that_is_away_is_a_miss(here: Here) -> None:
    here.locate_fails = True
    assert await here.fetch([b"a"], locate=True) == {}


async def test_two_who_want_the_same_share_one_transfer(here: Here) -> None:
    here.has("n1", b"a", b"b", b"c")
    here.transport.gate.clear()
    first = asyncio.create_task(here.fetch([b"a", b"b"], "n1"))
    await asyncio.to_thread(here.transport.waiting.wait, 5)
    second = asyncio.create_task(here.fetch([b"b", b"c"], "n1"))
    await asyncio.sleep(0)
    here.transport.gate.set()
    assert await first == {b"a": "n1", b"b": "n1"}
    assert await second == {b"b": "n1", b"c": "n1"}
    asked = [key for _, keys in here.transport.calls for key in keys]
    assert sorted(asked) == [b"a", b"b", b"c"]


async def test_a_transfer_goes_on_when_the_first_who_wanted_it_has_gone(here: Here) -> None:
    here.has("n1", b"a")
    here.transport.gate.clear()
    first = asyncio.create_task(here.fetch([b"a"], "n1"))
    await asyncio.to_thread(here.transport.waiting.wait, 5)
    second = asyncio.create_task(here.fetch([b"a"], "n1"))
    await asyncio.sleep(0)
    first.cancel()
    here.transport.gate.set()
    assert await second == {b"a": "n1"}
    assert len(here.transport.calls) == 1


async def test_who_waited_for_a_transfer_in_vain_tries_its_own_sources(here: Here) -> None:
    here.has("n2", b"a")
    here.transport.nodes["a1"] = {}
    here.transport.gate.clear()
    first = asyncio.create_task(here.fetch([b"a"], "n1"))
    await asyncio.to_thread(here.transport.waiting.wait, 5)
    second = asyncio.create_task(here.fetch([b"a"], "n2"))
    await asyncio.sleep(0)
    here.transport.gate.set()
    assert await first == {}
    assert await second == {b"a": "n2"}


async def test_a_deadline_ends_the_wait_and_what_comes_later_stays_consistent(here: Here) -> None:
    here.has("n1", b"a")
    here.transport.gate.clear()
    assert await here.fetch([b"a"], "n1", seconds=0.1) == {}
    here.transport.gate.set()
    assert await here.fetch([b"a"], "n1") == {b"a": "n1"}


async def test_a_node_that_breaks_gives_what_it_had_given_whole(here: Here) -> None:
    here.has("n1", b"a", b"b", b"c")
    here.transport.breaks_after["a1"] = 1
    assert await here.fetch([b"a", b"b", b"c"], "n1") == {b"a": "n1"}
    assert here.value(b"a") == b"a" * 1000
    assert here.value(b"b") is here.value(b"c") is None
    assert here.store.stats().filling == 0


async def test_a_broken_nodes_rest_comes_from_the_next(here: Here) -> None:
    here.has("n1", b"a", b"b")
    here.has("n2", b"a", b"b")
    here.transport.breaks_after["a1"] = 1
    assert await here.fetch([b"a", b"b"], "n1", "n2") == {b"a": "n1", b"b": "n2"}


async def test_damaged_bytes_are_a_miss(here: Here) -> None:
    here.has("n1", b"a", b"b")
    here.transport.damaged = {b"a"}
    assert await here.fetch([b"a", b"b"], "n1") == {b"b": "n1"}
    assert here.value(b"a") is None


async def test_a_key_that_is_being_written_here_is_waited_for(here: Here) -> None:
    here.has("n1", b"a", b"b")
    owner = here.store.new_owner()
    (slot,) = here.store.begin_put(owner, "n", [PutItem(key=b"a", size=5)])
    fetching = asyncio.create_task(here.fetch([b"a", b"b"], "n1"))
    await asyncio.to_thread(_until_here, here.store, b"b")
    here.store.view(slot.region, slot.offset, 5)[:] = b"local"
    here.store.commit(owner, [slot.token], [xxhash.xxh3_64_intdigest(b"local")])
    here.store.drop_owner(owner)
    assert await fetching == {b"a": "", b"b": "n1"}
    assert here.value(b"a") == b"local"


def _until_here(store: Store, key: bytes) -> None:
    sequence = 0
    while not store.exists("n", [key])[0]:
        sequence = store.wait_events(sequence, 5)


async def test_a_writer_that_gives_up_leaves_a_miss(here: Here) -> None:
    here.has("n1", b"a", b"b")
    owner = here.store.new_owner()
    here.store.begin_put(owner, "n", [PutItem(key=b"a", size=5)])
    fetching = asyncio.create_task(here.fetch([b"a", b"b"], "n1"))
    await asyncio.to_thread(_until_here, here.store, b"b")
    here.store.drop_owner(owner)
    assert await fetching == {b"b": "n1"}


async def test_a_key_that_came_meanwhile_is_there(here: Here) -> None:
    here.has("n1", b"a")
    here.transport.gate.clear()
    fetching = asyncio.create_task(here.fetch([b"a"], "n1"))
    await asyncio.to_thread(here.transport.waiting.wait, 5)
    owner = here.store.new_owner()
    (slot,) = here.store.begin_put(owner, "n", [PutItem(key=b"a", size=1)])
    here.store.commit(owner, [slot.token], [0])
    here.store.drop_owner(owner)
    here.transport.gate.set()
    assert await fetching == {b"a": ""}


async def test_no_room_is_a_miss_and_disturbs_no_others() -> None:
    here = Here(size=16 << 10)
    here.has("n1", b"a", b"c")
    here.transport.nodes["a1"]["n", b"b"] = bytes(100_000)
    assert await here.fetch([b"a", b"b", b"c"], "n1") == {b"a": "n1", b"c": "n1"}
    await here.close()


async def test_many_keys_take_several_exchanges(here: Here) -> None:
    keys = [f"{i}".encode() for i in range(KEYS_MAX + 500)]
    here.transport.nodes["a1"] = {("n", key): key for key in keys}
    assert await here.fetch(keys, "n1") == dict.fromkeys(keys, "n1")
    assert [len(asked) for _, asked in here.transport.calls] == [KEYS_MAX, 500]


async def test_more_fetches_than_threads(here: Here) -> None:
    few = Here(threads_max=2)
    few.has("n1", *(f"{i}".encode() for i in range(50)))
    found = await asyncio.gather(*(few.fetch([f"{i}".encode()], "n1") for i in range(50)))
    assert all(found)
    await few.close()


async def test_a_fetch_from_a_thread(here: Here) -> None:
    here.has("n1", b"a")
    deadline = Deadline(SystemClock(), 10)
    found = await asyncio.to_thread(here.fetcher.fetch_from_thread, "n", [b"a"], ["n1"], deadline)
    assert found == {b"a": "n1"}


async def test_closing_ends_what_is_under_way(here: Here) -> None:
    here.has("n1", b"a")
    here.transport.gate.clear()
    fetching = asyncio.create_task(here.fetch([b"a"], "n1"))
    await asyncio.to_thread(here.transport.waiting.wait, 5)
    here.transport.close()
    await here.fetcher.close()
    assert await fetching in ({}, {b"a": "n1"})
    assert threading.active_count() < 50
