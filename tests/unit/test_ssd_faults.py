"""What an SSD device does when the disk does not: errors, a full file system, damage."""

from __future__ import annotations

import errno
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncaked.pools.ssd import DeviceState, LostReason, WriteStatus
from tests.fakes.faulty_disk import FaultyDisk, failing
from tests.unit.test_ssd_device import BLOCK, SEGMENT, SLOT, OneDevice, value


@pytest.fixture
def disk() -> FaultyDisk:
    made = FaultyDisk()
    made.make_directory("/ssd")
    return made


@pytest.fixture
def fake(disk: FaultyDisk) -> OneDevice:
    return OneDevice("/ssd", disk).open()


def heal(disk: FaultyDisk) -> None:
    disk.fault = lambda call, path: None


# --- damage ---------------------------------------------------------------------------------------------


def test_a_flipped_bit_costs_one_block(
    fake: OneDevice, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    fake.write(range(4))
    for number in (1, 2):
        (entry,) = fake.device.lookup("n", [b"%d" % number])
        assert entry is not None
        disk.flip("/ssd/00000000.segment", entry.offset + 77, 3)
    assert fake.read(range(4)) == {0: value(0), 3: value(3)}
    assert fake.present(range(4)) == [0, 3]
    assert fake.lost == [(b"1", LostReason.CORRUPT), (b"2", LostReason.CORRUPT)]
    assert fake.device.stats().errors == {"corrupt": 2}
    assert len([r for r in caplog.records if "kind=corrupt" in r.getMessage()]) == 1
    assert fake.write([1]) == [WriteStatus.STORED], "and it can be written again"
    assert fake.reopen().read(range(4)) == {n: value(n) for n in (0, 1, 3)}


def test_a_flipped_bit_in_any_table_costs_nothing(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(20))  # one sealed segment, and one that is not
    fake.device.close()
    clean = {path: disk.content(path) for path in disk.paths() if path.endswith("segment")}
    assert len(clean) == 2
    for path, content in clean.items():
        marks = [content.find(b"MCSSDGRP"), content.rfind(b"MCSSDGRP"), SEGMENT - 4096, SEGMENT - 4096 - 100]
        for at in (place + extra for place in marks for extra in (0, 9, 30, 95)):
            disk.flip(path, min(at, SEGMENT - 1))
            assert fake.reopen().present(range(20)) == list(range(20)), (path, at)
            assert fake.read(range(20)) == {n: value(n) for n in range(20)}
            fake.device.close()
            if disk.content(path)[at] != content[at]:  # a table that was not mended meanwhile
                disk.flip(path, min(at, SEGMENT - 1))


def test_blocks_of_a_torn_group_are_not_promised(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(2))
    disk.fault = failing(errno.EIO, "fdatasync")
    assert fake.write([2, 3]) == [WriteStatus.FAILED] * 2
    disk.crash()
    fake.device = fake.make()
    heal(disk)
    assert fake.open().present(range(4)) == [0, 1]

    def tear(call: str, path: str) -> None:
        if call == "fdatasync":
            disk.fault = failing(errno.EIO)

    disk.fault = tear
    fake.write([4, 5])
    disk.crash(seed=3)
    heal(disk)
    fake.device = fake.make()
    there = fake.open().present(range(6))
    assert set(fake.read(range(6))) == set(there), "what is promised can be read"


# --- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["pwritev", "fdatasync", "allocate", "open"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_once_is_said_to_have_failed(disk: FaultyDisk, call: str, number: int) -> None:
    tester = OneDevice("/ssd", disk).open()
    disk.fault = failing(number, call, times=1)
    status = WriteStatus.FULL if number == errno.ENOSPC else WriteStatus.FAILED
    assert set(tester.write(range(3))) == {status}
    assert tester.present(range(3)) == []
    assert set(tester.write(range(3))) == {WriteStatus.STORED}
    assert tester.device.state is DeviceState.ACTIVE
    assert sum(tester.device.stats().errors.values()) == 1
    assert tester.reopen().read(range(3)) == {n: value(n) for n in range(3)}


def test_a_device_that_keeps_failing_takes_itself_out_and_is_still_read(
    fake: OneDevice, disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    fake.write(range(5))
    disk.fault = failing(errno.EIO, "pwritev")
    for number in range(10, 20):
        assert fake.write([number]) == [WriteStatus.FAILED]
    stats = fake.device.stats()
    assert (stats.state, stats.errors["write_error"]) == (DeviceState.READ_ONLY, 5)
    assert "5 writes in a row failed, the last with: Input/output error" in stats.reason
    assert len(caplog.records) == 2, "one line on the error, one on its end"
    assert len(fake.read(range(5))) == 5
    heal(disk)
    assert fake.write([30]) == [WriteStatus.FAILED]
    assert fake.reopen().device.state is DeviceState.ACTIVE


def test_a_file_system_that_turns_read_only(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(5))
    disk.read_only = True
    assert fake.write([9]) == [WriteStatus.FAILED]
    assert fake.device.state is DeviceState.READ_ONLY
    assert "read-only" in fake.device.stats().reason
    assert len(fake.read(range(5))) == 5
    assert fake.reopen().device.state is DeviceState.READ_ONLY, "also when it is so from the start"
    assert len(fake.read(range(5))) == 5


def test_a_block_that_cannot_be_read_is_dropped_alone(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(4))
    (entry,) = fake.device.lookup("n", [b"2"])
    assert entry is not None
    reads: list[str] = []

    def bad_place(call: str, path: str) -> None:
        if call == "preadv":
            reads.append(path)
            if len(reads) in (1, 4):  # all four at once; then the third alone
                raise OSError(errno.EIO, "bad sector")

    disk.fault = bad_place
    assert sorted(fake.read(range(4))) == [0, 1, 3]
    assert fake.lost == [(b"2", LostReason.UNREADABLE)]
    assert fake.device.state is DeviceState.ACTIVE


def test_a_device_that_cannot_be_read_holds_nothing(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(40))
    disk.fault = failing(errno.EIO, "preadv")
    assert fake.read(range(20)) == {}
    stats = fake.device.stats()
    assert (stats.state, stats.blocks) == (DeviceState.FAILED, 0)
    assert sorted(int(key) for key, _ in fake.lost) == list(range(40))
    assert fake.write([50]) == [WriteStatus.FAILED]
    fake.device.check_integrity()


def test_one_segment_that_cannot_be_read_at_start_is_given_up(fake: OneDevice, disk: FaultyDisk) -> None:
    fake.write(range(30))
    fake.device.close()

    def bad(call: str, path: str) -> None:
        if call == "preadv" and path == "/ssd/00000001.segment":
            raise OSError(errno.EIO, "bad")

    disk.fault = bad
    fake.reopen()
    assert fake.device.state is DeviceState.ACTIVE
    there = fake.present(range(30))
    assert 10 < len(there) < 30
    assert len(fake.read(there)) == len(there)
    heal(disk)
    assert set(fake.write(range(30, 60))) == {WriteStatus.STORED}


# --- a full file system ---------------------------------------------------------------------------------


def test_a_full_disk_costs_the_oldest_blocks_only(disk: FaultyDisk) -> None:
    disk.capacity = 2 * SLOT + (32 << 10)
    tester = OneDevice("/ssd", disk).open()
    assert set(tester.write(range(60))) == {WriteStatus.STORED}
    assert tester.device.state is DeviceState.ACTIVE
    there = tester.present(range(60))
    assert there == list(range(60 - len(there), 60))
    assert tester.read(there) == {n: value(n) for n in there}
    disk.capacity = 1 << 30
    tester.write(range(60, 130))
    assert tester.device.stats().segments == 4, "room that comes back is used"


def test_a_disk_without_room_for_one_segment(disk: FaultyDisk) -> None:
    disk.capacity = SEGMENT // 2
    tester = OneDevice("/ssd", disk).open()
    assert tester.write(range(3)) == [WriteStatus.FULL] * 3
    assert tester.device.state is DeviceState.ACTIVE
    disk.capacity = 1 << 30
    assert tester.write(range(3)) == [WriteStatus.STORED] * 3


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A real one of 1 MiB."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("may not mount here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_real_disk_that_is_full(small_file_system: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    (small_file_system / "other").write_bytes(bytes(200 << 10))
    tester = OneDevice(small_file_system).open()
    for start in range(0, 200, 20):
        assert set(tester.write(range(start, start + 20))) == {WriteStatus.STORED}
    there = tester.present(range(200))
    assert there == list(range(200 - len(there), 200))
    assert tester.read(there) == {n: value(n) for n in there}
    assert (len(there) + 1) * BLOCK >= SEGMENT, "one segment of the two or three that fit is in reserve"
    assert tester.reopen().read(there) == {n: value(n) for n in there}
    tester.device.close()
