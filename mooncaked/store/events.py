"""What others hear: numbered events, snapshots, and the end of a write."""

from __future__ import annotations

from collections.abc import Sequence

from mooncaked.store.books import EVENTS_KEPT, Books
from mooncaked.types import BlockEvent, Tier


class Events(Books):
    """The event log."""

    @property
    def sequence(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._log.sequence

    def snapshot(self) -> tuple[int, list[BlockEvent]]:
        """Everything this node has, as events, and the number of the newest event that it contains."""
        with self._lock:
            sequence, blocks = self._log.sequence, self._table.all_visible()
            lower, upper = self._lower, self._upper
        # Not under the lock, since there may be millions: what changes there after `sequence` has an event.
        below = [] if lower is None else lower.blocks()
        events = [self._event(block, stored=True) for block in blocks]  # these fields never change
        events += [BlockEvent(True, b.namespace, b.key, b.parent, b.size, Tier.SSD) for b in below]
        events += [] if upper is None else upper.blocks()
        return sequence, events

    def events_since(self, sequence: int, count_max: int = EVENTS_KEPT) -> list[BlockEvent] | None:
        """Up to `count_max` events after number `sequence`, oldest first. None: they are no longer kept, or
        there is no such number here; take a snapshot."""
        with self._lock:
            return self._log.since(sequence, count_max)

    def wait_events(self, sequence: int, timeout_s: float) -> int:
        """Wait until there is an event after number `sequence`, `timeout_s` has passed, or the store is
        closed; the number of the newest event."""
        with self._lock:
            self._logged.wait_for(lambda: self._closed or self._log.sequence > sequence, timeout_s)
            return self._log.sequence

    def wait_settled(self, namespace: str, keys: Sequence[bytes], timeout_s: float) -> bool:
        """Wait until nobody is writing any of `keys` (committed or given up); False when `timeout_s` has
        passed or the store was closed before."""

        def settled() -> bool:
            return self._table.pending(namespace).keys().isdisjoint(keys)

        with self._lock:
            self._settled.wait_for(lambda: self._closed or settled(), timeout_s)
            return settled()
