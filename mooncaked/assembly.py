"""Builds a node by hand, every part in start order; what is built is closed in reverse.

    state directory, pool, store            what the node is
    etcd session, view, registration        how others know of it
    fetcher, peers, engines, http           whom it serves; a port that is taken ends the start here

Of the pool there is only the room yet: its pages, and the memory of GPUs, are taken when the node lives.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack

import msgspec
from prometheus_client import CollectorRegistry

from mooncaked import observe
from mooncaked.api.counters import ApiCounters
from mooncaked.api.fetch import Fetcher
from mooncaked.api.http import NodeHttp, PoolAdmin
from mooncaked.api.pages import ClientPages
from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import RegionInfo
from mooncaked.api.sharing import SharedRegion
from mooncaked.api.shm import entry_count
from mooncaked.api.unix import ClientServer
from mooncaked.checksums import Checksummer
from mooncaked.child import ConductorChild
from mooncaked.clock import Clock, SystemClock
from mooncaked.cluster.connect import connect
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.cluster.keys import node_key
from mooncaked.cluster.registry import Registration
from mooncaked.cluster.view import ClusterView
from mooncaked.config import Config, quotas, ttls_s
from mooncaked.errors import Unhealthy
from mooncaked.host import StateDir, advertised_host, read_secret
from mooncaked.lifecycle import Heart, Launch
from mooncaked.locate import Locator
from mooncaked.metrics import Readings
from mooncaked.notify import Notifier
from mooncaked.pools.keep import open_keeper
from mooncaked.pools.shared_index import SharedIndex
from mooncaked.resize import Resizer
from mooncaked.store import Store
from mooncaked.tiers import Opening
from mooncaked.tiers.gpus import Gpus
from mooncaked.transports.tcp import TcpTransport
from mooncaked.units import join_address, split_address
from mooncaked.verifier import Verifier
from mooncaked.warm import Memory, Origin, memory_readings

log = logging.getLogger(__name__)

_TAKE_OVER_S = 600.0  # asked of systemd for what was kept: millions of blocks take minutes


class Assembly(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a node that its life deals with."""

    notifier: Notifier
    memory: Memory
    pages: ClientPages
    resizer: Resizer
    parts: observe.Parts


async def build(launch: Launch, stack: AsyncExitStack) -> Assembly:
    """Every part, in start order; `stack` closes them in reverse. Raises `MooncakeError` for what cannot be:
    a port or socket that is taken, a directory or file that cannot be used, memory that is not there."""
    config, clock = launch.config, SystemClock()
    notifier = Notifier(launch.environment)
    stack.callback(notifier.close)
    directory = StateDir(config.node.state_dir)
    stack.callback(directory.close)
    node_id = config.node.id or directory.node_id()
    memory = _memory(launch, node_id, notifier, clock)
    stack.callback(memory.close)
    pages = _pages(config, memory, stack)
    store = _store(config, memory, pages, clock)
    stack.callback(Checksummer(store).close)
    stack.callback(store.close)
    gpus = Gpus(config.gpu, store, memory)
    stack.callback(gpus.close)
    opening = Opening(config, node_id, store, clock, Verifier(store, clock).verify_keys)
    stack.callback(opening.close)
    await asyncio.to_thread(memory.restore, store)
    store.keep_quiet(memory.quiet_until_s)
    session = connect(config.etcd, clock)
    await session.start()
    stack.push_async_callback(session.close)
    parts = _parts(launch, node_id, store, session, notifier, clock, memory, opening, gpus)

    def resized() -> None:
        parts.state.capacity_bytes = store.stats().capacity_bytes
        parts.registration.update()

    resizer = Resizer(memory, store, config.dram, clock, resized)
    await _listen(launch, parts, memory, pages, resizer, stack)
    parts.registration.start()
    stack.push_async_callback(parts.registration.close)
    return Assembly(notifier=notifier, memory=memory, pages=pages, resizer=resizer, parts=parts)


def _memory(launch: Launch, node_id: str, notifier: Notifier, clock: Clock) -> Memory:
    """The pool's memory, with what was kept of it."""
    origin = Origin(
        settings=launch.config.dram,
        source=launch.origin,
        node_id=node_id,
        epoch=secrets.randbits(63),
        cold=launch.cold,
    )
    notifier.extend_start(_TAKE_OVER_S)
    keeper = open_keeper(launch.config.dram, node_id, notifier, launch.environment)
    return Memory(origin, keeper, clock)


def _pages(config: Config, memory: Memory, stack: AsyncExitStack) -> ClientPages:
    """The index that clients read, and what they write beside it."""
    index = SharedIndex(entry_count(config.dram.size, config.dram.index_entries), memory.epoch)
    stack.callback(index.close)
    index.set_elsewhere(bool(config.ssd.devices))
    pages = ClientPages(index)
    stack.callback(pages.close)
    return pages


def _store(config: Config, memory: Memory, pages: ClientPages, clock: Clock) -> Store:
    marks = config.dram
    first, *others = memory.regions.live()
    store = Store(
        first,
        high_watermark=marks.high_watermark,
        low_watermark=marks.low_watermark,
        epoch=memory.epoch,
        clock=clock,
        policy=marks.eviction,
        followers=[*memory.followers, pages.index],
        readers=pages,
    )
    for pool in others:
        store.add_region(pool)
    store.set_namespaces(quotas(config), ttls_s(config))
    return store


def _parts(
    launch: Launch,
    node_id: str,
    store: Store,
    session: EtcdSession,
    notifier: Notifier,
    clock: Clock,
    memory: Memory,
    opening: Opening,
    gpus: Gpus,
) -> observe.Parts:
    """What the node knows of the cluster and of itself; nothing of it runs yet."""
    config = launch.config
    identity = observe.Identity(
        node_id=node_id,
        epoch=store.epoch,
        started_at_s=clock.wall(),
        client_socket=str(config.listen.client_socket),
        capacity_bytes=store.stats().capacity_bytes,
        ssd_bytes=sum(device.capacity_bytes for device in opening.tiers.devices()),
        gpu_bytes=gpus.capacity_bytes,
    )
    state = observe.NodeState(config.node.labels)

    def check_leases() -> None:
        if not session.keepers_alive:
            raise Unhealthy(what="a lease", cause="the thread that keeps it alive has ended")

    checks = {
        "store": lambda: observe.check_store(store),
        "memory": memory.check,
        "leases": check_leases,
        "gpus": gpus.check,
    }
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
        tiers=opening.tiers,
        opening=opening,
        gpus=gpus,
    )


def _child(launch: Launch, node_id: str, clock: Clock) -> ConductorChild | None:
    """The conductor, which stands under this node's name and is reached by the same host."""
    if not launch.config.conductor.enabled:
        return None
    return ConductorChild(for_child(launch.config, node_id), clock, launch.environment)


def for_child(config: Config, node_id: str) -> Config:
    """The configuration that the conductor of a node gets."""
    host = advertised_host(config, config.conductor.listen)
    node = msgspec.structs.replace(config.node, id=node_id, advertise_host=host)
    return msgspec.structs.replace(config, node=node)


async def _listen(
    launch: Launch,
    parts: observe.Parts,
    memory: Memory,
    pages: ClientPages,
    resizer: Resizer,
    stack: AsyncExitStack,
) -> None:
    """Bind every port, and begin to serve; tells `parts.state` the addresses."""
    config, node_id, clock = launch.config, parts.identity.node_id, parts.clock
    token = read_secret(config.listen.token_file, launch.origin, "listen.token_file")
    registry = CollectorRegistry()
    registry.register(Readings([*observe.readings(parts), *memory_readings(memory)]))
    counters = ApiCounters(registry)
    fetcher = _fetcher(parts, token, counters, stack)
    peers = PeerServer(
        parts.store,
        node_id=node_id,
        address=config.listen.peer,
        token=token,
        fetch=fetcher.fetch_from_thread,
        bring_up=parts.tiers.bring_up,
        expect=parts.tiers.expect,
        counters=counters,
        clock=clock,
    )
    peers_at = peers.start()
    stack.push_async_callback(asyncio.to_thread, peers.close)
    engines = ClientServer(
        parts.store,
        fetcher,
        lambda: [
            SharedRegion(RegionInfo(region=pool.region, size=pool.size), pool.fd)
            for pool in memory.regions.live()
        ],
        node_id=node_id,
        path=config.listen.client_socket,
        token=token,
        pages=pages,
        gpus=parts.gpus,
        writable=config.dram.clients == "read-write",
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
        pool=PoolAdmin(show=resizer.status, resize=resizer.request, token=token),
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
        ask=parts.tiers.ask,
    )
    stack.push_async_callback(fetcher.close)
    stack.callback(transport.close)
    return fetcher


def _reachable(config: Config, wanted: str, bound: str) -> str:
    """How others reach the listener that was asked for as `wanted` and is bound to `bound`."""
    return join_address(advertised_host(config, wanted), split_address(bound)[1])
