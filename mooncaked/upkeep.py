"""What a node does beside serving, as long as it runs: it compares blocks from before a restart with their
checksums, leaves signs of life in the journal, and keeps it short."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from mooncaked.clock import Clock
from mooncaked.pools.journal import Journal
from mooncaked.verifier import Verifier

BEAT_S = 0.5


class Upkeep:
    """Run `run` in a task; cancelling it ends the work in threads too."""

    def __init__(self, verifier: Verifier, journal: Journal | None, clock: Clock) -> None:
        self._verifier = verifier
        self._journal = journal
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        stop = threading.Event()
        with ThreadPoolExecutor(1, "verify") as thread:
            verifying = thread.submit(self._verifier.run, stop)
            try:
                while True:
                    await self._clock.sleep(BEAT_S)
                    if verifying.done():
                        verifying.result()  # a bug there ends the daemon rather than hide
                    await self._look_after(self._journal)
            finally:
                stop.set()

    async def _look_after(self, journal: Journal | None) -> None:
        if journal is None:
            return
        journal.beat(self._clock.monotonic())
        if journal.due:
            await asyncio.to_thread(journal.compact)
