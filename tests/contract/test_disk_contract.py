"""What the SSD pool relies on in a disk, for the real one and for the fake that other tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncaked.pools.ssd.aligned import PAGE, aligned_buffer
from mooncaked.pools.ssd.disk import IOV_MAX, Disk, RealDisk, read_all, write_all
from tests.fakes.faulty_disk import FaultyDisk


@pytest.fixture(params=["real", "fake"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if request.param == "real":
        yield RealDisk()
        return
    fake = FaultyDisk()
    fake.make_directory(str(tmp_path))
    yield fake


def pages(*letters: bytes) -> list[memoryview]:
    """Aligned pages full of each letter."""
    result = []
    for letter in letters:
        page = aligned_buffer(PAGE)
        page[:] = letter * PAGE
        result.append(page)
    return result


def read_back(disk: Disk, path: str, offset: int, size: int) -> bytes:
    fd = disk.open(path, write=False)
    try:
        data = bytearray(size)
        return bytes(data[: disk.preadv(fd, [memoryview(data)], offset)])
    finally:
        disk.close(fd)


def test_what_was_written_is_read_by_any_cut_of_buffers(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    fd = disk.open(path, create=True)
    disk.allocate(fd, 4 * PAGE)
    assert disk.pwritev(fd, pages(b"x", b"y"), PAGE) == 2 * PAGE
    disk.fdatasync(fd)
    disk.close(fd)
    assert disk.size(path) == 4 * PAGE
    assert read_back(disk, path, PAGE - 1, 3) == b"\0xx"
    assert read_back(disk, path, 2 * PAGE, 4 * PAGE) == b"y" * PAGE + bytes(PAGE), "reads end with the file"


def test_direct_files_take_whole_pages_only(disk: Disk, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    disk.close(disk.open(path, create=True))
    try:
        fd = disk.open(path, direct=True)
    except OSError:
        pytest.skip("no O_DIRECT here")
    disk.allocate(fd, 4 * PAGE)
    assert disk.pwritev(fd, pages(b"x"), 0) == PAGE
    with pytest.raises(OSError, match="Invalid"):
        disk.pwritev(fd, [pages(b"x")[0][:100]], 0)
    with pytest.raises(OSError, match="Invalid"):
        disk.preadv(fd, [pages(b"x")[0][:100]], 0)
    disk.close(fd)


def test_more_buffers_than_one_call_takes(disk: Disk, tmp_path: Path) -> None:
    fd = disk.open(str(tmp_path / "a"), create=True)
    data = [memoryview(b"%04d" % number) for number in range(IOV_MAX + 10)]
    assert write_all(disk, fd, data, 0) == 4 * len(data)
    back = [memoryview(bytearray(4)) for _ in data]
    assert read_all(disk, fd, back, 0)
    assert [bytes(view) for view in back] == [bytes(view) for view in data]
    assert not read_all(disk, fd, back, 8), "the file ends before"
    disk.close(fd)


def test_names(disk: Disk, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    for path in (a, b):
        fd = disk.open(path, create=True)
        disk.pwritev(fd, [memoryview(path.encode())], 0)
        disk.close(fd)
    disk.rename(a, b)
    disk.sync_directory(str(tmp_path))
    assert disk.listdir(str(tmp_path)) == ["b"]
    assert read_back(disk, b, 0, 500) == a.encode()
    disk.unlink(b)
    assert disk.listdir(str(tmp_path)) == []
    for call in (lambda: disk.open(b), lambda: disk.unlink(b), lambda: disk.size(b)):
        with pytest.raises(FileNotFoundError):
            call()


def test_a_directory_is_locked_by_one(disk: Disk, tmp_path: Path) -> None:
    fd = disk.lock_directory(str(tmp_path))
    with pytest.raises(BlockingIOError):
        disk.lock_directory(str(tmp_path))
    disk.close(fd)
    disk.close(disk.lock_directory(str(tmp_path)))
    with pytest.raises(FileNotFoundError):
        disk.lock_directory(str(tmp_path / "missing"))


def test_free_room_is_told(disk: Disk, tmp_path: Path) -> None:
    assert disk.free_bytes(str(tmp_path)) > 1 << 20
