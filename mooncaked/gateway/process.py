"""A conductor candidate: election, index and gateway in one process, built by hand in start order."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry

from mooncaked.api.listen import bind_tcp, bound_address
from mooncaked.clock import Clock, SystemClock
from mooncaked.cluster.connect import connect
from mooncaked.cluster.election import Election
from mooncaked.cluster.view import ClusterView
from mooncaked.conductor import admission
from mooncaked.conductor.core import Conductor, Settings
from mooncaked.conductor.index import PrefixIndex
from mooncaked.conductor.orders import Orders
from mooncaked.conductor.policies import make_policy
from mooncaked.conductor.subscriber import Subscriber
from mooncaked.config import Config
from mooncaked.gateway.counters import Counters
from mooncaked.gateway.dispatch import Dispatch
from mooncaked.gateway.engines import Engines
from mooncaked.gateway.http import KEEPALIVE_S, LINGER_S, Gateway, Limits, as_json, metrics, shield
from mooncaked.gateway.prompts import Prompts
from mooncaked.gateway.scheduling import SchedulingApi
from mooncaked.gateway.serve import Serving
from mooncaked.gateway.status import Status
from mooncaked.gateway.watchdog import Watchdog
from mooncaked.host import advertised_host, read_secret
from mooncaked.metrics import Readings
from mooncaked.types import CandidateRecord
from mooncaked.units import join_address, split_address

log = logging.getLogger(__name__)

_EXPIRY_MARGIN_S = 30.0  # a reservation outlives its request's deadline by this, and then its gateway is dead


class Candidate:
    """The parts that make decisions and serve, without the cluster connection: tests build it alone."""

    def __init__(
        self,
        config: Config,
        view: ClusterView,
        term: Callable[[], int | None],
        candidate_id: str,
        clock: Clock,
        rng: random.Random,
        token: str | None = None,
    ) -> None:
        section = config.conductor
        self.registry = CollectorRegistry()
        counters = Counters(self.registry)
        policy = make_policy(section.policy, section.balancing_threshold, rng)
        index = PrefixIndex(section.index_blocks_max)
        self.conductor = Conductor(index, policy, _settings(config), clock)
        self.subscriber = Subscriber(
            index, token=token, clock=clock, rng=rng, on_away=self.conductor.fleet.set_away
        )
        self.engines = Engines()
        self.orders = Orders(
            lambda: view.nodes, token, lambda result: counters.prefetch_orders.labels(result).inc()
        )
        self.dispatch = Dispatch(self.conductor, view, term, candidate_id, clock, self.orders.prefetch)
        self.watchdog = Watchdog(lambda: self.conductor.fleet.sites)
        prompts = Prompts(self.engines, self.conductor.failed)
        serving = Serving(self.engines, self.dispatch, self.watchdog, counters, clock)
        limits = Limits(body_bytes=section.body_max, request_s=section.request_timeout)
        self.gateway = Gateway(self.conductor, prompts, serving, counters, limits, clock)
        self.scheduling = SchedulingApi(self.conductor, self.dispatch, self.gateway, prompts, view, term)
        self.status = Status(
            self.conductor,
            self.subscriber,
            view,
            term,
            candidate_id,
            lambda: self.gateway.in_flight,
            clock,
        )
        self.registry.register(Readings(self.status.readings()))
        self._counters = counters
        self._view = view

    def apply(self, config: Config) -> None:
        """Take over the settings that apply live."""
        self.conductor.settings = _settings(config)

    def refresh(self) -> None:
        """The view of the cluster has changed."""
        self.conductor.update(self._view.instances, self._view.nodes)
        self.subscriber.update(self._view.nodes)

    def app(self) -> web.Application:
        """The application with all routes."""
        app = web.Application(middlewares=[shield(self._counters)])
        self.gateway.routes(app)
        self.scheduling.routes(app)
        app.router.add_get("/v1/conductor", self._conductor_status)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/healthz", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _conductor_status(self, _request: web.Request) -> web.StreamResponse:
        return as_json(self.status.conductor())

    async def _live(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        reasons = self.status.not_ready()
        text = "not ready\n" if reasons else "ok\n"
        if "verbose" in request.query:
            text += "".join(f"{reason}\n" for reason in reasons)
        return web.Response(text=text, status=503 if reasons else 200)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return await metrics(self.registry, request)


class Live:
    """Hands a changed configuration to a running conductor: `apply` does nothing before it runs."""

    def __init__(self) -> None:
        self.candidate: Candidate | None = None

    def apply(self, config: Config) -> None:
        """Take over what applies live, the SLOs."""
        if self.candidate is not None:
            self.candidate.apply(config)


async def run_conductor(
    config: Config,
    stop: asyncio.Event,
    *,
    live: Live | None = None,
    ready: Callable[[str], None] | None = None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> None:
    """Stand for election and serve until `stop`; then give the lead away, let requests end, and return.

    `ready` is called once with the gateway's URL when it listens. Raises `AddressInUse` and `ConfigError`;
    etcd may be away at any time."""
    clock, rng = clock or SystemClock(), rng or random.Random()
    token = read_secret(config.listen.token_file, "configuration", "listen.token_file")
    candidate_id = _candidate_id(config)
    sock = bind_tcp(config.conductor.listen, "conductor.listen")
    record = _record(config, candidate_id, sock, clock)
    async with AsyncExitStack() as stack:
        etcd = await stack.enter_async_context(connect(config.etcd, clock))
        view = ClusterView(etcd, config.etcd.prefix, clock=clock)
        election = Election(etcd, config.etcd.prefix, record, config.conductor.lease_ttl, clock=clock)
        candidate = Candidate(config, view, lambda: election.term, candidate_id, clock, rng, token)
        if live is not None:
            live.candidate = candidate
        view.on_change(candidate.refresh)
        election.on_change(lambda _standing: candidate.dispatch.wake())
        await candidate.engines.start()
        stack.push_async_callback(candidate.engines.close)
        stack.push_async_callback(candidate.orders.close)
        await candidate.dispatch.start()
        stack.push_async_callback(candidate.dispatch.close)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(part)
                for part in (view.run(), candidate.subscriber.run(), candidate.watchdog.run())
            ]
            standing = group.create_task(election.run(), name="election")
            runner = await _listen(candidate, sock, config.node.drain_timeout)
            log.info("gateway serves url=%s candidate=%s", record.gateway_url, candidate_id)
            if ready is not None:
                ready(record.gateway_url)
            await stop.wait()
            try:
                async with asyncio.timeout(config.conductor.lease_ttl):
                    await election.resign()
            except TimeoutError:
                log.info("lead not given away in time, its lease expires")
            await runner.cleanup()
            for task in (*tasks, standing):
                task.cancel()
    log.info("conductor ended candidate=%s", candidate_id)


async def _listen(candidate: Candidate, sock: socket.socket, drain_s: float) -> web.AppRunner:
    runner = web.AppRunner(
        candidate.app(),
        access_log=None,
        handler_cancellation=True,  # a client that goes away ends the work for it
        keepalive_timeout=KEEPALIVE_S,
        lingering_time=LINGER_S,
        shutdown_timeout=drain_s,
    )
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    return runner


def _settings(config: Config) -> Settings:
    section = config.conductor
    limits = admission.Limits(slo_ttft_ms=section.slo_ttft * 1000.0, slo_tbt_ms=section.slo_tbt * 1000.0)
    ttl_ms = (section.request_timeout + _EXPIRY_MARGIN_S) * 1000.0
    return Settings(admission=section.admission, limits=limits, reservation_ttl_ms=ttl_ms)


def _candidate_id(config: Config) -> str:
    """The node's id where there is a node; else a name for this very process."""
    if config.node.id:
        return config.node.id
    kept = config.node.state_dir / "node-id"
    try:
        return kept.read_text().strip() or f"{socket.gethostname()}-{os.getpid()}"
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"


def _record(config: Config, candidate_id: str, sock: socket.socket, clock: Clock) -> CandidateRecord:
    port = split_address(bound_address(sock))[1]
    host = advertised_host(config, config.conductor.listen)
    return CandidateRecord(
        candidate_id=candidate_id,
        gateway_url=f"http://{join_address(host, port)}",
        host=socket.gethostname(),
        pid=os.getpid(),
        version=version("mooncaked"),
        started_at_s=clock.wall(),
    )
