"""Waiting for something that another task, thread or process does."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def eventually(
    holds: Callable[[], object | Awaitable[object]], within_s: float, what: str = ""
) -> float:
    """Return how long it took until `holds()` was true, in seconds; fail when it is not within `within_s`."""
    begin = time.monotonic()
    while True:
        answer = holds()
        if await answer if inspect.isawaitable(answer) else answer:
            return time.monotonic() - begin
        if time.monotonic() - begin > within_s:
            raise AssertionError(f"not within {within_s} s: {what or inspect.getsource(holds).strip()}")
        await asyncio.sleep(0.01)
