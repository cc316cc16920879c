"""Disks in memory, for the tiers: hold what was written, and fail as the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import xxhash

from mooncaked.pools.ssd import (
    DeviceState,
    DeviceStats,
    LostReason,
    ReadStatus,
    SsdEntry,
    SsdItem,
    WriteStatus,
)

Name = tuple[str, bytes]


class FakeDisks:
    """`mooncaked.tiers.Disks`. Attributes may be changed while it is used."""

    def __init__(self, lost: Callable[[Sequence[SsdEntry], LostReason], None] | None = None) -> None:
        self.values: dict[Name, tuple[SsdEntry, bytes]] = {}
        self.lost = lost or (lambda _entries, _reason: None)
        self.capacity_blocks = 1 << 30  # beyond it, the oldest block is lost
        self.refuses: WriteStatus | None = None  # what comes of all writes
        self.damaged: set[bytes] = set()  # keys that cannot be read as they were written
        self.state = DeviceState.ACTIVE
        self.writes: list[list[bytes]] = []  # keys, by call
        self.reads: list[list[bytes]] = []
        self.writing = threading.Event()  # writes wait for it
        self.writing.set()
        self.reading = threading.Event()  # reads wait for it
        self.reading.set()
        self._lock = threading.Lock()

    def put(
        self, namespace: str, key: bytes, data: bytes, parent: bytes | None = None, meta: bytes = b""
    ) -> None:
        """As if written before."""
        item = SsdItem(namespace=namespace, key=key, data=memoryview(data), parent=parent, meta=meta)
        self._store(item)

    def _store(self, item: SsdItem) -> None:
        data = bytes(item.data)
        entry = SsdEntry(
            namespace=item.namespace,
            key=item.key,
            parent=item.parent,
            meta=item.meta,
            size=len(data),
            checksum=xxhash.xxh3_64_intdigest(data) if item.checksum is None else item.checksum,
            device=0,
            location=0,
            generation=0,
            offset=0,
        )
        with self._lock:
            self.values[item.namespace, item.key] = entry, data

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        return [(namespace, key) in self.values for key in keys]

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> list[SsdEntry | None]:
        found = [self.values.get((namespace, key)) for key in keys]
        return [None if value is None else value[0] for value in found]

    def entries(self) -> list[SsdEntry]:
        return [entry for entry, _ in list(self.values.values())]

    def write(self, items: Sequence[SsdItem]) -> list[WriteStatus]:
        self.writes.append([item.key for item in items])
        assert self.writing.wait(10)
        if self.refuses is not None:
            return [self.refuses] * len(items)
        there = [self.contains(item.namespace, [item.key])[0] for item in items]
        for item, exists in zip(items, there, strict=True):
            if not exists:
                self._store(item)
        self._reclaim()
        return [WriteStatus.EXISTS if exists else WriteStatus.STORED for exists in there]

    def _reclaim(self) -> None:
        gone = []
        with self._lock:
            while len(self.values) > self.capacity_blocks:
                gone.append(self.values.pop(next(iter(self.values)))[0])
        if gone:
            self.lost(gone, LostReason.RECLAIMED)

    def lose(self, namespace: str, keys: Sequence[bytes]) -> None:
        """The disk turns out to have lost blocks."""
        with self._lock:
            gone = [value[0] for key in keys if (value := self.values.pop((namespace, key), None))]
        self.lost(gone, LostReason.UNREADABLE)

    def read_into(self, entries: Sequence[SsdEntry], views: Sequence[memoryview]) -> list[ReadStatus]:
        self.reads.append([entry.key for entry in entries])
        assert self.reading.wait(10)
        return [self._read(entry, view) for entry, view in zip(entries, views, strict=True)]

    def _read(self, entry: SsdEntry, view: memoryview) -> ReadStatus:
        value = self.values.get((entry.namespace, entry.key))
        if value is None:
            return ReadStatus.GONE
        view[:] = value[1]
        if entry.key in self.damaged:
            self.lose(entry.namespace, [entry.key])
            return ReadStatus.CORRUPT
        return ReadStatus.OK

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [self.values.pop((namespace, key), None) is not None for key in keys]

    def stats(self) -> list[DeviceStats]:
        size = sum(entry.size for entry in self.entries())
        return [
            DeviceStats(
                name="fake",
                state=self.state,
                reason="",
                direct=False,
                capacity_bytes=1 << 40,
                allocated_bytes=size,
                used_bytes=size,
                live_bytes=size,
                blocks=len(self.values),
                segments=1,
                segments_free=0,
                queued_bytes=0,
                written_bytes=0,
                device_written_bytes=0,
                read_bytes=0,
                stored_total=0,
                read_total=0,
                carried_total=0,
                carried_bytes=0,
                lost={},
                errors={},
                write_amplification=1.0,
            )
        ]
