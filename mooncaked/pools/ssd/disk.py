"""System calls that the SSD pool makes, behind a protocol, so that tests can let each of them fail."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

IOV_MAX = 1024  # of Linux


class Disk(Protocol):
    """System calls by their names; all raise `OSError`. Files are named by path, open ones by number."""

    def open(self, path: str, *, write: bool = True, create: bool = False, direct: bool = False) -> int:
        """Open for reading, and with `write` for writing; `create` makes it where it is missing; `direct` is
        O_DIRECT, with EINVAL where the file system has none."""

    def close(self, fd: int) -> None:
        """Forget the number."""

    def size(self, path: str) -> int:
        """Length of the file in bytes."""

    def allocate(self, fd: int, size: int) -> None:
        """Give the file `size` bytes that can be written without further room (fallocate)."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write, at most `IOV_MAX` buffers; returns the bytes written, which may be fewer."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, at most `IOV_MAX` buffers; returns the bytes read, 0 at the end of the file."""

    def fdatasync(self, fd: int) -> None:
        """Make what was written durable."""

    def sync_directory(self, path: str) -> None:
        """Make names that were made, changed or removed durable."""

    def lock_directory(self, path: str) -> int:
        """Keep others out of the directory until the number is closed; raises `BlockingIOError` when
        another process has it."""

    def rename(self, source: str, target: str) -> None:
        """Give the file another name, in place of one that has it."""

    def unlink(self, path: str) -> None:
        """Remove the name."""

    def listdir(self, path: str) -> list[str]:
        """Names in the directory."""

    def free_bytes(self, path: str) -> int:
        """What the file system has left for this process, less one percent (at most 1 GiB) that it keeps."""


class RealDisk:
    """The system itself. Reads, writes and syncs let other threads run."""

    def open(self, path: str, *, write: bool = True, create: bool = False, direct: bool = False) -> int:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        return os.open(path, flags | (os.O_CREAT if create else 0) | (os.O_DIRECT if direct else 0), 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, path: str) -> int:
        return Path(path).stat().st_size

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock_directory(self, path: str) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def rename(self, source: str, target: str) -> None:
        Path(source).rename(target)

    def unlink(self, path: str) -> None:
        Path(path).unlink()

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)  # noqa: PTH208 - names are wanted, not paths

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        keep = min(found.f_blocks * found.f_frsize // 100, 1 << 30)
        return max(0, found.f_bavail * found.f_frsize - keep)


def write_all(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Write all of `buffers` one after the other from `offset` on; returns how many bytes that were."""
    total = 0
    for start in range(0, len(buffers), IOV_MAX):
        part = list(buffers[start : start + IOV_MAX])
        while part:
            done = disk.pwritev(fd, part, offset + total)
            if done <= 0:
                raise OSError(5, "the file took no more bytes")
            total += done
            part = _rest(part, done)
    return total


def read_all(disk: Disk, fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill all of `buffers` from `offset` on; False when the file ends before."""
    total = 0
    for start in range(0, len(buffers), IOV_MAX):
        part = list(buffers[start : start + IOV_MAX])
        while part:
            done = disk.preadv(fd, part, offset + total)
            if done <= 0:
                return False
            total += done
            part = _rest(part, done)
    return True


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What of `buffers` is left after `done` bytes."""
    for number, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[number + 1 :]]
        done -= len(buffer)
    return []
