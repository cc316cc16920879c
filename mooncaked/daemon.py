"""The life of one node: built (`mooncaked.assembly`), run under one task group, drained, closed in reverse.

The pool's memory is taken in threads after the start, so that the node is registered, answers probes and
serves while that goes on. The phase says so to others. The conductor is a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from mooncaked import log as logs
from mooncaked import observe
from mooncaked.assembly import Assembly, build, for_child
from mooncaked.clock import Deadline
from mooncaked.config import Config, quotas, ttls_s
from mooncaked.lifecycle import Launch, LiveConfig, Signals
from mooncaked.types import NodePhase
from mooncaked.units import format_size
from mooncaked.upkeep import Upkeep
from mooncaked.verifier import Verifier

log = logging.getLogger(__name__)

_EVICT_EVERY_S = 0.1
_STATUS_EVERY_S = 1.0
_IDLE_POLL_S = 0.05
_MORE_TIME_S = 60.0  # asked of systemd with each step of taking memory


async def run_node(launch: Launch) -> None:
    """The node's life, until SIGTERM has ended it. Raises `MooncakeError` for what it cannot start with."""
    signals = Signals()
    signals.install()
    async with AsyncExitStack() as stack:
        node = Node(launch, await build(launch, stack))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in node.background()]
            conducting = tasks.create_task(node.conduct(), name="conductor")
            opening = tasks.create_task(node.parts.opening.run())
            if await node.take_memory(signals.stop):
                await opening
                await node.settle()
                running.append(tasks.create_task(node.resizer.run()))
                node.enter(NodePhase.READY)
                node.notifier.ready(observe.status_line(node.parts))
            while await signals.next():
                node.notifier.reloading()
                node.notifier.ready(node.config.reload())
            node.notifier.stopping("draining")
            node.enter(NodePhase.DRAINING)
            await opening
            await node.drain(conducting, signals.hurry)
            for task in running:
                task.cancel()
    log.info("ended node=%s", node.parts.identity.node_id)


class Node:
    """The parts of a running node that its life deals with."""

    def __init__(self, launch: Launch, assembly: Assembly) -> None:
        self.notifier = assembly.notifier
        self.parts = assembly.parts
        self.config = LiveConfig(launch, self._apply)
        self._environment = launch.environment
        self._clock = self.parts.clock
        self.resizer = assembly.resizer
        self._memory = assembly.memory
        self._pages = assembly.pages

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the node does."""
        store, clock = self.parts.store, self._clock
        upkeep = Upkeep(Verifier(store, clock), self._memory.journal, clock)
        return [
            self.parts.heart.run(),
            self.parts.view.run(),
            self._evict(),
            self._report(),
            upkeep.run(),
        ]

    async def conduct(self) -> None:
        """Keep the conductor process, where there is to be one."""
        if self.parts.child is not None:
            await self.parts.child.run()

    def enter(self, phase: NodePhase) -> None:
        """Say to the cluster what the node does now."""
        log.info("phase node=%s phase=%s", self.parts.identity.node_id, phase)
        self.parts.state.phase = phase
        self.parts.registration.update()

    async def take_memory(self, stop: asyncio.Event) -> bool:
        """Put the pool's pages in place, and open the GPUs, in threads; False when `stop` came first.

        Raises `NotEnoughMemory` when there turns out to be too little, and what `Gpus.open` raises."""
        halt = threading.Event()
        stopping = asyncio.create_task(stop.wait())
        taking = asyncio.create_task(asyncio.to_thread(self._take, halt))
        try:
            await asyncio.wait({stopping, taking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            halt.set()  # also when this task is cancelled: no thread may outlive the pool
            taken = await asyncio.shield(taking)
        return taken

    async def settle(self) -> None:
        """Wait until nobody of the life before can still write into the pool."""
        await self._clock.sleep(max(0.0, self._memory.quiet_until_s - self._clock.monotonic()))

    def _take(self, halt: threading.Event) -> bool:
        """The work of `take_memory`, in a thread."""
        return self._memory.prefault(self._took, halt) and self.parts.gpus.open(self._go_on, halt)

    def _go_on(self, done: int, size: int) -> None:
        """Progress with the memory of GPUs, on that thread."""
        self.notifier.extend_start(_MORE_TIME_S)

    def _took(self, done: int, size: int) -> None:
        """Progress of `take_memory`, on its thread."""
        state = self.parts.state
        if 10 * done // size > 10 * state.prefaulted_bytes // size:
            log.info("pool memory taken percent=%d size=%s", 100 * done // size, format_size(size))
        state.prefaulted_bytes = done
        self.notifier.extend_start(_MORE_TIME_S)

    async def drain(self, conducting: asyncio.Task[None], hurry: asyncio.Event) -> None:
        """End the conductor, and wait until nobody reads or writes here, both for node.drain_timeout at most,
        or until `hurry`."""
        conducting.cancel()
        await self._idle(hurry)
        left_s = 0.0 if hurry.is_set() else self.config.current.node.drain_timeout
        await asyncio.to_thread(self.parts.tiers.drain, Deadline(self._clock, left_s))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait({conducting, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if self.parts.child is not None:
            self.parts.child.hurry()
        await asyncio.wait([conducting])
        hurrying.cancel()

    async def _idle(self, hurry: asyncio.Event) -> None:
        deadline = Deadline(self._clock, self.config.current.node.drain_timeout)
        store, pages, gpus = self.parts.store, self._pages, self.parts.gpus
        while (pinned := (stats := store.stats()).pinned + pages.viewing() + gpus.pinned) or stats.filling:
            if hurry.is_set() or deadline.passed():
                log.warning("drain cut short pinned=%d filling=%d", pinned, stats.filling)
                return
            await self._clock.sleep(_IDLE_POLL_S)

    def _apply(self, config: Config) -> None:
        """Apply what applies live; called by a reload that has changed something."""
        logs.set_up(config.log.level, config.log.format, self._environment)
        self.parts.store.set_watermarks(config.dram.high_watermark, config.dram.low_watermark)
        self.parts.store.set_namespaces(quotas(config), ttls_s(config))
        self.parts.tiers.set_rate(config.ssd.write_bandwidth)
        self.parts.state.labels = config.node.labels
        if self.parts.child is not None:
            self.parts.child.reload(for_child(config, self.parts.identity.node_id))
        self.parts.registration.update()

    async def _evict(self) -> None:
        """Keep the pool below its high watermark, ahead of need."""
        while True:
            await self._clock.sleep(_EVICT_EVERY_S)
            await asyncio.to_thread(self.parts.store.look_after)
            if self.parts.gpus.tier is not None:
                await asyncio.to_thread(self.parts.gpus.promote)
            await asyncio.to_thread(self.parts.tiers.evict)

    async def _report(self) -> None:
        """Keep systemd's status line current."""
        told = ""
        while True:
            if (line := observe.status_line(self.parts)) != told:
                self.notifier.status(line)
                told = line
            await self._clock.sleep(_STATUS_EVERY_S)
