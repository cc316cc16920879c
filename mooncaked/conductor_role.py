"""`mooncaked --role conductor`: a candidate without a pool, beside a node or on a host of its own."""

from __future__ import annotations

import asyncio

from mooncaked import log as logs
from mooncaked.clock import SystemClock
from mooncaked.config import Config
from mooncaked.gateway.process import Live, run_conductor
from mooncaked.lifecycle import Heart, Launch, LiveConfig, Signals
from mooncaked.notify import Notifier


async def run_conductor_role(launch: Launch) -> None:
    """Conduct until SIGTERM, then let requests end; a second SIGTERM ends them.

    Raises `MooncakeError` for what it cannot start with."""
    signals, notifier, live = Signals(), Notifier(launch.environment), Live()
    signals.install()

    def apply(config: Config) -> None:
        logs.set_up(config.log.level, config.log.format, launch.environment)
        live.apply(config)

    def ready(url: str) -> None:
        notifier.ready(f"gateway at {url}")

    config = LiveConfig(launch, apply)
    heart = Heart({}, notifier, SystemClock())
    async with asyncio.TaskGroup() as tasks:
        beating = tasks.create_task(heart.run())
        conducting = tasks.create_task(run_conductor(launch.config, signals.stop, live=live, ready=ready))
        while await signals.next():
            notifier.reloading()
            notifier.ready(config.reload())
        notifier.stopping("letting requests end")
        hurrying = asyncio.create_task(signals.hurry.wait())
        await asyncio.wait({conducting, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        for task in (hurrying, conducting, beating):
            task.cancel()
