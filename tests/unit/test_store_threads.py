"""The store under threads: writers, readers, removers and evictors at once, and those who wait."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import psutil
import pytest
import xxhash

from mooncaked.api.protocol import PutItem
from mooncaked.clock import SystemClock
from mooncaked.pools.dram import DramPool
from mooncaked.store import Store

NS = "tenant/model"
SIZES = (0, 100, 4096, 20_000, 65_536, 200_000)
LIMIT_S = 30.0  # for anything that should take no time


@contextmanager
def a_store(size: int, events_kept: int = 65_536) -> Iterator[Store]:
    pool = DramPool(size)
    store = Store(
        pool,
        high_watermark=0.9,
        low_watermark=0.7,
        epoch=1,
        clock=SystemClock(),
        events_kept=events_kept,
    )
    yield store
    store.close()
    store.check_integrity()
    pool.close()


def value_of(key: bytes, size: int) -> bytes:
    """What every writer writes under `key`: a reader can check it without having seen it."""
    return random.Random(key + b"%d" % size).randbytes(size)


def put(store: Store, owner: int, *keys: bytes, size: int = 4096) -> None:
    slots = store.begin_put(owner, NS, [PutItem(key=key, size=size) for key in keys])
    store.commit(owner, [slot.token for slot in slots], [0] * len(slots))


def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; fail when it does not within `LIMIT_S`."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


class Traffic:
    """Threads that do everything at once to a pool that is too small for all keys, until `stop` is set."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.keys = [b"%d" % number for number in range(64)]
        self.sizes = {key: SIZES[number % len(SIZES)] for number, key in enumerate(self.keys)}
        self.values = {key: value_of(key, size) for key, size in self.sizes.items()}
        self.stop = threading.Event()
        self.quiet = threading.Event()  # nothing changes any more
        self.stored = self.read = 0

    def write(self, seed: int) -> None:
        """Puts in small chains; some are given up, some end with their owner."""
        rng = random.Random(seed)
        owner = self.store.new_owner()
        while not self.stop.is_set():
            keys = rng.sample(self.keys, rng.randint(1, 6))
            parents = [None, *keys[:-1]]
            items = [
                PutItem(key=key, size=self.sizes[key], parent=parent)
                for key, parent in zip(keys, parents, strict=True)
            ]
            slots = self.store.begin_put(owner, NS, items)
            given = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot.status == "ok"]
            for key, slot in given:
                self.store.view(slot.region, slot.offset, self.sizes[key])[:] = self.values[key]
            tokens = [slot.token for _, slot in given]
            fate = rng.random()
            if fate < 0.8:
                checksums = [xxhash.xxh3_64_intdigest(self.values[key]) for key, _ in given]
                self.stored += sum(self.store.commit(owner, tokens, checksums))
            elif fate < 0.9:
                self.store.abort(owner, tokens)
            else:
                self.store.drop_owner(owner)
                owner = self.store.new_owner()

    def look(self, seed: int) -> None:
        """Reads: whatever is pinned must be the whole value, with its checksum, to the end of the pin."""
        rng = random.Random(seed)
        owner = self.store.new_owner()
        while not self.stop.is_set():
            keys = rng.sample(self.keys, rng.randint(1, 8))
            blocks = self.store.pin(owner, NS, keys)
            for key, block in zip(keys, blocks, strict=True):
                if block is None:
                    continue
                view = self.store.view(block.region, block.offset, block.size)
                assert xxhash.xxh3_64_intdigest(view) == block.checksum
                assert view == self.values[key]
                self.read += 1
            self.store.unpin(owner, [block.pin for block in blocks if block is not None])

    def disturb(self, seed: int) -> None:
        """Removes and evicts."""
        rng = random.Random(seed)
        while not self.stop.is_set():
            self.store.remove(NS, rng.sample(self.keys, 2))
            self.store.evict_to_low(self.stop.is_set)
            self.stop.wait(0.001)

    def follow(self) -> set[bytes]:
        """A subscriber: what it knows at the end, from one snapshot and the events after it."""
        sequence, blocks = self.store.snapshot()
        known = {block.key for block in blocks}
        while not self.quiet.is_set() or sequence < self.store.sequence:
            self.store.wait_events(sequence, timeout_s=0.05)
            events = self.store.events_since(sequence)
            assert events is not None, "the follower was left behind"
            for event in events:
                assert event.stored != (event.key in known), "each change is told once"
                (known.add if event.stored else known.remove)(event.key)
            sequence += len(events)
        return known


def test_readers_see_whole_values_whatever_others_do() -> None:
    with a_store(1 << 20) as store, ThreadPoolExecutor(8) as threads:
        traffic = Traffic(store)
        workers = [threads.submit(traffic.write, seed) for seed in (1, 2, 3)]
        workers += [threads.submit(traffic.look, seed) for seed in (4, 5)]
        workers.append(threads.submit(traffic.disturb, 6))
        follower = threads.submit(traffic.follow)
        try:
            for _ in range(6):  # the books agree at any moment, not only when all is quiet
                traffic.stop.wait(0.5)
                store.check_integrity()
        finally:
            traffic.stop.set()
            wait(workers, LIMIT_S)
            traffic.quiet.set()
        for worker in workers:
            worker.result()
        assert follower.result(LIMIT_S) == {block.key for block in store.snapshot()[1]}
        assert traffic.stored > 100
        assert traffic.read > 100
        assert store.stats().evicted > 10


def test_a_waiting_follower_is_woken_by_each_kind_of_change() -> None:
    with a_store(16 * 4096) as store, ThreadPoolExecutor(1) as threads:
        owner = store.new_owner()
        slots = store.begin_put(owner, NS, [PutItem(key=b"%d" % n, size=4096) for n in range(16)])
        changes: list[Callable[[], object]] = [
            lambda: store.commit(owner, [slot.token for slot in slots], [0] * 16),
            lambda: store.remove(NS, [b"0"]),
            lambda: store.begin_put(owner, NS, [PutItem(key=b"large", size=2 * 4096)]),
        ]
        for change in changes:
            sequence = store.sequence
            waiter = threads.submit(store.wait_events, sequence, LIMIT_S)
            until(lambda: len(store._logged) == 1)
            started = time.monotonic()
            change()
            assert waiter.result(LIMIT_S) > sequence
            assert time.monotonic() - started < LIMIT_S / 2


def test_a_waiting_follower_is_woken_by_eviction_ahead_of_need() -> None:
    with a_store(16 * 4096) as store, ThreadPoolExecutor(1) as threads:
        put(store, store.new_owner(), *(b"%d" % number for number in range(16)))
        waiter = threads.submit(store.wait_events, 16, LIMIT_S)
        until(lambda: len(store._logged) == 1)
        assert store.evict_to_low() == 5
        assert waiter.result(LIMIT_S / 2) > 16


ENDINGS: dict[str, Callable[[Store, int, int], object]] = {
    "commit": lambda store, owner, token: store.commit(owner, [token], [0]),
    "abort": lambda store, owner, token: store.abort(owner, [token]),
    "disconnect": lambda store, owner, token: store.drop_owner(owner),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_who_waits_for_another_writer_is_woken_when_that_one_ends(ending: str) -> None:
    with a_store(16 * 4096) as store, ThreadPoolExecutor(1) as threads:
        owner = store.new_owner()
        (slot,) = store.begin_put(owner, NS, [PutItem(key=b"k", size=1)])
        waiter = threads.submit(store.wait_settled, NS, [b"other", b"k"], LIMIT_S)
        until(lambda: len(store._settled) == 1)
        ENDINGS[ending](store, owner, slot.token)
        assert waiter.result(LIMIT_S / 2)


def test_closing_wakes_everybody() -> None:
    with a_store(16 * 4096) as store, ThreadPoolExecutor(2) as threads:
        store.begin_put(store.new_owner(), NS, [PutItem(key=b"k", size=1)])
        events = threads.submit(store.wait_events, 0, LIMIT_S)
        writer = threads.submit(store.wait_settled, NS, [b"k"], LIMIT_S)
        waiting = (store._logged, store._settled)
        until(lambda: all(len(each) == 1 for each in waiting))
        store.close()
        assert events.result(LIMIT_S / 2) == 0
        assert not writer.result(LIMIT_S / 2)


def churn(store: Store, rounds: int) -> None:
    """Everything that a connection does, over and over, always under new names."""
    for number in range(rounds):
        owner = store.new_owner()
        names = [b"%d/%d" % (number, index) for index in range(32)]
        namespace = f"tenant{number}"
        items = [PutItem(key=name, size=1000, meta=b"m" * 100) for name in names]
        slots = store.begin_put(owner, namespace, items)
        store.commit(owner, [slot.token for slot in slots[:16]], [0] * 16)
        store.pin(owner, namespace, names)
        store.remove(namespace, names[:4])
        store.drop_owner(owner)


def test_neither_memory_nor_descriptors_grow_with_use() -> None:
    with a_store(1 << 20, events_kept=1000) as store:
        process = psutil.Process()
        churn(store, 300)
        gc.collect()
        memory, descriptors = process.memory_info().rss, process.num_fds()
        churn(store, 1000)  # 32,000 blocks: each that stayed would cost about 1 KiB
        assert process.memory_info().rss - memory < 4 << 20
        assert process.num_fds() == descriptors
        stats = store.stats()
        assert (stats.owners, stats.filling, stats.pinned, stats.hidden) == (0, 0, 0, 0)
