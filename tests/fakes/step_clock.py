"""A clock that stands still until a test moves it; for code that only reads the time."""

from __future__ import annotations


class StepClock:
    """Both times start at `now` seconds. `sleep` moves the clock, so that nothing ever waits."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
