"""Where memory is kept from one life of the daemon to the next.

    systemd     its file descriptor store holds memfds: sealed, of any kind of pages
    shm         files below /dev/shm, in a directory of this user's, locked while a daemon has them
    nowhere     memfds that go with the process

Each thing that is kept has a name: `region-3`, `journal-0`. What is kept is handed over once, by `take`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from mooncaked.config import DramConfig
from mooncaked.notify import Notifier, fd_store_size, received_fds
from mooncaked.pools.memory import HUGE_BYTES, make_memfd

log = logging.getLogger(__name__)

PREFIX = "mooncaked-"  # of names in systemd's store, which may hold others' descriptors too
_NAME = re.compile(r"(region|journal|index)-\d+")


class Keeper(Protocol):
    """One of the places."""

    @property
    def where(self) -> str:
        """For the log and for operators; empty: nowhere."""

    def names(self) -> list[str]:
        """What was kept and not handed over yet."""

    def take(self, name: str) -> int | None:
        """Hand over the descriptor of what was kept; None when there is no such thing. It stays kept."""

    def room(self) -> int:
        """Bytes that could be kept beside what is there."""

    def make(self, name: str, size: int, huge_pages: str = "off") -> int:
        """New memory that is kept, in place of what had that name; its descriptor is the caller's. It cannot
        change its size, unless `size` is 0. Raises `OSError` when it cannot be."""

    def drop(self, name: str) -> None:
        """Keep this no longer."""

    def remove(self) -> None:
        """Keep nothing any more, and close."""

    def close(self) -> None:
        """Let another daemon have what is kept."""


class Nowhere:
    """Keeps nothing."""

    where = ""

    def names(self) -> list[str]:
        return []

    def take(self, name: str) -> int | None:
        return None

    def room(self) -> int:
        return 1 << 62

    def make(self, name: str, size: int, huge_pages: str = "off") -> int:
        return make_memfd(PREFIX + name, size, huge_pages)

    def drop(self, name: str) -> None:
        return

    def remove(self) -> None:
        return

    def close(self) -> None:
        return


class SystemdStore:
    """systemd's file descriptor store. It gives all that it has to a daemon that starts, and keeps it."""

    where = "systemd"

    def __init__(self, notifier: Notifier, received: dict[str, int]) -> None:
        """`received`: descriptors by name, as systemd gave them; those that are not ours are closed."""
        self._notifier = notifier
        self._kept: dict[str, int] = {}  # not handed over yet
        self._stored: set[str] = set()
        for name, fd in received.items():
            if name.startswith(PREFIX) and _NAME.fullmatch(name.removeprefix(PREFIX)):
                self._kept[name.removeprefix(PREFIX)] = fd
                self._stored.add(name.removeprefix(PREFIX))
            else:
                os.close(fd)

    def names(self) -> list[str]:
        return sorted(self._kept)

    def take(self, name: str) -> int | None:
        return self._kept.pop(name, None)

    def room(self) -> int:
        return 1 << 62

    def make(self, name: str, size: int, huge_pages: str = "off") -> int:
        self.drop(name)
        fd = make_memfd(PREFIX + name, size, huge_pages) if size else os.memfd_create(PREFIX + name)
        try:
            self._notifier.store_fd(PREFIX + name, fd)
        except OSError:
            os.close(fd)
            raise
        self._stored.add(name)
        return fd

    def drop(self, name: str) -> None:
        if (fd := self._kept.pop(name, None)) is not None:
            os.close(fd)
        self._stored.discard(name)
        self._notifier.forget_fd(PREFIX + name)

    def remove(self) -> None:
        for name in self._stored | self._kept.keys():
            self.drop(name)

    def close(self) -> None:
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()


class ShmFiles:
    """Files in a directory of shared memory. Raises `OSError` when it cannot be used: also when another
    daemon has it, or when it is not this user's alone. These files cannot be sealed: see `Memory.check`."""

    where = "shm"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._lock = -1
        try:
            self._check()
            self._lock = self._open("lock", os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise
        listed = os.listdir(self._directory)  # noqa: PTH208 (by descriptor: nobody can swap it)
        self._left = {name for name in listed if _NAME.fullmatch(name)}

    def _check(self) -> None:
        """Whoever can write into the directory can put memory of theirs in the place of ours."""
        found = os.fstat(self._directory)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{self.folder} is not a private directory of this user")

    def names(self) -> list[str]:
        return sorted(self._left)

    def take(self, name: str) -> int | None:
        if name not in self._left:
            return None
        self._left.remove(name)
        try:
            return self._open(name, 0)
        except OSError as error:
            log.warning("kept memory cannot be opened name=%s cause=%s", name, error)
            return None

    def room(self) -> int:
        found = os.fstatvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def make(self, name: str, size: int, huge_pages: str = "off") -> int:
        if huge_pages in HUGE_BYTES:
            raise OSError(f"{self.folder} has no huge pages of {huge_pages}")
        self.drop(name)
        if size > self.room():
            raise OSError(f"{self.folder} has room for {self.room()} bytes")
        fd = self._open(name, os.O_CREAT | os.O_EXCL)
        os.ftruncate(fd, size)
        return fd

    def drop(self, name: str) -> None:
        self._left.discard(name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def remove(self) -> None:
        for name in os.listdir(self._directory):  # noqa: PTH208 (by descriptor: nobody can swap it)
            self.drop(name)
        with suppress(OSError):  # it is gone, or the parent is not ours to change
            self.folder.rmdir()
        self.close()

    def close(self) -> None:
        for fd in (self._lock, self._directory):
            if fd >= 0:
                os.close(fd)
        self._lock = self._directory = -1

    def _open(self, name: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._directory)


def open_keeper(
    settings: DramConfig, node_id: str, notifier: Notifier, environment: Mapping[str, str]
) -> Keeper:
    """What keeps the memory, by `dram.warm_restart`. What other keepers have from before is given back."""
    systemd = SystemdStore(notifier, received_fds(environment))
    folder = shm_folder(settings.shm_dir, node_id)
    if settings.warm_restart == "auto" and (fd_store_size(environment) or systemd.names()):
        clear_shm(folder)
        return systemd
    for name in systemd.names():
        systemd.drop(name)
    if settings.warm_restart == "off":
        clear_shm(folder)
        return Nowhere()
    try:
        if settings.huge_pages in HUGE_BYTES:
            clear_shm(folder)
            raise OSError(
                f"{settings.shm_dir} has no huge pages of {settings.huge_pages}, systemd's store has"
            )
        return ShmFiles(folder)
    except OSError as error:
        log.warning("memory is not kept over a restart cause=%r", str(error))
        return Nowhere()


def shm_folder(shm_dir: Path, node_id: str) -> Path:
    """Where a node's memory is kept without systemd."""
    return shm_dir / f"mooncaked-{os.getuid()}-{node_id}"


def clear_shm(folder: Path) -> None:
    """Give back what was kept there, unless another daemon has it."""
    with suppress(OSError):
        if folder.exists():
            files = ShmFiles(folder)
            files.remove()
