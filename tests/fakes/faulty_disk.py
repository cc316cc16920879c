"""A disk in memory that fails, fills up, lies and crashes when the test says so."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import PurePath

PAGE = 4096


class _File:
    """What is on the medium for certain, and what was written since the last sync."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.current = bytearray()
        self.unsynced: set[int] = set()  # pages

    def resize(self, size: int) -> None:
        self.durable.extend(bytes(size - len(self.durable)))
        self.current.extend(bytes(size - len(self.current)))


class FaultyDisk:
    """`Disk` in memory: `capacity` bytes for all files.

    `fault(call, path)` is asked before every call and may raise. `crash` loses what was not synced, all of it
    or pages by chance, as a power failure does; numbers of open files then mean nothing any more."""

    def __init__(self, capacity: int = 1 << 30, *, direct: bool = True) -> None:
        self.capacity = capacity
        self.direct = direct
        self.read_only = False
        self.fault: Callable[[str, str], None] = lambda call, path: None
        self.calls: list[str] = []
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._directories: set[str] = set()
        self._locked: dict[int, str] = {}
        self._open: dict[int, tuple[str, _File, bool]] = {}
        self._next_fd = self._first_fd = 1000
        self._lock = threading.RLock()

    # --- the test's side --------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        """It is there, durably."""
        self._directories.add(path)

    def crash(self, seed: int | None = None) -> None:
        """Lose what was not synced: all of it, or with a seed each page by the toss of a coin."""
        coin = random.Random(seed)
        for name, file in list(self._names.items()):
            for page in sorted(file.unsynced):
                if seed is not None and coin.random() < 0.5:
                    part = slice(page * PAGE, (page + 1) * PAGE)
                    file.durable[part] = file.current[part]
            file.unsynced.clear()
            file.current = bytearray(file.durable)
            if name not in self._durable_names and (seed is None or coin.random() < 0.5):
                del self._names[name]
        for name, file in self._durable_names.items():
            self._names.setdefault(name, file)
        self._durable_names = dict(self._names)
        self._open.clear()
        self._locked.clear()
        self._first_fd = self._next_fd + 1

    def flip(self, path: str, offset: int, bit: int = 0) -> None:
        """Let a bit be the other one."""
        file = self._names[path]
        for data in (file.durable, file.current):
            data[offset] ^= 1 << bit

    def content(self, path: str) -> bytes:
        """What a file reads as now."""
        return bytes(self._names[path].current)

    def paths(self) -> list[str]:
        """All files."""
        return sorted(self._names)

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(file.current) for file in self._names.values())

    # --- the device's side ------------------------------------------------------------------------------

    def _enter(self, call: str, path: str, writes: bool = False) -> None:
        self.calls.append(call)
        self.fault(call, path)
        if writes and self.read_only:
            raise _error(errno.EROFS)

    def open(self, path: str, *, write: bool = True, create: bool = False, direct: bool = False) -> int:
        with self._lock:
            self._enter("open", path, write)
            if direct and not self.direct:
                raise _error(errno.EINVAL)
            if path not in self._names:
                if not create:
                    raise _error(errno.ENOENT)
                self._names[path] = _File()
            self._next_fd += 1
            self._open[self._next_fd] = (path, self._names[path], direct)
            return self._next_fd

    def close(self, fd: int) -> None:
        with self._lock:
            known = self._locked.pop(fd, None) is not None or self._open.pop(fd, None) is not None
            if not known and fd >= self._first_fd:  # of a process that is gone, it does not matter
                raise _error(errno.EBADF)

    def _file(self, fd: int) -> tuple[str, _File, bool]:
        if fd not in self._open:
            raise _error(errno.EBADF)
        return self._open[fd]

    def size(self, path: str) -> int:
        with self._lock:
            self._enter("size", path)
            if path not in self._names:
                raise _error(errno.ENOENT)
            return len(self._names[path].current)

    def allocate(self, fd: int, size: int) -> None:
        with self._lock:
            path, file, _ = self._file(fd)
            self._enter("allocate", path, True)
            if self.used + max(0, size - len(file.current)) > self.capacity:
                raise _error(errno.ENOSPC)
            file.resize(size)  # the length itself is in the journal of a real one, and does not need a sync

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            path, file, direct = self._file(fd)
            self._enter("pwritev", path, True)
            if direct and (offset % PAGE or any(len(buffer) % PAGE for buffer in buffers)):
                raise _error(errno.EINVAL)
            at = offset
            for buffer in buffers:
                end = at + len(buffer)
                if end > len(file.current) and self.used + end - len(file.current) > self.capacity:
                    raise _error(errno.ENOSPC)
                file.resize(max(end, len(file.current)))
                file.current[at:end] = buffer
                file.unsynced.update(range(at // PAGE, -(-end // PAGE)))
                at = end
            return at - offset

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            path, file, direct = self._file(fd)
            self._enter("preadv", path)
            if direct and (offset % PAGE or any(len(buffer) % PAGE for buffer in buffers)):
                raise _error(errno.EINVAL)
            at = offset
            for buffer in buffers:
                part = file.current[at : at + len(buffer)]
                buffer[: len(part)] = part
                at += len(part)
            return at - offset

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            path, file, _ = self._file(fd)
            self._enter("fdatasync", path)
            file.durable[:] = file.current
            file.unsynced.clear()

    def sync_directory(self, path: str) -> None:
        with self._lock:
            self._enter("sync_directory", path)
            self._durable_names = dict(self._names)

    def lock_directory(self, path: str) -> int:
        with self._lock:
            self._enter("lock_directory", path)
            if path not in self._directories:
                raise _error(errno.ENOENT)
            if path in self._locked.values():
                raise _error(errno.EAGAIN)
            self._next_fd += 1
            self._locked[self._next_fd] = path
            return self._next_fd

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            self._enter("rename", source, True)
            if source not in self._names:
                raise _error(errno.ENOENT)
            self._names[target] = self._names.pop(source)

    def unlink(self, path: str) -> None:
        with self._lock:
            self._enter("unlink", path, True)
            if path not in self._names:
                raise _error(errno.ENOENT)
            del self._names[path]

    def listdir(self, path: str) -> list[str]:
        with self._lock:
            self._enter("listdir", path)
            paths = [PurePath(name) for name in self._names]
            return [file.name for file in paths if str(file.parent) == path]

    def free_bytes(self, path: str) -> int:
        with self._lock:
            self._enter("free_bytes", path)
            return max(0, self.capacity - self.used)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def failing(number: int, *calls: str, times: int = 1 << 30, after: int = 0) -> Callable[[str, str], None]:
    """A fault: those calls (all, when none is named) raise `number`, `times` times, after `after` more."""
    left = [after, times]

    def fault(call: str, path: str) -> None:
        if calls and call not in calls:
            return
        if left[0] > 0:
            left[0] -= 1
        elif left[1] > 0:
            left[1] -= 1
            raise _error(number)

    return fault
