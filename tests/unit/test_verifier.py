"""Comparing blocks from before a restart with their checksums: one after the other, and when wanted."""

from __future__ import annotations

import threading

import pytest
import xxhash

from mooncaked.store import Restored, Store
from mooncaked.verifier import Verifier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

COUNT = 40


@pytest.fixture
def store() -> Store:
    """Forty restored blocks of one page; the seventh is damaged."""
    pool = HeapPool(64 * 4096)
    records = []
    for i in range(COUNT):
        pool.view[i * 4096 : (i + 1) * 4096] = bytes([i]) * 4096
        checksum = xxhash.xxh3_64_intdigest(bytes([i]) * 4096)
        records.append(
            Restored(
                namespace="ns",
                key=b"%d" % i,
                parent=None,
                meta=b"",
                region=0,
                offset=i * 4096,
                size=4096,
                checksum=checksum,
            )
        )
    pool.view[7 * 4096 + 5] = 0
    store = Store(pool, high_watermark=0.9, low_watermark=0.8, epoch=1, clock=StepClock())
    assert store.restore(records).blocks == COUNT
    return store


def test_all_are_compared_and_a_damaged_one_is_a_miss(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert Verifier(store, StepClock()).run(threading.Event())
    assert (store.unverified, store.stats().damaged) == (0, 1)
    assert store.exists("ns", [b"6", b"7", b"8"]) == [True, False, True]
    assert store.stats().pinned == 0
    assert "blocks from before the restart are damaged" in caplog.text
    store.check_integrity()


def test_those_that_are_wanted_do_not_wait(store: Store) -> None:
    verifier, owner = Verifier(store, StepClock()), store.new_owner()
    assert store.pin(owner, "ns", [b"3", b"4", b"7"]) == [None] * 3, "nothing unproved is read"
    assert verifier.verify_keys("ns", [b"3", b"7", b"none"]) == 2
    assert [pin is not None for pin in store.pin(owner, "ns", [b"3", b"4", b"7"])] == [True, False, False]
    assert store.unverified == COUNT - 2


def test_it_stops_when_told_to(store: Store) -> None:
    stop = threading.Event()
    stop.set()
    assert not Verifier(store, StepClock()).run(stop)
    assert store.unverified == COUNT


class Waits(threading.Event):
    """Notes how long it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s += timeout or 0.0
        return False


def test_the_rate_is_bounded(store: Store) -> None:
    clock, stop = StepClock(), Waits()
    clock.monotonic = lambda: 0.0  # type: ignore[method-assign]
    Verifier(store, clock, rate_bytes_s=4096 * 10).run(stop)
    assert stop.waited_s >= COUNT / 10
