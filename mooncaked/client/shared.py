"""What a daemon shares with its clients beside the pool, mapped: the index, the words `posted`, and pages.

See `mooncaked.api.shm` for the layout.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from mooncaked import fences
from mooncaked.api import shm
from mooncaked.api.protocol import DirectInfo, HelloReply
from mooncaked.errors import IntegrityError


class SharedWords:
    """The index of one life of a daemon, and the words `posted`; for all connections of a client."""

    def __init__(self, hello: HelloReply, info: DirectInfo, fds: Sequence[int]) -> None:
        """Map from the descriptors of index, page and `posted`; raises `IntegrityError` when they do not
        fit."""
        index = memoryview(_map(fds[0], info.index_bytes, writable=False)).cast("Q")
        entries = index[shm.H_ENTRIES]
        if (
            (index[shm.H_MAGIC], index[shm.H_VERSION], index[shm.H_EPOCH])
            != (shm.MAGIC, shm.VERSION, hello.epoch)
            or info.index_bytes != shm.index_bytes(entries)
            or entries & (entries - 1)
        ):
            raise IntegrityError(
                what="the shared index", detail="it is not of this daemon, or of another version"
            )
        self.header = index
        self.entries = index[shm.ENTRIES_AT :]
        self.mask = (entries - 1) * shm.ENTRY_WORDS
        self._applied = index[shm.APPLIED_AT : shm.ENTRIES_AT]
        self.posted: memoryview | None = None
        if info.posted_bytes:
            self.posted = memoryview(_map(fds[2], info.posted_bytes, writable=True)).cast("Q")
        self._seeds: dict[str, tuple[int, int]] = {}

    def knows(self, namespace: str) -> bool:
        """Whether `learn` was told of a namespace."""
        return namespace in self._seeds

    def seeds(self, namespace: str) -> tuple[int, int]:
        """How keys of a namespace are hashed that `learn` was told of."""
        return self._seeds[namespace]

    def learn(self, namespace: str, seeds: tuple[int, int]) -> None:
        """The daemon said how keys of a namespace are hashed."""
        self._seeds[namespace] = seeds

    def settled(self) -> bool:
        """Whether the daemon has obeyed all that clients have posted."""
        if self.posted is None:
            return True
        count = min(self.header[shm.H_CONNECTIONS], shm.CONNECTIONS_MAX)
        return self.posted[:count].tobytes() == self._applied[:count].tobytes()

    def applied(self, slot: int) -> int:
        """How many posted frames of a connection the daemon has obeyed."""
        count: int = self._applied[slot]
        return count


class Page:
    """A connection's own page."""

    def __init__(self, fd: int, size: int, slot: int | None) -> None:
        self.slot = slot
        self.words = memoryview(_map(fd, max(size, shm.PAGE_BYTES), writable=True)).cast("Q")
        self.fenced = fences.register()  # whether the daemon's barriers reach this process

    def note(self, number: int) -> None:
        """Tell the daemon that a block was used. Threads may overwrite each other's notes: it is a hint."""
        words = self.words
        count = words[shm.P_NOTES]
        words[shm.NOTES_AT + count % shm.NOTES] = number
        words[shm.P_NOTES] = count + 1

    def missed(self, count: int) -> None:
        """Tell the daemon that keys were not there."""
        self.words[shm.P_MISSES] += count


def _map(fd: int, size: int, *, writable: bool) -> mmap.mmap:
    if not 0 < size <= os.fstat(fd).st_size:  # touching a page behind the end would kill this process
        raise IntegrityError(
            what="the daemon's greeting", detail=f"{size} bytes of shared memory are not there"
        )
    return mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
