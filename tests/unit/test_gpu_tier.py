"""The GPU tier: what comes in, who may read it, what goes for it, and what a removal must not leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import xxhash
from prometheus_client import CollectorRegistry, generate_latest

from mooncaked.errors import GpuFailed, InvalidRequest, Unhealthy
from mooncaked.gpu import DROPS_KEPT, GpuTier, Source
from mooncaked.gpu.readings import readings
from mooncaked.metrics import Readings
from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import Copy, CpuDevice, Direction
from mooncaked.types import BlockEvent, Tier

PAGE = 4096
NS = "ns"


def value(key: str, size: int = PAGE) -> bytes:
    return (key.encode() * size)[:size]


def source(key: str, *, uses: int = 2, size: int = PAGE, parent: str | None = None) -> Source:
    data = value(key, size)
    return Source(
        namespace=NS,
        key=key.encode(),
        parent=parent.encode() if parent else None,
        view=memoryview(data),
        checksum=xxhash.xxh3_64_intdigest(data),
        meta=b"m",
        uses=uses,
    )


class Bench:
    """A tier with one pool of a few pages, that copies when it is told to."""

    def __init__(self, pages: int = 4, **options: object) -> None:
        self.device = BreakableDevice()
        self.pool = GpuPool(self.device, pages * PAGE, region=9)
        self.events: list[str] = []
        self.released = 0
        self.tier = GpuTier([self.pool], self.report, **options)  # type: ignore[arg-type]
        self.owner = self.tier.new_owner()

    def report(self, events: list[BlockEvent]) -> None:
        for event in events:
            assert event.tier is Tier.GPU
            self.events.append(("+" if event.stored else "-") + event.key.decode())

    def release(self) -> None:
        self.released += 1

    def promote(self, *sources: Source, mark: int | None = None) -> None:
        self.tier.promote(self.tier.mark() if mark is None else mark, sources, self.release)
        self.tier.work()
        self.tier.check_integrity()

    def read(self, key: str) -> bytes | None:
        """Look it up, read it, and let it go."""
        (found,) = self.tier.lookup(self.owner, NS, [key.encode()])
        if found is None:
            return None
        back = bytearray(found.size)
        self.pool.copy_out(found.offset, back).wait()
        self.tier.unpin(self.owner, [found.pin])
        return bytes(back)

    def has(self, *keys: str) -> list[bool]:
        return self.tier.contains(NS, [key.encode() for key in keys])

    def drop(self, key: str) -> None:
        self.tier.forget(NS, [key.encode()])


class BreakableDevice(CpuDevice):
    broken = False

    def copy(self, direction: Direction, pairs: object) -> Copy:
        if self.broken:
            raise GpuFailed(device="cpu", operation="copying", cause="it fell off the bus")
        return super().copy(direction, pairs)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.tier.close()
    bench.tier.check_integrity()
    bench.pool.close()


def test_a_promoted_block_is_found_pinned_and_whole(bench: Bench) -> None:
    bench.promote(source("a"), source("b", size=100))
    (a, b, c) = bench.tier.lookup(bench.owner, NS, [b"a", b"b", b"c"])
    assert a is not None
    assert b is not None
    assert c is None
    assert (a.region, a.size, a.meta, a.checksum) == (9, PAGE, b"m", source("a").checksum)
    assert (bench.read("a"), bench.read("b")) == (value("a"), value("b", 100))
    assert bench.events == ["+a", "+b"]
    assert bench.released == 1, "host memory is let go once, when nothing of the call needs it"
    stats = bench.tier.stats()
    assert (stats.promoted, stats.hits, stats.misses, stats.pinned_blocks) == (2, 4, 1, 2)
    assert [event.key for event in bench.tier.blocks()] == [b"a", b"b"]


def test_least_recently_read_goes_first(bench: Bench) -> None:
    bench.promote(*(source(key) for key in "abcd"))
    assert bench.read("a")
    bench.promote(source("e", uses=9))
    assert bench.has(*"abcde") == [True, False, True, True, True]
    assert bench.events[-2:] == ["-b", "+e"]
    assert bench.read("e") == value("e")


def test_a_block_that_is_read_never_goes(bench: Bench) -> None:
    bench.promote(*(source(key) for key in "abcd"))
    bench.tier.lookup(bench.owner, NS, [b"a", b"b", b"c", b"d"])
    bench.promote(source("e", uses=99))
    assert not bench.has("e")[0]
    assert bench.tier.stats().refused == {"full": 1, "busy": 0}
    bench.tier.end_owner(bench.owner)
    bench.promote(source("e", uses=99))
    assert bench.has("e")[0]


def test_a_scan_of_blocks_that_nobody_reads_twice_evicts_few(bench: Bench) -> None:
    bench.promote(*(source(key, uses=8) for key in "abcd"))
    for n in range(8):
        bench.promote(source(f"scan{n}", uses=1))
    assert bench.tier.stats().refused["cooler"] == 6
    assert bench.has(*"abcd").count(True) == 2, "8, 4, 2, 1: fame fades, or nothing new could ever come in"


def test_a_child_does_not_evict_its_own_parents(bench: Bench) -> None:
    bench.promote(source("a"), *(source(k, parent=p, uses=0) for p, k in ("ab", "bc", "cd")))
    bench.promote(source("e", parent="d", uses=99))
    assert bench.has(*"abcde") == [True, True, True, True, False]
    bench.promote(source("x", uses=99))
    assert bench.has(*"abcdx") == [True, True, True, False, True], "leaf before root"


def test_what_cannot_come_in_says_why(bench: Bench) -> None:
    bench.promote(source("a"), source("a"), source("big", size=5 * PAGE))
    assert bench.tier.stats().refused == {"exists": 1, "too_large": 1, "busy": 0}
    assert bench.released == 1


def test_the_queue_is_bounded_and_nothing_waits_for_it() -> None:
    bench = Bench(queue_blocks_max=2)
    assert bench.tier.promote(0, [source(key) for key in "abc"], bench.release) == 2
    assert bench.tier.promote(0, [source("d")], bench.release) == 0
    assert bench.released == 1, "the call of which nothing was queued"
    assert bench.tier.stats().refused["busy"] == 2
    bench.tier.work()
    assert (bench.released, bench.has(*"abcd")) == (2, [True, True, False, False])


def test_several_pools_are_one_tier() -> None:
    pools = [GpuPool("cpu", PAGE, region=4), GpuPool("cpu", PAGE, region=5)]
    tier = GpuTier(pools, lambda events: None)
    tier.promote(tier.mark(), [source("a"), source("b")], lambda: None)
    tier.work()
    found = tier.lookup(tier.new_owner(), NS, [b"a", b"b"])
    assert sorted(one.region for one in found if one) == [4, 5]
    assert all(bytes(pool.view or b"")[:1] in (b"a", b"b") for pool in pools)
    with pytest.raises(InvalidRequest):
        GpuTier([pools[0], pools[0]], lambda events: None)


def test_pins_belong_to_their_owner(bench: Bench) -> None:
    bench.promote(source("a"))
    (found,) = bench.tier.lookup(bench.owner, NS, [b"a"])
    assert found is not None
    with pytest.raises(InvalidRequest, match="belongs to another connection"):
        bench.tier.unpin(bench.tier.new_owner(), [found.pin])
    bench.tier.end_owner(bench.owner)
    with pytest.raises(InvalidRequest, match="has ended"):
        bench.tier.lookup(bench.owner, NS, [b"a"])


# --- removal -----------------------------------------------------------------------------------------------


def test_a_dropped_block_is_gone_at_once_and_its_memory_with_its_last_reader(bench: Bench) -> None:
    bench.promote(*(source(key) for key in "abcd"))
    (found,) = bench.tier.lookup(bench.owner, NS, [b"a"])
    assert found is not None
    bench.drop("a")
    assert (bench.read("a"), bench.events[-1]) == (None, "+d"), "it is told by the thread that copies"
    bench.tier.work()
    assert bench.events[-1] == "-a"
    assert bench.tier.stats().used_bytes == 4 * PAGE
    bench.tier.unpin(bench.owner, [found.pin])
    assert bench.tier.stats().used_bytes == 3 * PAGE


def test_bytes_that_were_looked_up_before_a_removal_do_not_come_in_after_it(bench: Bench) -> None:
    mark = bench.tier.mark()
    old = source("a")
    bench.drop("a")
    bench.promote(old, source("b"), mark=mark)
    assert bench.has("a", "b") == [False, True]
    bench.promote(source("a"))
    assert bench.has("a") == [True]


def test_a_removal_while_the_bytes_are_on_their_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = bench.pool.copy_batch_in

    def and_remove(pieces: object) -> Copy:
        started = copy(pieces)  # type: ignore[arg-type]
        bench.drop("a")
        return started

    monkeypatch.setattr(bench.pool, "copy_batch_in", and_remove)
    bench.promote(source("a"), source("b"))
    assert (bench.has("a", "b"), bench.events) == ([False, True], ["+b"])
    assert bench.tier.stats().refused["dropped"] == 1
    assert bench.tier.stats().used_bytes == PAGE


def test_a_promotion_from_before_all_known_removals_is_given_up(bench: Bench) -> None:
    mark = bench.tier.mark()
    bench.tier.forget(NS, [b"%d" % n for n in range(DROPS_KEPT + 1)])
    bench.promote(source("a"), mark=mark)
    assert bench.has("a") == [False]


# --- faults, threads ---------------------------------------------------------------------------------------


def test_a_device_that_fails_takes_the_tier_out_and_nothing_else(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.promote(source("a"))
    bench.device.broken = True
    bench.promote(source("b"), source("c"))
    assert bench.released == 2, "host memory is let go all the same"
    assert (bench.read("a"), bench.events) == (None, ["+a", "-a"])
    assert "fell off the bus" in bench.tier.stats().failure
    assert "GPU tier is out of use" in caplog.text
    bench.promote(source("d"))
    assert (bench.released, bench.has("d")) == (3, [False])


def test_its_own_thread_does_the_same(bench: Bench) -> None:
    bench.tier.start()
    bench.tier.check_alive()
    done = threading.Event()
    bench.tier.promote(bench.tier.mark(), [source("a")], done.set)
    assert bench.tier.wait_idle(10.0)
    assert done.is_set() or done.wait(10.0)
    assert bench.read("a") == value("a")
    bench.tier.close()
    bench.tier.promote(bench.tier.mark(), [source("b")], bench.release)
    assert bench.released == 1, "a closed tier takes nothing"


def test_a_thread_that_dies_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    monkeypatch.setattr(bench.tier, "work", lambda: 1 / 0)
    bench.tier.start()
    bench.tier.promote(bench.tier.mark(), [source("a")], bench.release)
    assert bench.tier._thread is not None
    bench.tier._thread.join(10.0)
    with pytest.raises(Unhealthy, match="the thread that copies has ended"):
        bench.tier.check_alive()


def test_readers_droppers_and_promoters_at_once_never_see_a_wrong_byte() -> None:
    bench = Bench(pages=16)
    bench.tier.start()
    keys = [f"k{n}" for n in range(40)]
    wrong: list[str] = []
    stop = threading.Event()

    def promoter() -> None:
        for round_number in range(60):
            bench.tier.promote(
                bench.tier.mark(), [source(key, uses=round_number) for key in keys], lambda: None
            )
            bench.tier.wait_idle(10.0)
        stop.set()

    def reader() -> None:
        owner = bench.tier.new_owner()
        while not stop.is_set():
            for key, found in zip(
                keys, bench.tier.lookup(owner, NS, [k.encode() for k in keys]), strict=True
            ):
                if found is None:
                    continue
                back = bytearray(found.size)
                bench.pool.copy_out(found.offset, back).wait()
                if back != value(key):
                    wrong.append(key)
                bench.tier.unpin(owner, [found.pin])

    def dropper() -> None:
        while not stop.is_set():
            for key in keys[::7]:
                bench.drop(key)
            bench.tier.check_integrity()

    threads = [threading.Thread(target=work) for work in (promoter, reader, reader, dropper)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.tier.close()
    bench.tier.check_integrity()
    assert not wrong
    seen: set[str] = set()
    for event in bench.events:  # what was told is what happened: each comes and goes in turn
        assert (event[1:] in seen) is (event[0] == "-")
        (seen.remove if event[0] == "-" else seen.add)(event[1:])
    assert seen == {event.key.decode() for event in bench.tier.blocks()}


def test_metrics(bench: Bench) -> None:
    bench.promote(source("a"), source("a"))
    bench.read("a")
    registry = CollectorRegistry()
    registry.register(Readings(readings(bench.tier.stats)))
    text = generate_latest(registry).decode()
    assert 'mooncaked_gpu_reads_total{result="hit"} 1.0' in text
    assert 'mooncaked_gpu_refused_blocks_total{reason="exists"} 1.0' in text
    assert "mooncaked_gpu_usable 1.0" in text
