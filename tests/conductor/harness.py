"""A candidate on a free port, with a cluster view that the test sets and engines that the test breaks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from mooncaked.api.listen import bind_tcp, bound_address
from mooncaked.clock import SystemClock
from mooncaked.config import ConductorConfig, Config
from mooncaked.gateway.process import Candidate, _listen
from mooncaked.types import BlockEvent, Role, Tier
from tests.fakes.cluster_view import FakeView, node_record
from tests.fakes.engine import FakeEngine


class Running:
    """One candidate that serves."""

    def __init__(self, candidate: Candidate, view: FakeView, url: str, http: aiohttp.ClientSession) -> None:
        self.candidate = candidate
        self.view = view
        self.url = url
        self.http = http
        self.term: int | None = 1
        self.engines: list[FakeEngine] = []

    async def add(self, *engines: FakeEngine) -> None:
        """Start engines and register them, and their nodes."""
        for engine in engines:
            await engine.start()
            self.engines.append(engine)
            self.view.instances = self.view.instances | {engine.instance_id: engine.record()}
            if engine.node_id is not None and engine.node_id not in self.view.nodes:
                self.view.nodes = self.view.nodes | {engine.node_id: node_record(engine.node_id)}
        self.view.tell()

    def hold(self, node_id: str, namespace: str, keys: list[bytes]) -> None:
        """Let the index know that a node has these blocks."""
        index = self.candidate.conductor.index
        source = index.begin(node_id)
        index.apply(source, [BlockEvent(True, namespace, key, None, 4000, Tier.DRAM) for key in keys])
        index.publish(source)

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, **kwargs) as response:
            return response.status, await response.json(), dict(response.headers)

    async def chat(
        self, text: str = "tell me a story", **fields: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        return await self.post("/v1/chat/completions", body | fields)

    async def events(self, path: str, body: dict[str, Any]) -> tuple[dict[str, str], list[Any]]:
        """All events of a stream, decoded; `[DONE]` as text."""
        async with self.http.post(
            self.url + path, data=json.dumps(body | {"stream": True}).encode()
        ) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
            return dict(response.headers), parse_events(text)

    async def status(self) -> dict[str, Any]:
        async with self.http.get(self.url + "/v1/conductor") as response:
            return await response.json()

    async def metrics(self) -> str:
        async with self.http.get(self.url + "/metrics") as response:
            return await response.text()

    def reservations(self) -> int:
        self.candidate.conductor.ledger.check_integrity()
        return len(self.candidate.conductor.ledger)


def parse_events(text: str) -> list[Any]:
    found: list[Any] = []
    for event in filter(None, text.split("\n\n")):
        data = next(line[6:] for line in event.split("\n") if line.startswith("data: "))
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def config(**fields: Any) -> Config:
    return Config(
        conductor=ConductorConfig(**({"listen": "127.0.0.1:0", "index_blocks_max": 100_000} | fields))
    )


@asynccontextmanager
async def running(
    candidate_id: str = "c1", view: FakeView | None = None, **fields: Any
) -> AsyncIterator[Running]:
    """A candidate, leading in term 1 unless the test sets `term`."""
    settings = config(**fields)
    view = view or FakeView()
    holder: list[Running] = []
    candidate = Candidate(
        settings,
        view,
        lambda: holder[0].term,
        candidate_id,
        SystemClock(),
        random.Random(1),  # type: ignore[arg-type]
    )
    undo = view.on_change(lambda: _refresh(candidate, view))
    sock = bind_tcp(settings.conductor.listen, "conductor.listen")
    await candidate.engines.start()
    await candidate.dispatch.start()
    runner: web.AppRunner = await _listen(candidate, sock, 0.1)
    watchdog = asyncio.create_task(candidate.watchdog.run())
    async with aiohttp.ClientSession() as http:
        result = Running(candidate, view, f"http://{bound_address(sock)}", http)
        holder.append(result)
        try:
            yield result
        finally:
            undo()
            watchdog.cancel()
            await runner.cleanup()
            await candidate.dispatch.close()
            await candidate.orders.close()
            await candidate.engines.close()
            for engine in result.engines:
                await engine.stop()


def _refresh(candidate: Candidate, view: FakeView) -> None:
    """As `Candidate.refresh`, without subscribing to the nodes: these have no daemons."""
    candidate.conductor.update(view.instances, view.nodes)


def pair() -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode engine, on two nodes."""
    return FakeEngine("p1", Role.PREFILL, "n1"), FakeEngine("d1", Role.DECODE, "n2")
