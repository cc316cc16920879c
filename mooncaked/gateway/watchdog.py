"""Ends calls to instances that have silently gone: a frozen machine answers nothing and closes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mooncaked.errors import EngineFailed

EVERY_S = 0.5
SILENT_S = 2.0  # a call this quiet, to an instance that is no longer registered, is ended
STALL_S = 60.0  # between two tokens of one answer


@dataclass(slots=True)
class Call:
    """One call under watch. The caller notes in `heard_s` when it last heard from the engine."""

    instance_id: str
    scope: asyncio.Timeout
    heard_s: float  # the event loop's time
    streaming: bool = False  # tokens have begun to come
    verdict: str = ""


class Watchdog:
    """Watches all calls of one gateway. `run` it all the time."""

    def __init__(self, instances: Callable[[], Container[str]]) -> None:
        self._instances = instances
        self._calls: dict[int, Call] = {}

    @asynccontextmanager
    async def watching(self, instance_id: str) -> AsyncIterator[Call]:
        """Watch what happens inside; raises `EngineFailed` when the watchdog has ended it."""
        call: Call | None = None
        try:
            async with asyncio.timeout(None) as scope:
                call = Call(instance_id, scope, asyncio.get_running_loop().time())
                self._calls[id(call)] = call
                yield call
        except TimeoutError:
            if call is not None and call.verdict:
                raise EngineFailed(instance=instance_id, cause=call.verdict) from None
            raise
        finally:
            if call is not None:
                del self._calls[id(call)]

    async def run(self) -> None:
        """Look at all calls again and again, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.look(asyncio.get_running_loop().time())

    def look(self, now_s: float) -> None:
        """End the calls that are hopeless."""
        instances = self._instances()
        for call in self._calls.values():
            silent_s = now_s - call.heard_s
            if call.verdict or silent_s < SILENT_S:
                continue
            if call.instance_id not in instances:
                call.verdict = "it has left the cluster and says nothing more"
            elif call.streaming and silent_s > STALL_S:
                call.verdict = f"no token came for {STALL_S:.0f} s"
            if call.verdict:
                call.scope.reschedule(now_s)
