"""One instance: builds its parts in order, serves until told to stop, and stops them in reverse."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch
from aiohttp import web
from prometheus_client import CollectorRegistry

from mooncaked.client import Client
from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.cluster.connect import connect
from mooncaked.cluster.keys import instance_key
from mooncaked.cluster.registry import Registration
from mooncaked.config import Config, EtcdConfig, NodeConfig
from mooncaked.engines.reference.counters import EngineCounters, readings
from mooncaked.engines.reference.engine import Engine
from mooncaked.engines.reference.kv_cache import BlockAllocator, PagedKV, blocks_for
from mooncaked.engines.reference.kv_store import EXCHANGE_S, BlockClient, KvStore
from mooncaked.engines.reference.model import Llama
from mooncaked.engines.reference.model_files import LoadedModel, load_model, namespace_of
from mooncaked.engines.reference.options import Options
from mooncaked.engines.reference.requests import Front
from mooncaked.engines.reference.scheduler import Scheduler
from mooncaked.engines.reference.sequence import GenerationRequest, Output
from mooncaked.engines.reference.server import Server
from mooncaked.errors import (
    AddressInUse,
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    MooncakeError,
    Unreachable,
)
from mooncaked.host import advertised_host, read_secret
from mooncaked.keys import HASH_NAME
from mooncaked.types import InstanceRecord
from mooncaked.units import join_address, split_address

log = logging.getLogger(__name__)

_DAEMON_S = 15.0  # for the daemon to answer at the start, when it must say which node this is
_LOOK_EVERY_S = 0.5
_KEEPALIVE_S = 75.0
_LINGER_S = 5.0  # what a refused client still sends is read and dropped, so that it reads the refusal


@dataclass(frozen=True)
class Parts:
    """What `build` makes, without network: an engine that can be started."""

    engine: Engine
    front: Front
    registry: CollectorRegistry
    scheduler: Scheduler
    store: KvStore | None
    namespace: str
    kv_bytes_per_token: int
    kv_tokens: int  # that the cache has room for


def build(options: Options, model: LoadedModel, client: BlockClient | None, clock: Clock) -> Parts:
    """The engine and all that it consists of. Raises `ConfigError` when the cache is too small."""
    dtype = getattr(torch, options.dtype)
    config, unit = model.config, options.block_tokens
    blocks = blocks_for(options.kv_memory, config, unit, dtype)
    if blocks < 2:
        size = config.kv_values_per_token() * unit * dtype.itemsize
        problem = f"it holds {blocks} blocks of {size} bytes"
        raise ConfigError(file="command line", key="--kv-memory", problem=problem, remedy="Give more memory")
    context = min(config.context, blocks * unit)
    cache = PagedKV(config, block_tokens=unit, blocks=blocks, dtype=dtype, device=options.device)
    llama = Llama(config, model.weights, cache, chunk_tokens=options.chunk_tokens, context=context)
    allocator = BlockAllocator(blocks)
    scheduler = Scheduler(
        allocator, block_tokens=unit, chunk_tokens=options.chunk_tokens, running_max=options.batch_max
    )
    store = KvStore(client, cache, clock) if client is not None else None
    registry = CollectorRegistry()
    registry.register(readings(scheduler, allocator, store.counts if store else None))
    namespace = namespace_of(model, block_tokens=unit, chunk_tokens=options.chunk_tokens, dtype=options.dtype)
    engine = Engine(
        llama,
        scheduler,
        store,
        namespace=namespace,
        block_tokens=unit,
        context_tokens=context,
        eos=model.tokenizer.eos,
        name=options.model_name,
        counters=EngineCounters(registry),
        clock=clock,
        threads=options.threads,
    )
    front = Front(
        name=options.model_name,
        tokenizer=model.tokenizer,
        template=model.template,
        vocab=config.vocab,
        context_tokens=context,
        rng=random.Random(secrets.randbits(64)),
    )
    per_token = config.kv_values_per_token() * dtype.itemsize
    return Parts(engine, front, registry, scheduler, store, namespace, per_token, blocks * unit)


# --- the process ---------------------------------------------------------------------------------------


async def run_instance(options: Options, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Raises `ModelInvalid`, `AddressInUse`, `ConfigError`, or `Unreachable` when
    only the daemon could say which node this is and it does not answer."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        listener = _bind(options.listen)  # before the model is loaded: a wrong address is known at once
        stack.callback(listener.close)
        began_s = clock.monotonic()
        model = await asyncio.to_thread(
            load_model, options.model, dtype=getattr(torch, options.dtype), device=_device(options.device)
        )
        log.info("model loaded model=%s s=%.1f", options.model_name, clock.monotonic() - began_s)
        client = _client(options, model)
        node_id = None  # without a store, no node has this instance's KV
        if client is not None:
            node_id = options.node_id or await _ask_node_id(client, clock)
        parts = build(options, model, client, clock)
        if parts.store is not None:
            stack.push_async_callback(asyncio.to_thread, parts.store.close)
        parts.engine.start()
        stack.push_async_callback(asyncio.to_thread, parts.engine.close)
        await _warm_up(parts.engine)
        server = Server(
            parts.engine,
            parts.front,
            parts.registry,
            node_id=node_id,
            body_bytes_max=options.body_max,
            clock=clock,
        )
        await stack.enter_async_context(_listening(server, listener, options.listen))
        url = _url(options, listener)
        record = _record(options, parts, url, node_id, clock)
        async with _registered(options.etcd, record, clock):
            log.info(
                "ready url=%s role=%s namespace=%s context_tokens=%d kv_tokens=%d",
                url,
                options.role,
                parts.namespace,
                record.context_tokens,
                record.kv_capacity_tokens,
            )
            await _until(stop, parts.engine)
        # No longer in the cluster: what runs may end, nothing new is taken in.
        server.draining = True
        log.info("draining requests=%d", parts.engine.open_requests)
        if not await asyncio.to_thread(parts.engine.drain, options.drain_s):
            log.info("requests broken off count=%d", parts.engine.open_requests)


async def _until(stop: asyncio.Event, engine: Engine) -> None:
    """Wait for `stop`; raises `MooncakeError` when the step thread has died of a bug."""
    while not stop.is_set():
        if not engine.alive:
            raise MooncakeError(detail="the engine's step thread has ended; its error is in the log")
        try:
            await asyncio.wait_for(stop.wait(), _LOOK_EVERY_S)
        except TimeoutError:
            continue


async def _warm_up(engine: Engine) -> None:
    """One short request, so that the first real one does not pay for what is set up at first use."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def sink(output: Output) -> None:
        if output.finish is not None or output.error is not None:
            loop.call_soon_threadsafe(ended.set)

    # No source and a prompt of one token: nothing is asked of the store, and nothing is put there.
    request = GenerationRequest(request_id="warm-up", prompt=[0], max_tokens=2, ignore_eos=True, sources=[])
    engine.submit(request, sink)
    await ended.wait()


def _device(name: str) -> str:
    """The device, if there is one; raises `ConfigError`."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch's builds without CUDA raise the latter
        cause = str(error).splitlines()[0]
        raise ConfigError(
            file="command line",
            key="--device",
            problem=f"{name} cannot be used ({cause})",
            remedy="Give cpu, or install torch for this device",
        ) from error
    return name


# --- network -------------------------------------------------------------------------------------------


def _bind(address: str) -> socket.socket:
    """A bound socket that does not listen yet; raises `AddressInUse` or `ConfigError`."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _bad_address(address, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise _bad_address(address, error) from error
    return listener


def _bad_address(address: str, error: OSError) -> MooncakeError:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(address=address, key="--listen")
    return ConfigError(
        file="command line",
        key="--listen",
        problem=f"cannot listen on {address} ({error.strerror})",
        remedy="Give an address of this machine",
    )


@asynccontextmanager
async def _listening(server: Server, listener: socket.socket, address: str) -> AsyncIterator[None]:
    runner = web.AppRunner(
        server.app(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_KEEPALIVE_S,
        lingering_time=_LINGER_S,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    try:
        try:
            await web.SockSite(runner, listener).start()
        except OSError as error:  # another one that was bound to it as well has begun to listen first
            raise _bad_address(address, error) from error
        yield
    finally:
        await runner.cleanup()


def _url(options: Options, listener: socket.socket) -> str:
    host, port = split_address(options.listen)[0], int(listener.getsockname()[1])
    etcd = options.etcd or EtcdConfig()
    config = Config(node=NodeConfig(advertise_host=options.advertise_host), etcd=etcd)
    return f"http://{join_address(advertised_host(config, join_address(host, port)), port)}"


# --- store and cluster -----------------------------------------------------------------------------------


def _client(options: Options, model: LoadedModel) -> Client | None:
    if options.store is None:
        return None
    token = read_secret(options.store_token_file, "command line", "--store-token-file")
    namespace = namespace_of(
        model,
        block_tokens=options.block_tokens,
        chunk_tokens=options.chunk_tokens,
        dtype=options.dtype,
    )
    return Client(options.store, namespace, token=token, timeout_s=EXCHANGE_S)


async def _ask_node_id(client: Client, clock: Clock) -> str:
    """The node's name, from its daemon; waits a while for one that is just starting."""
    deadline = Deadline(clock, _DAEMON_S)
    while True:
        try:
            return (await asyncio.to_thread(client.hello)).node_id
        except (Unreachable, ConnectionLost, DeadlineExceeded):
            if deadline.passed():
                raise
        await clock.sleep(_LOOK_EVERY_S)


def _record(options: Options, parts: Parts, url: str, node_id: str | None, clock: Clock) -> InstanceRecord:
    return InstanceRecord(
        instance_id=options.instance_id,
        url=url,
        role=options.role,
        model=options.model_name,
        engine="reference",
        node_id=node_id,
        namespace=parts.namespace,
        hash_name=HASH_NAME,
        block_tokens=options.block_tokens,
        kv_bytes_per_token=parts.kv_bytes_per_token,
        context_tokens=parts.engine.context_tokens,
        kv_capacity_tokens=parts.kv_tokens,
        batch_max=options.batch_max,
        pid=os.getpid(),
        started_at_s=clock.wall(),
    )


@asynccontextmanager
async def _registered(etcd: EtcdConfig | None, record: InstanceRecord, clock: Clock) -> AsyncIterator[None]:
    """Keep `record` in etcd inside the context; without etcd, do nothing."""
    if etcd is None:
        yield
        return
    async with connect(etcd, clock) as session:
        key = instance_key(etcd.prefix, record.instance_id)
        registration = Registration(session, etcd.lease_ttl, key, lambda: record, clock=clock)
        registration.start()
        try:
            yield
        finally:
            await registration.close()
