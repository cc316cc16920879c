"""The store as its users know it: all parts together."""

from __future__ import annotations

from mooncaked.store.events import Events
from mooncaked.store.lower import Lower
from mooncaked.store.reading import Reading
from mooncaked.store.restart import Restart
from mooncaked.store.upper import Upper
from mooncaked.store.writing import Writing
from mooncaked.storestats import NamespaceStats, StoreStats


class Store(Writing, Reading, Lower, Upper, Restart, Events):
    """The blocks of one node. Pools belong to the caller, and outlive the store."""

    def close(self) -> None:
        """Wake everybody who waits, for good. Everything else goes on working until the pool is closed."""
        with self._lock:
            self._closed = True
            self._logged.wake()
            self._settled.wake()
            self._upkeep.wake()

    def stats(self) -> StoreStats:
        """How full the pool is and what has happened so far."""
        with self._lock:
            table, room = self._table, self._room
            return StoreStats(
                capacity_bytes=room.capacity,
                used_bytes=room.used_bytes,
                largest_free_bytes=max(0, room.largest_free),
                pinned_bytes=table.pinned_bytes,
                filling_bytes=table.pending_bytes,
                reserved_bytes=room.reservations.used_bytes,
                blocks=table.visible_count,
                pinned=table.pinned_count,
                filling=table.pending_count,
                hidden=table.hidden_count,
                unverified=len(self._unverified),
                unchecked=len(self._unchecked) + self._checking,
                owners=table.owner_count,
                sequence=self._log.sequence,
                **vars(self._counters),
            )

    def namespaces(self) -> list[NamespaceStats]:
        """What each namespace has, by name; also those that have a quota and nothing else."""
        with self._lock:
            quotas, here = self._room.quotas, self._table.namespaces()
        names = sorted({*here, *quotas})
        return [NamespaceStats(name, *here.get(name, (0, 0)), quotas.get(name)) for name in names]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless all books agree. O(blocks) under the lock: for tests and idling."""
        with self._lock:
            self._room.check_integrity()
            self._log.check_integrity()
