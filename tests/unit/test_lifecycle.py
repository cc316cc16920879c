"""The beat that feeds the watchdog, the signals, and what a reload does to the configuration in force."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from mooncaked import lifecycle
from mooncaked.clock import SystemClock
from mooncaked.config import Config, DramConfig, LogConfig
from mooncaked.errors import ConfigError, Unhealthy
from mooncaked.lifecycle import Heart, Launch, LiveConfig, Signals
from mooncaked.notify import Notifier


class CountingNotifier(Notifier):
    """Counts the signs of life in place of sending them, at a watchdog of 40 ms."""

    def __init__(self) -> None:
        super().__init__({"WATCHDOG_USEC": "40000"})
        self.beats = 0

    def alive(self) -> None:
        self.beats += 1


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.005)


class Beating:
    """A heart that beats inside the `async with`."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.notifier = CountingNotifier()
        self.heart = Heart({"check": check}, self.notifier, SystemClock())

    async def __aenter__(self) -> Beating:
        self._task = asyncio.create_task(self.heart.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.notifier.close()


async def test_each_good_beat_feeds_the_watchdog() -> None:
    async with Beating(lambda: None) as beating:
        await until(lambda: beating.notifier.beats >= 3)
        assert beating.heart.alive()


async def test_a_failed_check_starves_the_watchdog_until_it_recovers() -> None:
    well = threading.Event()

    def check() -> None:
        if not well.is_set():
            raise Unhealthy(what="store", cause="broken")

    async with Beating(check) as beating:
        await until(lambda: bool(beating.heart.trouble))
        assert beating.heart.trouble == "store is not healthy: broken"
        assert beating.notifier.beats == 0
        well.set()
        await until(lambda: beating.notifier.beats > 0)
        assert beating.heart.trouble == ""


async def test_a_stuck_check_is_noticed_and_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "CHECK_LIMIT_S", 0.02)
    monkeypatch.setattr(lifecycle, "PERIOD_S", 0.01)
    stuck, calls = threading.Event(), []

    def check() -> None:
        calls.append(1)
        stuck.wait(10)

    async with Beating(check) as beating:
        await until(lambda: not beating.heart.alive())
        assert (len(calls), beating.notifier.beats) == (1, 0)
        assert "did not end" in beating.heart.trouble
        stuck.set()
        await until(lambda: beating.notifier.beats > 0)


async def test_a_loop_that_is_held_up_shows_as_lag() -> None:
    async with Beating(lambda: None) as beating:
        await until(lambda: beating.notifier.beats > 0)
        async with asyncio.timeout(30):
            while beating.heart.lag_max_s < 0.05:  # it shows where it falls between two beats
                threading.Event().wait(0.1)  # on purpose on the loop
                await asyncio.sleep(0.01)


async def test_signals_set_flags_and_nothing_else() -> None:
    signals = Signals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert await asyncio.wait_for(signals.next(), 5) is True
        assert not signals.reload.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(signals.next(), 5) is False
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(signals.hurry.wait(), 5)
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


def live(old: Config, reread: Callable[[], Config]) -> tuple[LiveConfig, list[Config]]:
    applied: list[Config] = []
    return LiveConfig(Launch(config=old, origin="f", reread=reread, environment={}), applied.append), applied


def test_a_reload_applies_live_keys_and_names_the_others() -> None:
    new = Config(log=LogConfig(level="debug"), dram=DramConfig(size=1 << 30, high_watermark=0.99))
    config, applied = live(Config(), lambda: new)
    outcome = "reloaded: applied dram.high_watermark,log.level, needs restart dram.size"
    assert config.reload() == outcome
    assert applied == [config.current]
    assert (config.current.log.level, config.current.dram.size) == ("debug", 4 << 30)
    assert config.reload() == "reloaded: applied nothing, needs restart dram.size"
    assert len(applied) == 1


def test_a_bad_file_leaves_the_configuration_in_force() -> None:
    def broken() -> Config:
        raise ConfigError(file="f", key="k", problem="wrong", remedy="mend it")

    old = Config()
    config, applied = live(old, broken)
    assert "refused" in config.reload()
    assert config.current is old
    assert applied == []
