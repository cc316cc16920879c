"""Store and GPU tier together: up when it is read often, and gone when it goes from the store, however."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import xxhash

from mooncaked.api.protocol import PutItem
from mooncaked.gpu import GpuTier
from mooncaked.pools.gpu import GpuPool
from mooncaked.store import Store, books
from mooncaked.tiers.gpu import GpuLink
from mooncaked.types import Tier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
NS = "tenant/model"


class Node:
    """8 pages of host memory and 2 of a GPU."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.store = Store(
            HeapPool(8 * PAGE), high_watermark=0.9, low_watermark=0.5, epoch=1, clock=self.clock
        )
        self.pool = GpuPool("cpu", 2 * PAGE, region=1000)
        self.tier = GpuTier([self.pool], self.store.log_upper)
        self.link = GpuLink(self.store, self.tier, uses_min=2)
        self.owner = self.store.new_owner()
        self.reader = self.tier.new_owner()

    def close(self) -> None:
        self.tier.close()
        self.link.close()
        self.tier.check_integrity()
        self.store.check_integrity()
        assert self.store.stats().pinned == 0
        self.pool.close()
        self.store.close()

    def put(self, key: bytes, data: bytes, ttl_ms: int = 0) -> None:
        item = PutItem(key=key, size=len(data), meta=b"m", ttl_ms=ttl_ms)
        (slot,) = self.store.begin_put(self.owner, NS, [item])
        assert slot.status == "ok"
        self.store.view(slot.region, slot.offset, len(data))[:] = data
        self.store.commit(self.owner, [slot.token], [xxhash.xxh3_64_intdigest(data)])

    def read(self, key: bytes) -> bytes | None:
        """From host memory."""
        (found,) = self.store.pin(self.owner, NS, [key])
        if found is None:
            return None
        data = bytes(self.store.view(found.region, found.offset, found.size))
        self.store.unpin(self.owner, [found.pin])
        return data

    def read_gpu(self, key: bytes) -> bytes | None:
        (found,) = self.tier.lookup(self.reader, NS, [key])
        if found is None:
            return None
        back = bytearray(found.size)
        self.pool.copy_out(found.offset, back).wait()
        self.tier.unpin(self.reader, [found.pin])
        return bytes(back)

    def read_twice(self, *keys: bytes) -> int:
        """How many blocks the node wants to bring up then."""
        for key in keys * 2:
            self.read(key)
        count = self.link.promote()
        self.tier.work()
        return count

    def has(self, *keys: bytes) -> list[bool]:
        return self.tier.contains(NS, keys)

    def events(self) -> list[tuple[bool, bytes, Tier]]:
        """All of them."""
        return [(e.stored, e.key, e.tier) for e in self.store.events_since(0) or []]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


def test_a_block_that_is_read_often_goes_up(node: Node) -> None:
    node.put(b"a", b"value" * 100)
    node.read(b"a")
    assert node.link.promote() == 0, "once is not often"
    assert node.read_twice(b"a", b"missing") == 1
    assert node.read_gpu(b"a") == node.read(b"a") == b"value" * 100
    assert node.store.stats().pinned == 0
    assert node.link.promote() == 0, "it is there already"
    assert node.events() == [(True, b"a", Tier.DRAM), (True, b"a", Tier.GPU)]
    assert {event.tier for event in node.store.snapshot()[1]} == {Tier.DRAM, Tier.GPU}


def test_what_only_the_node_itself_reads_does_not_go_up(node: Node) -> None:
    node.put(b"a", b"1")
    for _ in range(4):
        (found,) = node.store.pin(node.owner, NS, [b"a"], count=False)
        assert found is not None
        node.store.unpin(node.owner, [found.pin])
    assert node.link.promote() == 0


@pytest.mark.parametrize("how", ["removed", "evicted", "expired"])
def test_a_block_that_leaves_the_store_leaves_the_gpu_at_once(node: Node, how: str) -> None:
    node.put(b"a", b"1", ttl_ms=1000)
    node.read_twice(b"a")
    assert node.has(b"a") == [True]
    if how == "removed":
        assert node.store.remove(NS, [b"a"]) == [True]
    elif how == "evicted":
        for n in range(8):
            node.put(b"%d" % n, b"x" * PAGE)
    else:
        node.clock.now += 2.0
        node.store.look_after()
    assert (node.read(b"a"), node.read_gpu(b"a")) == (None, None)
    node.tier.work()
    assert node.events()[-1] == (False, b"a", Tier.GPU)
    node.put(b"a", b"2")
    node.read_twice(b"a")
    assert node.read_gpu(b"a") == b"2"


def test_a_reader_in_gpu_memory_keeps_the_bytes_of_a_block_that_is_removed(node: Node) -> None:
    node.put(b"a", b"1" * PAGE)
    node.read_twice(b"a")
    (found,) = node.tier.lookup(node.reader, NS, [b"a"])
    assert found is not None
    node.store.remove(NS, [b"a"])
    for key in (b"b", b"c"):
        node.put(key, key * PAGE)
    node.read_twice(b"b", b"c")
    assert node.has(b"b", b"c").count(True) == 1, "one of two pages is free"
    back = bytearray(PAGE)
    node.pool.copy_out(found.offset, back).wait()
    assert back == b"1" * PAGE
    node.tier.end_owner(node.reader)


def test_what_waits_to_be_brought_up_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "HOT_MAX", 1)
    for key in (b"a", b"b"):
        node.put(key, key)
    assert node.read_twice(b"a", b"b") == 1
    assert node.read_twice(b"b") == 1, "it is offered when it is read again"


def test_a_key_that_is_removed_and_stored_again_never_shows_its_old_bytes(node: Node) -> None:
    """While the old bytes are on their way up, by the tier's own thread."""
    node.tier.start()
    old_reads: list[int] = []
    stop = threading.Event()

    def promoter() -> None:
        while not stop.is_set():
            node.link.promote()

    thread = threading.Thread(target=promoter)
    thread.start()
    for version in range(300):
        node.put(b"a", b"%d" % version)
        for _ in range(2):
            node.read(b"a")
        limit_s = time.monotonic() + (10.0 if version % 10 == 0 else 0.0)
        while time.monotonic() < limit_s and node.read_gpu(b"a") is None:
            node.read(b"a")  # a block that was refused is offered again when it is read again
            node.tier.wait_idle(0.01)
        for _ in range(3):
            if (found := node.read_gpu(b"a")) is not None and found != b"%d" % version:
                old_reads.append(version)
        node.store.remove(NS, [b"a"])
        if node.read(b"a") is not None or node.read_gpu(b"a") is not None:
            old_reads.append(version)
    stop.set()
    thread.join()
    assert node.tier.wait_idle(10.0)
    assert not old_reads
    assert node.tier.stats().promoted >= 30
