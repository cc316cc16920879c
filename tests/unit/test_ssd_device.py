"""One SSD device: what it keeps, what it gives up, and within what limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mooncaked.errors import InvalidRequest, Refused
from mooncaked.pools.ssd import (
    DeviceState,
    LostReason,
    ReadStatus,
    SsdDevice,
    SsdEntry,
    SsdItem,
    WriteStatus,
)
from mooncaked.pools.ssd.disk import Disk
from tests.fakes.faulty_disk import FaultyDisk
from tests.fakes.manual_clock import ManualClock
from tests.fakes.ssd_model import aligned

SEGMENT = 256 << 10
SLOT = SEGMENT + (16 << 10)
BLOCK = 16 << 10


class OneDevice:
    """A device in a directory, which is opened and asked in few words."""

    def __init__(self, directory: Path | str, disk: Disk | None = None) -> None:
        self.directory, self.disk = directory, disk
        self.lost: list[tuple[bytes, LostReason]] = []
        self.device = self.make()

    def make(self, slots: int = 4, node: str = "node-1", segment: int = SEGMENT) -> SsdDevice:
        return SsdDevice(
            self.directory,
            (64 << 10) + slots * SLOT,
            node_id=node,
            clock=ManualClock(),
            segment_bytes=segment,
            group_bytes=64 << 10,
            readers=2,
            disk=self.disk,
        )

    def on_lost(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        self.lost += [(entry.key, reason) for entry in entries]

    def open(self, keep: Callable[[Sequence[SsdEntry]], Sequence[bool]] | None = None) -> OneDevice:
        self.device.open(lost=self.on_lost, keep=keep)
        return self

    def reopen(self, slots: int = 4) -> OneDevice:
        self.device.close()
        self.device = self.make(slots)
        return self.open()

    def write(self, numbers: Sequence[int], size: int = BLOCK) -> list[WriteStatus]:
        return self.device.write([item(number, size) for number in numbers])

    def read(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """What is there of those, by number."""
        entries = [e for e in self.device.lookup("n", [b"%d" % n for n in numbers]) if e is not None]
        views = [aligned(bytes(entry.size)) for entry in entries]
        statuses = self.device.read_into(entries, views)
        found = zip(entries, views, statuses, strict=True)
        return {int(entry.key): bytes(view) for entry, view, status in found if status is ReadStatus.OK}

    def present(self, numbers: Sequence[int]) -> list[int]:
        there = self.device.contains("n", [b"%d" % n for n in numbers])
        return [number for number, yes in zip(numbers, there, strict=True) if yes]


def value(number: int, size: int = BLOCK) -> bytes:
    return (b"%08d" % number * (size // 8 + 1))[:size]


def item(number: int, size: int = BLOCK, aligned_memory: bool = True) -> SsdItem:
    data = value(number, size)
    view = aligned(data) if aligned_memory else memoryview(bytearray(b"?" + data))[1:]
    parent = b"%d" % (number - 1) if number % 4 else None
    return SsdItem(namespace="n", key=b"%d" % number, data=view, parent=parent, meta=b"m" * (number % 3))


@pytest.fixture
def disk() -> FaultyDisk:
    made = FaultyDisk()
    made.make_directory("/ssd")
    return made


@pytest.fixture
def fake(disk: FaultyDisk) -> OneDevice:
    return OneDevice("/ssd", disk).open()


# --- writing and reading --------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned_memory", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 32_767, 32_768, 70_000, 131_072])
def test_what_was_written_is_read_after_a_restart_too(
    tmp_path: Path, size: int, aligned_memory: bool
) -> None:
    tester = OneDevice(tmp_path).open()
    items = [item(number, size, aligned_memory) for number in range(3)]
    assert tester.device.write(items) == [WriteStatus.STORED] * 3
    for _ in range(2):
        assert tester.read(range(3)) == {number: value(number, size) for number in range(3)}
        (entry,) = tester.device.lookup("n", [b"2"])
        assert entry is not None
        assert (entry.parent, entry.meta, entry.size, entry.device) == (b"1", b"mm", size, 0)
        tester.device.check_integrity()
        tester.reopen()
    tester.device.close()


def test_a_block_that_is_there_is_not_written_again(fake: OneDevice) -> None:
    assert fake.write([1, 2, 1]) == [WriteStatus.STORED, WriteStatus.STORED, WriteStatus.EXISTS]
    assert fake.write([2, 3]) == [WriteStatus.EXISTS, WriteStatus.STORED]
    assert fake.device.stats().stored_total == 3


def test_a_block_that_no_segment_can_hold_is_refused(fake: OneDevice) -> None:
    assert fake.write([1], SEGMENT) == [WriteStatus.TOO_LARGE]
    assert fake.write([1], SEGMENT - (24 << 10)) == [WriteStatus.STORED]


def test_a_view_of_another_size_is_refused(fake: OneDevice) -> None:
    fake.write([1])
    entries = [entry for entry in fake.device.lookup("n", [b"1"]) if entry]
    with pytest.raises(InvalidRequest, match="has 16384 bytes, its buffer 5"):
        fake.device.read_into(entries, [memoryview(bytearray(5))])


def test_namespaces_are_apart(fake: OneDevice) -> None:
    fake.write([1])
    assert fake.device.contains("other", [b"1"]) == [False]
    assert fake.device.lookup("other", [b"1"]) == [None]


def test_neighbours_are_read_in_one_call(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(4))
    disk.calls.clear()
    assert len(fake.read(range(4))) == 4
    assert disk.calls.count("preadv") == 1


def test_those_who_wait_share_one_sync(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write([0])
    syncing, go_on = threading.Event(), threading.Event()

    def hold(call: str, path: str) -> None:
        if call == "fdatasync" and not syncing.is_set():
            syncing.set()
            disk._lock.release()
            go_on.wait(10)
            disk._lock.acquire()

    disk.fault = hold
    disk.calls.clear()
    threads = [threading.Thread(target=fake.write, args=([number],)) for number in range(1, 5)]
    threads[0].start()
    assert syncing.wait(10)
    for thread in threads[1:]:
        thread.start()
    while fake.device.queued_bytes < 4 * BLOCK:
        pass
    assert fake.present(range(5)) == [0], "nothing can be read before its sync"
    go_on.set()
    for thread in threads:
        thread.join()
    assert fake.present(range(5)) == [0, 1, 2, 3, 4]
    assert disk.calls.count("fdatasync") == 2


def test_a_block_removed_while_it_is_written_does_not_appear(fake: OneDevice, disk: FaultyDisk) -> None:
    def remove(call: str, path: str) -> None:
        if call == "fdatasync":
            disk.fault = lambda call, path: None
            assert fake.device.remove("n", [b"1"]) == [True]

    disk.fault = remove
    assert fake.write([1, 2]) == [WriteStatus.REMOVED, WriteStatus.STORED]
    assert fake.present([1, 2]) == [2]
    assert fake.reopen().present([1, 2]) == [2]


def test_removed_blocks_stay_removed_without_being_asked_to_flush(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(3))
    assert fake.device.remove("n", [b"1", b"7"]) == [True, False]
    assert fake.device.flush()
    disk.crash()
    fake.device = fake.make()
    assert fake.open().present(range(3)) == [0, 2]


# --- room -----------------------------------------------------------------------------------------------


def test_files_never_take_more_than_the_capacity(tmp_path: Path) -> None:
    tester = OneDevice(tmp_path).open()
    for start in range(0, 200, 10):
        assert set(tester.write(range(start, start + 10))) == {WriteStatus.STORED}
        taken = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*"))
        assert taken <= tester.device.capacity_bytes
    stats = tester.device.stats()
    assert stats.allocated_bytes == 4 * SEGMENT
    assert stats.blocks + stats.lost["reclaimed"] == 200
    assert len(tester.read(range(200))) == stats.blocks >= 2 * SEGMENT // BLOCK - 4
    tester.device.close()


def test_the_oldest_go_first_and_are_reported(fake: OneDevice) -> None:
    fake.write(range(80))
    there = fake.present(range(80))
    assert there == list(range(80 - len(there), 80))
    assert fake.lost == [(b"%d" % n, LostReason.RECLAIMED) for n in range(80 - len(there))]


def test_what_was_read_is_carried_over(fake: OneDevice) -> None:
    fake.write(range(30))
    assert len(fake.read([1, 3, 5])) == 3
    fake.write(range(30, 50))
    assert fake.present(range(8)) == [1, 3, 5]
    assert fake.read([1, 3, 5]) == {n: value(n) for n in (1, 3, 5)}
    assert fake.device.stats().carried_total == 3
    fake.lost.clear()
    fake.device.close()
    fake.device = fake.make()
    assert set(fake.open().present(range(8))) == {1, 3, 5}


def test_at_most_half_a_segment_is_carried_over(disk: FaultyDisk) -> None:
    tester = OneDevice("/ssd", disk).open(keep=lambda entries: [True] * len(entries))
    tester.write(range(200))
    stats = tester.device.stats()
    assert stats.blocks + stats.lost["reclaimed"] == 200
    assert 1.5 < stats.write_amplification < 2.3, "twice, and headers, which are large for such small groups"


def test_a_segment_of_removed_blocks_is_used_before_the_oldest(fake: OneDevice) -> None:
    fake.write(range(35))  # into three segments
    fake.device.remove("n", [b"%d" % n for n in range(12, 28)])
    fake.write(range(35, 45))
    assert fake.present(range(12)) == list(range(12))


def test_more_capacity_is_used_and_less_is_kept_to(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(45))
    before = fake.present(range(45))
    assert fake.reopen(slots=8).present(range(45)) == before
    fake.write(range(45, 100))
    assert disk.used <= (64 << 10) + 8 * SLOT
    fake.reopen(slots=3)
    assert disk.used <= (64 << 10) + 3 * SLOT
    there = fake.present(range(100))
    assert there == list(range(100 - len(there), 100))
    assert set(fake.write(range(100, 140))) == {WriteStatus.STORED}


def test_a_segment_that_is_read_is_not_written_anew(disk: FaultyDisk) -> None:
    fake = OneDevice("/ssd", disk).open(keep=lambda entries: [False] * len(entries))
    fake.write(range(30))
    entries = [e for e in fake.device.lookup("n", [b"0"]) if e]
    reading, go_on = threading.Event(), threading.Event()

    def hold(call: str, path: str) -> None:
        if call == "preadv" and threading.current_thread() is reader:
            reading.set()
            disk._lock.release()
            go_on.wait(10)
            disk._lock.acquire()

    view = aligned(bytes(BLOCK))
    result: list[ReadStatus] = []
    reader = threading.Thread(target=lambda: result.extend(fake.device.read_into(entries, [view])))
    disk.fault = hold
    reader.start()
    assert reading.wait(10)
    writer = threading.Thread(target=fake.write, args=(range(30, 100),))
    writer.start()
    while fake.present([0]):
        pass
    assert writer.is_alive(), "it waits for the reader"
    go_on.set()
    reader.join()
    writer.join()
    assert result == [ReadStatus.OK]
    assert bytes(view) == value(0)
    assert fake.device.read_into(entries, [view]) == [ReadStatus.GONE]


# --- whose it is ----------------------------------------------------------------------------------------


def refusal(tester: OneDevice, device: SsdDevice, disk: FaultyDisk) -> str:
    """Why a device is not opened; its directory must stay as it is."""
    before = {path: disk.content(path) for path in disk.paths()}
    with pytest.raises(Refused) as raised:
        device.open()
    assert {path: disk.content(path) for path in disk.paths()} == before
    assert device.state is DeviceState.FAILED
    assert device.stats().reason == str(raised.value)
    return str(raised.value)


def test_a_directory_of_another_node_or_geometry_is_refused(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(3))
    assert "another process uses /ssd" in refusal(fake, fake.make(), disk)
    fake.device.close()
    assert "node node-1, and this is node node-2" in refusal(fake, fake.make(node="node-2"), disk)
    assert "Set ssd.segment_size to 256KiB" in refusal(fake, fake.make(segment=128 << 10), disk)
    fake.device = fake.make()
    assert fake.open().present(range(3)) == [0, 1, 2]


def test_a_missing_directory_is_not_made(disk: FaultyDisk) -> None:
    tester = OneDevice("/missing", disk)
    assert "does not exist. Mount the disk there" in refusal(tester, tester.device, disk)


def test_segments_without_a_manifest_are_refused(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(3))
    fake.device.close()
    for name in ("manifest.json", "manifest-copy.json"):
        disk.unlink(f"/ssd/{name}")
    assert "no manifest.json that says whose they are" in refusal(fake, fake.make(), disk)


@pytest.mark.parametrize("name", ["manifest.json", "manifest-copy.json"])
def test_one_damaged_copy_of_the_manifest_is_mended(fake: OneDevice, disk: FaultyDisk, name: str) -> None:
    fake.write(range(3))
    fake.device.close()
    disk.flip(f"/ssd/{name}", 20)
    assert fake.reopen().present(range(3)) == [0, 1, 2]
    fake.device.close()
    assert disk.content("/ssd/manifest.json") == disk.content("/ssd/manifest-copy.json")


@pytest.mark.parametrize(
    ("capacity", "segment"), [(1 << 30, 1000), (1 << 30, 4 << 30), (SEGMENT, SEGMENT), (1 << 30, 0)]
)
def test_a_geometry_that_cannot_be_is_refused(capacity: int, segment: int) -> None:
    with pytest.raises(InvalidRequest):
        SsdDevice("/ssd", capacity, node_id="n", clock=ManualClock(), segment_bytes=segment)
