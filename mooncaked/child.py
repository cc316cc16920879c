"""The conductor candidate beside a node: a process of its own, started again when it ends, that dies with us.

It gets the configuration in force, not the file: as a memfd that is written anew before each reload. So it
never starts from a file that this process has refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping

import msgspec

from mooncaked.clock import Clock
from mooncaked.config import ENVIRONMENT_PREFIX, Config
from mooncaked.config_text import effective

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_S = 60.0  # a child that ran this long failed for a new reason: the back-off begins anew
STOP_MARGIN_S = 5.0  # what a child may take beyond node.drain_timeout before it is killed
_NOT_FOR_CHILDREN = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "FDSTORE",
)


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be known of the child, for /v1/status."""

    pid: int | None  # None: it does not run at the moment
    starts: int
    last_exit: int | None  # a negative number is a signal's
    next_start_in_s: float | None  # while it waits to be started again


class ConductorChild:
    """Keeps the child running. `run` it in a task; cancelling that stops the child too, gently first."""

    def __init__(self, config: Config, clock: Clock, environment: Mapping[str, str]) -> None:
        self._clock = clock
        self._environment = {
            name: value
            for name, value in environment.items()
            if name not in _NOT_FOR_CHILDREN and not name.startswith(ENVIRONMENT_PREFIX)
        }
        self._process: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._last_exit: int | None = None
        self._next_start_at_s: float | None = None
        self._memfd = os.memfd_create("mooncaked-conductor.toml")
        self._write(config)

    def state(self) -> ChildState:
        """The child now."""
        due = self._next_start_at_s
        return ChildState(
            pid=self._process.pid if self._process else None,
            starts=self._starts,
            last_exit=self._last_exit,
            next_start_in_s=None if due is None else max(0.0, due - self._clock.monotonic()),
        )

    def reload(self, config: Config) -> None:
        """Hand `config` to the child; it applies what applies live."""
        self._write(config)
        self._signal(signal.SIGHUP)

    def hurry(self) -> None:
        """Tell a child that is being stopped not to wait for its requests."""
        self._signal(signal.SIGTERM)

    async def run(self) -> None:
        """Start the child, and start it again whenever it ends, until cancelled."""
        pause_s = BACKOFF_FIRST_S
        try:
            while True:
                started_at_s = self._clock.monotonic()
                self._last_exit = await self._run_once()
                if self._clock.monotonic() - started_at_s > STEADY_S:
                    pause_s = BACKOFF_FIRST_S
                log.warning("conductor process ended code=%d next_start_in_s=%.1f", self._last_exit, pause_s)
                self._next_start_at_s = self._clock.monotonic() + pause_s
                await self._clock.sleep(pause_s)
                self._next_start_at_s = None
                pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        finally:
            os.close(self._memfd)

    async def _run_once(self) -> int:
        command = [sys.executable, "-m", "mooncaked", "--role", "conductor"]
        command += ["--config", f"/proc/self/fd/{self._memfd}", "--parent", str(os.getpid())]
        self._starts += 1
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, env=self._environment, pass_fds=(self._memfd,)
            )
        except OSError as error:
            log.error("conductor process cannot be started cause=%s", error)
            return 1
        log.info("conductor process started pid=%d", self._process.pid)
        try:
            return await self._process.wait()
        finally:
            await self._stop(self._process)
            self._process = None

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """End the child, however: SIGTERM, and SIGKILL when that took too long. Returns when it is gone."""
        if process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._grace_s)
        except TimeoutError:
            log.warning("conductor process does not end, killing it pid=%d", process.pid)
            self._signal(signal.SIGKILL)
            await process.wait()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _write(self, config: Config) -> None:
        text = effective(config).encode()
        os.ftruncate(self._memfd, 0)
        os.pwrite(self._memfd, text, 0)
        self._grace_s = config.node.drain_timeout + STOP_MARGIN_S
