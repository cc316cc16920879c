"""Units whose blocks all went, to see whether keeping them would have been better."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic

from mooncaked.eviction.base import B
from mooncaked.eviction.prefix_units import Unit

_MARKS = 32  # of evicted blocks, for each block that is present
_KEPT_MIN = 64  # ghosts, however few blocks are present


class Ghosts(Generic[B]):
    """Bounded by the number of blocks that are present; the oldest ghosts are forgotten first."""

    def __init__(self) -> None:
        self._units: OrderedDict[tuple[str, bytes], Unit[B]] = OrderedDict()
        self._round: deque[Unit[B]] = deque()  # all of them and some that left, in the order to look at them
        self._marks = 0

    def __len__(self) -> int:
        return len(self._units)

    def add(self, unit: Unit[B]) -> None:
        """A unit has lost its last block."""
        self.take(unit.name)
        self._units[unit.name] = unit
        self._round.append(unit)
        self._marks += len(unit.marks)

    def take(self, name: tuple[str, bytes]) -> Unit[B] | None:
        """The ghost whose first block had that name; it is none any more."""
        unit = self._units.pop(name, None)
        if unit is not None:
            self._marks -= len(unit.marks)
        return unit

    def forget(self, present: int) -> Iterator[Unit[B]]:
        """Those that are too many beside `present` blocks; they are none any more."""
        kept = max(_KEPT_MIN, present)
        while len(self._units) > kept or self._marks > kept * _MARKS:
            _, unit = self._units.popitem(last=False)
            self._marks -= len(unit.marks)
            yield unit

    def look(self, count: int) -> Iterator[Unit[B]]:
        """About `count` of them in turn."""
        for _ in range(min(count, len(self._round))):
            unit = self._round.popleft()
            if self._units.get(unit.name) is unit:
                self._round.append(unit)
                yield unit
