"""Several SSDs as one tier: where blocks go, and what one device's trouble means for the others."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path

import pytest

from mooncaked.clock import SystemClock
from mooncaked.errors import InvalidRequest
from mooncaked.pools.ssd import (
    DeviceState,
    LostReason,
    ReadStatus,
    SsdDevice,
    SsdEntry,
    SsdItem,
    SsdPool,
    WriteStatus,
)
from mooncaked.types import Tier
from tests.fakes.faulty_disk import FaultyDisk, failing
from tests.fakes.ssd_model import aligned
from tests.unit.test_ssd_device import BLOCK, SEGMENT, SLOT, item, value


def make_pool(disks: list[FaultyDisk], node: str = "n") -> SsdPool:
    devices = []
    for number, disk in enumerate(disks):
        disk.make_directory(f"/ssd{number}")
        devices.append(
            SsdDevice(
                f"/ssd{number}",
                (64 << 10) + 8 * SLOT,
                node_id=node,
                clock=SystemClock(),
                segment_bytes=SEGMENT,
                group_bytes=64 << 10,
                readers=1,
                number=number,
                disk=disk,
            )
        )
    return SsdPool(devices)


def read(pool: SsdPool, numbers: range) -> dict[int, bytes]:
    entries = [e for e in pool.lookup("n", [b"%d" % n for n in numbers]) if e is not None]
    views = [aligned(bytes(entry.size)) for entry in entries]
    statuses = pool.read_into(entries, views)
    found = zip(entries, views, statuses, strict=True)
    return {int(entry.key): bytes(view) for entry, view, status in found if status is ReadStatus.OK}


def test_writes_go_to_the_device_with_most_room_and_are_found_again() -> None:
    disks = [FaultyDisk(), FaultyDisk()]
    pool = make_pool(disks)
    pool.open()
    assert pool.tier is Tier.SSD
    for start in range(0, 40, 5):
        assert set(pool.write([item(n) for n in range(start, start + 5)])) == {WriteStatus.STORED}
    assert [stats.blocks for stats in pool.stats()] == [20, 20]
    assert pool.write([item(3), item(50)]) == [WriteStatus.EXISTS, WriteStatus.STORED]
    assert read(pool, range(40)) == {n: value(n) for n in range(40)}
    assert pool.remove("n", [b"1", b"6", b"99"]) == [True, True, False]
    assert pool.contains("n", [b"1", b"6", b"2"]) == [False, False, True]
    pool.check_integrity()
    pool.close()
    pool.close()
    seen: list[tuple[int, int]] = []
    pool = make_pool(disks)
    pool.open(progress=lambda done, total: seen.append((done, total)))
    assert max(seen) == (4, 4)
    assert len(list(pool.entries())) == 39
    assert pool.contains("n", [b"1", b"6", b"2"]) == [False, False, True]
    pool.close()


def test_a_pool_without_devices_holds_nothing() -> None:
    pool = SsdPool([])
    pool.open()
    assert pool.write([item(1)]) == [WriteStatus.FAILED]
    assert pool.contains("n", [b"1"]) == [False]
    assert pool.lookup("n", [b"1"]) == [None]
    assert pool.remove("n", [b"1"]) == [False]
    assert pool.flush()
    pool.close()


def test_a_device_that_cannot_be_opened_leaves_the_others() -> None:
    disks = [FaultyDisk(), FaultyDisk()]
    pool = make_pool(disks[:1], node="another")
    pool.open()
    pool.write([item(1)])
    pool.close()
    pool = make_pool(disks)
    pool.open()
    states = [(stats.state, stats.reason) for stats in pool.stats()]
    assert states[0][0] is DeviceState.FAILED
    assert "holds the blocks of node another" in states[0][1]
    assert states[1] == (DeviceState.ACTIVE, "")
    assert pool.write([item(2)]) == [WriteStatus.STORED]
    assert read(pool, range(3)) == {2: value(2)}
    pool.close()


def test_a_device_that_fails_takes_only_its_blocks_along() -> None:
    disks = [FaultyDisk(), FaultyDisk()]
    lost: list[tuple[int, LostReason]] = []
    pool = make_pool(disks)
    pool.open(lost=lambda entries, reason: lost.extend((int(e.key), reason) for e in entries))
    for number in range(20):
        pool.write([item(number)])
    on_second = {n for n in range(20) if pool.devices[1].contains("n", [b"%d" % n])[0]}
    assert 5 < len(on_second) < 15
    disks[1].fault = failing(errno.EIO)
    assert set(read(pool, range(20))) == set(range(20)) - on_second
    assert {number for number, _ in lost} == on_second
    assert pool.stats()[1].state is DeviceState.FAILED
    assert [pool.write([item(n)])[0] for n in range(20, 30)] == [WriteStatus.STORED] * 10
    pool.check_integrity()
    pool.close()


def test_a_slow_device_does_not_hold_the_other() -> None:
    disks = [FaultyDisk(), FaultyDisk()]
    pool = make_pool(disks)
    pool.open()
    stuck, go_on = threading.Event(), threading.Event()

    def hang(call: str, path: str) -> None:
        if call == "fdatasync":
            stuck.set()
            go_on.wait(10)

    disks[0].fault = hang
    first = threading.Thread(target=pool.write, args=([item(0)],))
    first.start()
    assert stuck.wait(10)
    for number in range(1, 10):
        assert pool.write([item(number)]) == [WriteStatus.STORED]
    assert pool.stats()[0].queued_bytes == BLOCK
    assert [stats.blocks for stats in pool.stats()] == [0, 9]
    go_on.set()
    first.join()
    assert read(pool, range(10)) == {n: value(n) for n in range(10)}
    pool.close()


def test_a_batch_of_more_than_a_group_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.pools.ssd.pool.GROUP_BYTES", 4 * BLOCK)
    pool = make_pool([FaultyDisk(), FaultyDisk()])
    pool.open()
    assert set(pool.write([item(n) for n in range(40)])) == {WriteStatus.STORED}
    assert [stats.blocks for stats in pool.stats()] == [20, 20]
    assert len(read(pool, range(40))) == 40
    pool.close()


def test_readers_writers_and_removals_at_once(tmp_path: Path) -> None:
    """On a real disk that is much too small, so that segments are reclaimed all the time."""
    lost: list[bytes] = []

    def on_lost(entries: list[SsdEntry], reason: LostReason) -> None:
        lost.extend(entry.key for entry in entries)

    device = SsdDevice(
        tmp_path, (64 << 10) + 6 * SLOT, node_id="n", clock=SystemClock(), segment_bytes=SEGMENT, readers=2
    )
    pool = SsdPool([device])
    pool.open(lost=on_lost)  # type: ignore[arg-type]
    wrong: list[str] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set():
            numbers = dice.sample(range(200), 6)
            keys = [b"%d" % n for n in numbers]
            if dice.random() < 0.5:
                pool.write([item(n, 4096 * (1 + n % 6)) for n in numbers])
            elif dice.random() < 0.1:
                pool.remove("n", keys[:1])
            entries = [e for e in pool.lookup("n", keys) if e is not None]
            views = [aligned(bytes(entry.size)) for entry in entries]
            for entry, view, status in zip(entries, views, pool.read_into(entries, views), strict=True):
                right = value(int(entry.key), entry.size)
                if status not in (ReadStatus.OK, ReadStatus.GONE) or (
                    status is ReadStatus.OK and view != right
                ):
                    wrong.append(f"{entry.key!r} {status}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        while len(lost) < 300 and all(thread.is_alive() for thread in threads):
            pool.check_integrity()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    pool.check_integrity()
    stats = pool.stats()[0]
    assert stats.errors == {}
    assert stats.state is DeviceState.ACTIVE
    pool.close()


def test_an_item_out_of_memory_that_is_no_run_of_bytes_is_refused_before_others_wait_for_it() -> None:
    pool = make_pool([FaultyDisk()])
    pool.open()
    bad = SsdItem(namespace="n", key=b"bad", data=memoryview(bytes(100))[::2])
    with pytest.raises(InvalidRequest, match="no run of bytes"):
        pool.write([bad])
    assert pool.write([item(1)]) == [WriteStatus.STORED]
    pool.close()
