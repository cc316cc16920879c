"""One node: every part built by hand in start order, run under one task group, closed in reverse.

    state directory, pool, store            what the node is
    etcd session, view, registration        how others know of it
    fetcher, peers, engines, http           whom it serves; a port that is taken ends the start here
    conductor                               a process of its own

The pool's memory is taken in threads after that, so that the node is registered, answers probes and serves
while that goes on. The phase says so to others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from mooncaked import log as logs
from mooncaked import observe
from mooncaked.api.counters import ApiCounters
from mooncaked.api.fetch import Fetcher
from mooncaked.api.http import NodeHttp
from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import RegionInfo
from mooncaked.api.session import SharedRegion
from mooncaked.api.unix import ClientServer
from mooncaked.child import ConductorChild
from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.cluster.connect import connect
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.cluster.keys import node_key
from mooncaked.cluster.registry import Registration
from mooncaked.cluster.view import ClusterView
from mooncaked.config import Config
from mooncaked.errors import Unhealthy
from mooncaked.host import StateDir, advertised_host, read_secret
from mooncaked.lifecycle import Heart, Launch, LiveConfig, Signals
from mooncaked.locate import Locator
from mooncaked.metrics import Readings
from mooncaked.notify import Notifier
from mooncaked.pools.dram import DramPool
from mooncaked.store import Store
from mooncaked.transports.tcp import TcpTransport
from mooncaked.types import NodePhase
from mooncaked.units import format_size, join_address, split_address

log = logging.getLogger(__name__)

REGION = 0  # the DRAM pool's number
_EVICT_EVERY_S = 0.1
_STATUS_EVERY_S = 1.0
_IDLE_POLL_S = 0.05
_MORE_TIME_S = 60.0  # asked of systemd with each step of taking memory


async def run_node(launch: Launch) -> None:
    """The node's life, until SIGTERM has ended it. Raises `MooncakeError` for what it cannot start with."""
    signals = Signals()
    signals.install()
    async with AsyncExitStack() as stack:
        node = await build(launch, stack)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(part) for part in node.background()]
            conducting = tasks.create_task(node.conduct(), name="conductor")
            if await node.take_memory(signals.stop):
                node.enter(NodePhase.READY)
                node.notifier.ready(observe.status_line(node.parts))
            while await signals.next():
                node.notifier.reloading()
                node.notifier.ready(node.config.reload())
            node.notifier.stopping("draining")
            node.enter(NodePhase.DRAINING)
            await node.drain(conducting, signals.hurry)
            for task in running:
                task.cancel()
    log.info("ended node=%s", node.parts.identity.node_id)


class Node:
    """The parts of a running node that its life deals with."""

    def __init__(self, launch: Launch, notifier: Notifier, pool: DramPool, parts: observe.Parts) -> None:
        self.notifier = notifier
        self.parts = parts
        self.config = LiveConfig(launch, self._apply)
        self._environment = launch.environment
        self._clock = parts.clock
        self._pool = pool

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the node does."""
        return [self.parts.heart.run(), self.parts.view.run(), self._evict(), self._report()]

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
        """Put the pool's pages in place, in threads; False when `stop` came first.

        Raises `NotEnoughMemory` when there turns out to be too little."""
        halt = threading.Event()
        stopping = asyncio.create_task(stop.wait())
        taking = asyncio.create_task(asyncio.to_thread(self._pool.prefault, self._took, halt))
        try:
            await asyncio.wait({stopping, taking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            halt.set()  # also when this task is cancelled: no thread may outlive the pool
            taken = await asyncio.shield(taking)
        return taken

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
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait({conducting, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        if self.parts.child is not None:
            self.parts.child.hurry()
        await asyncio.wait([conducting])
        hurrying.cancel()

    async def _idle(self, hurry: asyncio.Event) -> None:
        deadline = Deadline(self._clock, self.config.current.node.drain_timeout)
        while (stats := self.parts.store.stats()).pinned or stats.filling:
            if hurry.is_set() or deadline.passed():
                log.warning("drain cut short pinned=%d filling=%d", stats.pinned, stats.filling)
                return
            await self._clock.sleep(_IDLE_POLL_S)

    def _apply(self, config: Config) -> None:
        """Apply what applies live; called by a reload that has changed something."""
        logs.set_up(config.log.level, config.log.format, self._environment)
        self.parts.store.set_watermarks(config.dram.high_watermark, config.dram.low_watermark)
        self.parts.state.labels = config.node.labels
        if self.parts.child is not None:
            self.parts.child.reload(_for_child(config, self.parts.identity.node_id))
        self.parts.registration.update()

    async def _evict(self) -> None:
        """Keep the pool below its high watermark, ahead of need."""
        while True:
            await self._clock.sleep(_EVICT_EVERY_S)
            await asyncio.to_thread(self.parts.store.evict_to_low)

    async def _report(self) -> None:
        """Keep systemd's status line current."""
        told = ""
        while True:
            if (line := observe.status_line(self.parts)) != told:
                self.notifier.status(line)
                told = line
            await self._clock.sleep(_STATUS_EVERY_S)


async def build(launch: Launch, stack: AsyncExitStack) -> Node:
    """Every part, in start order; `stack` closes them in reverse. Raises `MooncakeError` for what cannot be:
    a port or socket that is taken, a directory or file that cannot be used, memory that is not there."""
    config, clock = launch.config, SystemClock()
    notifier = Notifier(launch.environment)
    stack.callback(notifier.close)
    directory = StateDir(config.node.state_dir)
    stack.callback(directory.close)
    node_id = config.node.id or directory.node_id()
    pool = DramPool(config.dram.size, REGION, prefault_threads=config.dram.prefault_threads)
    stack.callback(pool.close)
    store = _store(config, pool, clock)
    stack.callback(store.close)
    session = connect(config.etcd, clock)
    await session.start()
    stack.push_async_callback(session.close)
    parts = _parts(launch, node_id, store, session, notifier, clock)
    await _listen(launch, parts, pool, stack)
    parts.registration.start()
    stack.push_async_callback(parts.registration.close)
    return Node(launch, notifier, pool, parts)


def _store(config: Config, pool: DramPool, clock: Clock) -> Store:
    marks = config.dram
    return Store(
        pool,
        high_watermark=marks.high_watermark,
        low_watermark=marks.low_watermark,
        epoch=secrets.randbits(63),
        clock=clock,
    )


def _parts(
    launch: Launch, node_id: str, store: Store, session: EtcdSession, notifier: Notifier, clock: Clock
) -> observe.Parts:
    """What the node knows of the cluster and of itself; nothing of it runs yet."""
    config = launch.config
    identity = observe.Identity(
        node_id=node_id,
        epoch=store.epoch,
        started_at_s=clock.wall(),
        client_socket=str(config.listen.client_socket),
        capacity_bytes=store.stats().capacity_bytes,
    )
    state = observe.NodeState(config.node.labels)

    def check_leases() -> None:
        if not session.keepers_alive:
            raise Unhealthy(what="a lease", cause="the thread that keeps it alive has ended")

    checks = {"store": lambda: observe.check_store(store), "leases": check_leases}
    key = node_key(config.etcd.prefix, node_id)
    return observe.Parts(
        clock=clock,
        identity=identity,
        state=state,
        store=store,
        registration=Registration(
            session, config.etcd.lease_ttl, key, lambda: observe.node_record(identity, state), clock=clock
        ),
        view=ClusterView(session, config.etcd.prefix, clock=clock),
        heart=Heart(checks, notifier, clock),
        child=_child(launch, node_id, clock),
    )


def _child(launch: Launch, node_id: str, clock: Clock) -> ConductorChild | None:
    """The conductor, which stands under this node's name and is reached by the same host."""
    if not launch.config.conductor.enabled:
        return None
    return ConductorChild(_for_child(launch.config, node_id), clock, launch.environment)


def _for_child(config: Config, node_id: str) -> Config:
    host = advertised_host(config, config.conductor.listen)
    node = msgspec.structs.replace(config.node, id=node_id, advertise_host=host)
    return msgspec.structs.replace(config, node=node)


async def _listen(launch: Launch, parts: observe.Parts, pool: DramPool, stack: AsyncExitStack) -> None:
    """Bind every port, and begin to serve; tells `parts.state` the addresses."""
    config, node_id, clock = launch.config, parts.identity.node_id, parts.clock
    token = read_secret(config.listen.token_file, launch.origin, "listen.token_file")
    registry = CollectorRegistry()
    registry.register(Readings(observe.readings(parts)))
    counters = ApiCounters(registry)
    fetcher = _fetcher(parts, token, counters, stack)
    peers = PeerServer(
        parts.store,
        node_id=node_id,
        address=config.listen.peer,
        token=token,
        fetch=fetcher.fetch_from_thread,
        counters=counters,
        clock=clock,
    )
    peers_at = peers.start()
    stack.push_async_callback(asyncio.to_thread, peers.close)
    engines = ClientServer(
        parts.store,
        fetcher,
        [SharedRegion(RegionInfo(region=REGION, size=pool.size), pool.fd)],
        node_id=node_id,
        path=config.listen.client_socket,
        token=token,
        counters=counters,
        clock=clock,
    )
    await engines.start()
    stack.push_async_callback(engines.close)
    http = NodeHttp(
        config.listen.http,
        registry,
        ready=lambda: observe.not_ready(parts),
        live=parts.heart.alive,
        status=lambda: observe.status(parts),
    )
    http_at = await http.start()
    stack.push_async_callback(http.close)
    parts.state.peer_address = _reachable(config, config.listen.peer, peers_at)
    parts.state.http_address = _reachable(config, config.listen.http, http_at)
    socket_path = config.listen.client_socket
    log.info("serving node=%s peers=%s http=%s engines=%s", node_id, peers_at, http_at, socket_path)


def _fetcher(
    parts: observe.Parts, token: str | None, counters: ApiCounters, stack: AsyncExitStack
) -> Fetcher:
    """What brings blocks here from the nodes that the cluster knows."""
    view, node_id = parts.view, parts.identity.node_id
    locator = Locator(lambda: view.leader.record.gateway_url if view.leader else None)
    stack.push_async_callback(locator.close)
    transport = TcpTransport(node_id, token, clock=parts.clock)
    fetcher = Fetcher(
        parts.store,
        transport,
        lambda other: node.peer_address if (node := view.nodes.get(other)) else None,
        locator.locate,
        node_id=node_id,
        counters=counters,
        clock=parts.clock,
    )
    stack.push_async_callback(fetcher.close)
    stack.callback(transport.close)
    return fetcher


def _reachable(config: Config, wanted: str, bound: str) -> str:
    """How others reach the listener that was asked for as `wanted` and is bound to `bound`."""
    return join_address(advertised_host(config, wanted), split_address(bound)[1])
