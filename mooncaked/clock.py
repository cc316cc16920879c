"""Time as an argument: whatever waits or measures takes a `Clock`, so that it can be tested and simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back; for durations, deadlines and leases."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; for records that people read, never for decisions."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for `seconds` of this clock's time."""


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        import asyncio  # here: blocking clients import this module and never sleep so, and it is large

        await asyncio.sleep(seconds)


class Deadline:
    """A point in monotonic time that travels as an argument through a chain of calls."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self.limit_s = seconds
        self._end = clock.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - self._clock.monotonic())

    def passed(self) -> bool:
        return self.left() == 0.0
