"""The disks, as the store sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from mooncaked.block import Block
from mooncaked.pools.ssd import DeviceStats, LostReason, ReadStatus, SsdEntry, SsdItem, WriteStatus
from mooncaked.store import LowerBlock, Store
from mooncaked.tiers.admission import Admission


class Disks(Protocol):
    """What the tiers need of `mooncaked.pools.ssd.SsdPool`. Safe from any thread; nothing raises for what a
    disk does."""

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` can be read."""

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> list[SsdEntry | None]:
        """What there is to `keys`."""

    def entries(self) -> Iterable[SsdEntry]:
        """All that can be read."""

    def write(self, items: Sequence[SsdItem]) -> list[WriteStatus]:
        """Write, and wait until it is durable."""

    def read_into(self, entries: Sequence[SsdEntry], views: Sequence[memoryview]) -> list[ReadStatus]:
        """Read values into memory of just their sizes, and check them."""

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Forget `keys`, also those that are just being written."""

    def stats(self) -> list[DeviceStats]:
        """Each device now."""


class SsdBelow:
    """`mooncaked.store.LowerTier` over disks. `expect` is told which blocks will probably be read soon."""

    def __init__(
        self,
        store: Store,
        disks: Disks,
        admission: Admission,
        expect: Callable[[str, Sequence[bytes]], object],
    ) -> None:
        self._store = store
        self._disks = disks
        self._expect = expect
        self._lock = threading.Lock()  # of what follows; nothing else is done under it
        self._admission = admission
        self.missed_blocks = 0  # that were worth a place on a disk, and went before they could be written
        self.missed_bytes = 0

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` can be read."""
        return self._disks.contains(namespace, keys)

    def blocks(self) -> list[LowerBlock]:
        """All that can be read."""
        return [_lower(entry) for entry in self._disks.entries()]

    def remove(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Forget `keys`; the store hears of those that were there."""
        there = [entry for entry in self._disks.lookup(namespace, keys) if entry is not None]
        self._disks.remove(namespace, keys)
        if there:
            self._store.lower_removed([_lower(entry) for entry in there])

    def needed(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Somebody will probably read `keys`."""
        self._expect(namespace, keys)

    def evicted(self, block: Block) -> None:
        """A block had to go from memory that no disk has."""
        with self._lock:
            if self._admission.admits(block):
                self.missed_blocks += 1
                self.missed_bytes += block.size
            self._admission.evicted(block.namespace, block.key)

    def lost(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        """For the disks to tell of blocks that they lost."""
        if reason is LostReason.RECLAIMED:
            with self._lock:
                for entry in entries:
                    self._admission.evicted(entry.namespace, entry.key)
        self._store.lower_removed([_lower(entry) for entry in entries])

    def admits(self, block: Block) -> bool:
        """Whether a block that has to leave memory is to be written."""
        with self._lock:
            return self._admission.admits(block)


def _lower(entry: SsdEntry) -> LowerBlock:
    return LowerBlock(entry.namespace, entry.key, entry.parent, entry.size)
