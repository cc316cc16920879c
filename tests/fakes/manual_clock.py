"""A clock that moves only when the test says so."""

from __future__ import annotations

import asyncio
import heapq
import itertools

_TURNS_MAX = 10_000  # of the event loop: a chain of tasks longer than that never comes to rest


class ManualClock:
    """`Clock` whose time is moved by `advance`, which runs what becomes due on the way, in order."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = itertools.count()

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._number), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        end = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
                await self.settle()
        self._now = end
        await self.settle()

    async def settle(self) -> None:
        """Let every task run until it waits for something else than its turn."""
        ready = getattr(asyncio.get_running_loop(), "_ready")  # noqa: B009 - asyncio has no public name for it
        for _ in range(_TURNS_MAX):
            await asyncio.sleep(0)
            if not ready:
                return
        raise AssertionError(f"not at rest after {_TURNS_MAX} turns of the event loop")
