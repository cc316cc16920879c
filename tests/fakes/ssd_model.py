"""What may be expected of an SSD device after anything: a model of names, versions and values."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from mooncaked.pools.ssd import LostReason, ReadStatus, SsdDevice, SsdEntry, SsdItem, WriteStatus
from mooncaked.pools.ssd.aligned import aligned_buffer

NAMESPACE = "tenant/model"
SIZES = (0, 1, 100, 4096, 5000, 8192, 12_288, 20_000, 33_000, 40_960)


def value_of(key: bytes, version: int) -> bytes:
    """The one value of that version of a key."""
    dice = random.Random(f"{key!r} {version}")
    return dice.randbytes(dice.choice(SIZES))


def aligned(data: bytes) -> memoryview:
    """The bytes in memory that O_DIRECT takes."""
    view = aligned_buffer(len(data))[: len(data)]
    view[:] = data
    return view


class Model:
    """Follows what a device is asked and says, and compares. A version is a number from 1 on, 0: no block."""

    def __init__(self) -> None:
        self.allowed: dict[bytes, set[int]] = defaultdict(lambda: {0})  # versions that may be read, by key
        self.versions: dict[bytes, int] = defaultdict(int)  # the newest that was tried
        self.lost: list[tuple[bytes, LostReason]] = []
        self._lost_early: set[bytes] = set()
        self._removals: set[bytes] = set()  # not durable yet

    def item(self, key: bytes) -> SsdItem:
        """The next version of a key, about to be written."""
        self.versions[key] += 1
        version = self.versions[key]
        self.allowed[key].add(version)
        self._lost_early.discard(key)
        data = aligned(value_of(key, version))
        return SsdItem(namespace=NAMESPACE, key=key, data=data, parent=b"p" + key, meta=key[:1])

    def written(self, key: bytes, status: WriteStatus) -> None:
        """The device said what became of the version that was written last."""
        version = self.versions[key]
        if status is WriteStatus.STORED:
            self.allowed[key] = {version, 0} if key in self._lost_early else {version}
            self._removals.discard(key)
        elif status is WriteStatus.EXISTS:
            self.allowed[key].discard(version)

    def write(self, device: SsdDevice, keys: Sequence[bytes]) -> list[WriteStatus]:
        """Write the next version of each key."""
        items = [self.item(key) for key in keys]
        statuses = device.write(items)
        for key, status in zip(keys, statuses, strict=True):
            self.written(key, status)
        return statuses

    def on_lost(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        """For `SsdDevice.open`."""
        for entry in entries:
            self.lost.append((entry.key, reason))
            self.allowed[entry.key].add(0)
            self._lost_early.add(entry.key)  # perhaps before its write returns, on a disk with little room

    def remove(self, device: SsdDevice, keys: Sequence[bytes]) -> None:
        """Remove keys, not for good yet."""
        for key, there in zip(keys, device.remove(NAMESPACE, keys), strict=True):
            if there:
                self.note_removal(key)
        assert device.contains(NAMESPACE, keys) == [False] * len(keys)

    def note_removal(self, key: bytes) -> None:
        """A key is removed, from now until somebody writes it again."""
        self.allowed[key].add(0)
        self._removals.add(key)

    def flush(self, device: SsdDevice) -> bool:
        """Remove for good what was removed."""
        if not device.flush():
            return False
        self.removals_are_durable()
        return True

    def removals_are_durable(self) -> None:
        """The device said so."""
        for key in self._removals:
            self.allowed[key] = {0}
        self._removals.clear()

    def restarted(self) -> None:
        """Removals that were not durable until now may not have happened."""
        self._removals.clear()

    def check(self, device: SsdDevice) -> int:
        """Read everything; what is there must be right, and what must be there has to be. Returns how many
        blocks that were."""
        keys = list(self.versions)
        entries = [entry for entry in device.lookup(NAMESPACE, keys) if entry is not None]
        views = [memoryview(bytearray(entry.size)) for entry in entries]
        statuses = device.read_into(entries, views)
        read = {
            entry.key: bytes(view)
            for entry, view, status in zip(entries, views, statuses, strict=True)
            if status is ReadStatus.OK
        }
        for key in keys:
            self.check_one(key, read.get(key))
        return len(read)

    def check_one(self, key: bytes, data: bytes | None) -> None:
        """Compare what was read of a key, None for nothing, with what may be there."""
        allowed = self.allowed[key]
        if data is None:
            assert 0 in allowed, f"{key!r} version {max(allowed)} is gone for no reason"
            return
        good = [version for version in allowed if version and value_of(key, version) == data]
        assert good, f"{key!r} has bytes that are none of versions {sorted(allowed)}"
