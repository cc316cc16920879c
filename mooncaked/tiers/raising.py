"""The part of bringing blocks up that moves bytes, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import msgspec

from mooncaked.api.protocol import PutItem, PutSlot
from mooncaked.keys import show_key
from mooncaked.pools.ssd import ReadStatus, SsdEntry
from mooncaked.store import Store
from mooncaked.tiers.below import Disks

log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20  # brought up at once by one thread, unless a single block is larger
POOL_SHARE_MAX = 1 / 16  # of the pool, likewise
_BUSY_S = 1.0  # for whoever stores the same block just now


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """What was brought up since the start, and what was not."""

    blocks: int
    size: int  # bytes
    no_room: int  # blocks: all of the pool is being read or written
    gone: int  # blocks that a disk had lost by then
    failed: int  # blocks that a disk could not read, or that were damaged


class Raiser:
    """Copies blocks from the disks into the pool. Without `disks` it only lets restored blocks be compared
    with their checksums, by `verify`. Safe from any thread."""

    def __init__(self, store: Store, verify: Callable[[str, Sequence[bytes]], object]) -> None:
        self._store = store
        self._verify = verify
        self.disks: Disks | None = None
        self._lock = threading.Lock()
        self._blocks = self._size = self._no_room = self._gone = self._failed = 0

    def stats(self) -> Raised:
        """The figures now."""
        with self._lock:
            return Raised(
                blocks=self._blocks,
                size=self._size,
                no_room=self._no_room,
                gone=self._gone,
                failed=self._failed,
            )

    def bring_up(self, namespace: str, keys: Sequence[bytes]) -> dict[bytes, bool]:
        """Bring `keys` up; whether each can be pinned now."""
        self._verify(namespace, keys)
        below = self._store.below(namespace, keys)
        if self.disks is not None and any(below):
            wanted = [key for key, low in zip(keys, below, strict=True) if low]
            entries = [entry for entry in self.disks.lookup(namespace, wanted) if entry is not None]
            self._copy(self.disks, namespace, entries)
        exists, below = self._store.exists(namespace, keys), self._store.below(namespace, keys)
        return {key: here and not low for key, here, low in zip(keys, exists, below, strict=True)}

    def batch(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many of the first of `keys`, at least one, are to be brought up by one call."""
        if self.disks is None:
            return len(keys)
        size, limit = 0, min(BATCH_BYTES, int(POOL_SHARE_MAX * self._store.stats().capacity_bytes))
        for count, entry in enumerate(self.disks.lookup(namespace, keys)):
            size += 0 if entry is None else entry.size
            if count and size > limit:
                return count
        return len(keys)

    def _copy(self, disks: Disks, namespace: str, entries: Sequence[SsdEntry]) -> None:
        owner = self._store.new_owner()
        try:
            items = [PutItem(key=e.key, size=e.size, parent=e.parent, meta=e.meta) for e in entries]
            slots = self._store.begin_put(owner, namespace, items, raising=True)
            pairs = list(zip(entries, slots, strict=True))
            self._fill(disks, owner, namespace, [pair for pair in pairs if pair[1].status == "ok"])
        finally:
            self._store.drop_owner(owner)
        if busy := [entry.key for entry, slot in pairs if slot.status == "busy"]:
            self._store.wait_settled(namespace, busy, _BUSY_S)
        if full := [entry.key for entry, slot in pairs if slot.status in ("full", "too_large")]:
            log.info("no room to bring blocks up count=%d first=%s", len(full), show_key(full[0]))
            with self._lock:
                self._no_room += len(full)

    def _fill(
        self, disks: Disks, owner: int, namespace: str, pairs: Sequence[tuple[SsdEntry, PutSlot]]
    ) -> None:
        """Read into slots, and make readable what has come as it was written."""
        views = [self._store.view(slot.region, slot.offset, entry.size) for entry, slot in pairs]
        try:
            results = disks.read_into([entry for entry, _ in pairs], views)
        finally:
            for view in views:
                view.release()
        good = [pair for pair, status in zip(pairs, results, strict=True) if status is ReadStatus.OK]
        self._store.commit(owner, [slot.token for _, slot in good], [entry.checksum for entry, _ in good])
        self._store.raised(namespace, [entry.key for entry, _ in good])
        with self._lock:
            self._blocks += len(good)
            self._size += sum(entry.size for entry, _ in good)
            self._gone += results.count(ReadStatus.GONE)
            self._failed += len(results) - len(good) - results.count(ReadStatus.GONE)
