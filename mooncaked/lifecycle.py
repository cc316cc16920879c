"""What both roles of the daemon share: signals that only set flags, and the beat that proves life."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from mooncaked.clock import Clock
from mooncaked.config import Config, check
from mooncaked.errors import ConfigError, Unhealthy
from mooncaked.notify import Notifier
from mooncaked.settings import changes, merge_live

log = logging.getLogger(__name__)

PERIOD_S = 1.0  # between beats; shorter where the watchdog asks for it
CHECK_LIMIT_S = 5.0  # a check that takes longer has failed
MISSED_BEATS_MAX = 10  # beats that may fail in a row before liveness is denied
_PR_SET_PDEATHSIG = 1
_ORPHAN_POLL_S = 0.5


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line hands to a role."""

    config: Config
    origin: str  # the file, for messages
    reread: Callable[[], Config]  # the configuration as it is now on disk; raises `ConfigError`
    environment: dict[str, str]
    cold: bool = False  # forget the memory that was kept over the restart


class LiveConfig:
    """The configuration in force. `apply` is called with it when a reload has changed something."""

    def __init__(self, launch: Launch, apply: Callable[[Config], None]) -> None:
        self.current = launch.config
        self._launch = launch
        self._apply = apply

    def reload(self) -> str:
        """Read the file again and apply what applies live; a sentence that says what came of it.

        A file that is not good changes nothing. Keys that need a restart keep their values in force."""
        try:
            new = self._launch.reread()
            changed = changes(self.current, new)
            merged = merge_live(self.current, new)
            check(merged, self._launch.origin)
        except ConfigError as error:
            log.error("reload refused, the configuration in force stays cause=%s", error)
            return f"reload refused: {error}"
        live = [named.dotted for named in changed if named.key.live]
        later = [named.dotted for named in changed if not named.key.live]
        if live:
            self.current = merged
            self._apply(merged)
        applied, waiting = ",".join(live) or "nothing", ",".join(later) or "nothing"
        log.info("configuration reloaded applied=%s", applied)
        if later:
            log.warning("configuration keys wait for a restart keys=%s", waiting)
        return f"reloaded: applied {applied}, needs restart {waiting}"


class Signals:
    """SIGTERM and SIGINT set `stop`, a second one `hurry`; SIGHUP sets `reload`. Nothing else is done."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self.reload = asyncio.Event()

    def install(self) -> None:
        """Take the signals over, on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload.set)

    def _on_stop(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()

    async def next(self) -> bool:
        """Wait for one of the flags; True: reload (the flag is taken down), False: stop."""
        waits = [asyncio.create_task(event.wait()) for event in (self.stop, self.reload)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.stop.is_set():
            return False
        self.reload.clear()
        return True


class Heart:
    """Beats on the loop that serves. Each beat runs every check, in a thread so that a stuck one is noticed
    rather than suffered, and only then tells the watchdog that the daemon is alive.

    A check returns nothing when all is well, and raises `Unhealthy` when it is not."""

    def __init__(self, checks: Mapping[str, Callable[[], None]], notifier: Notifier, clock: Clock) -> None:
        self._checks = dict(checks)
        self._notifier = notifier
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "heart")
        self._running: Future[None] | None = None
        self.period_s = min(PERIOD_S, (notifier.watchdog_s or 4 * PERIOD_S) / 4)
        self.beaten_at_s = clock.monotonic()
        self.lag_s = 0.0  # how late the loop ran the last beat
        self.lag_max_s = 0.0  # the most that was so far
        self.trouble = ""  # why the last beat failed

    def alive(self) -> bool:
        """Whether a beat has succeeded lately. True from the start, until one fails for long."""
        return self._clock.monotonic() - self.beaten_at_s < MISSED_BEATS_MAX * PERIOD_S

    async def run(self) -> None:
        """Beat until cancelled."""
        try:
            while True:
                due = self._clock.monotonic() + self.period_s
                await self._clock.sleep(self.period_s)
                self.lag_s = max(0.0, self._clock.monotonic() - due)
                self.lag_max_s = max(self.lag_max_s, self.lag_s)
                await self._beat()
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _beat(self) -> None:
        if self._running is None or self._running.done():
            self._running = self._thread.submit(self._run_checks)
        trouble = ""
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._running)), CHECK_LIMIT_S)
        except TimeoutError:
            trouble = f"the checks did not end within {CHECK_LIMIT_S:.0f} s"
        except Unhealthy as error:
            trouble = str(error)
        if trouble:
            if trouble != self.trouble:
                log.error("beat failed, the watchdog is not fed cause=%s", trouble)
        else:
            self.beaten_at_s = self._clock.monotonic()
            self._notifier.alive()
        self.trouble = trouble

    def _run_checks(self) -> None:
        for run in self._checks.values():
            run()


def die_with_parent(parent: int, grace_s: float) -> None:
    """Get SIGTERM when the process `parent`, which started this one, ends in whatever way, and SIGKILL when
    this one is still there `grace_s` seconds later: no orphan stays. Exits at once where it ended before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    threading.Thread(target=_end_orphan, args=(parent, grace_s), name="orphan-guard", daemon=True).start()


def _end_orphan(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_POLL_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
