"""The last events of a node's block table, numbered from 1 without a gap. Pure: its owner locks."""

from __future__ import annotations

from typing import Generic, TypeVar

from mooncaked.errors import IntegrityError

E = TypeVar("E")


class EventLog(Generic[E]):
    """A ring of the last `limit` events. `sequence` is the number of the newest event, 0 before the first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sequence = 0
        self._ring: list[E] = []  # event n is at (n - 1) % limit
        self._cut = 0  # events up to this number are not given out any more

    def append(self, event: E) -> None:
        """Number `event` and keep it; the oldest one goes when the ring is full."""
        if self.sequence < self.limit:
            self._ring.append(event)
        else:
            self._ring[self.sequence % self.limit] = event
        self.sequence += 1

    def cut(self, event: E) -> None:
        """Number `event` and give it out to nobody: every reader needs a snapshot now."""
        self.append(event)
        self._cut = self.sequence

    def since(self, sequence: int, count_max: int) -> list[E] | None:
        """The first `count_max` events after number `sequence`, oldest first. None when some of them are gone
        from the ring, or when `sequence` is none of this log's numbers: the reader then needs a snapshot."""
        oldest_known = max(self._cut, self.sequence - len(self._ring))
        if not oldest_known <= sequence <= self.sequence:
            return None
        count = min(self.sequence - sequence, count_max)
        first = sequence % self.limit
        events = self._ring[first : first + count]
        return events + self._ring[: count - len(events)]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the ring holds as many events as its numbers say."""
        if len(self._ring) != min(self.sequence, self.limit):
            raise IntegrityError(
                what="event log", detail=f"{len(self._ring)} events at number {self.sequence}"
            )
