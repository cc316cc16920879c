"""An instance's HTTP in this process, on a port of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from mooncaked.clock import SystemClock
from mooncaked.engines.reference.server import Server
from tests.engines.harness import Running


class Http:
    """A client of one instance."""

    def __init__(self, session: aiohttp.ClientSession, url: str, running: Running, server: Server) -> None:
        self.session, self.url, self.running, self.server = session, url, running, server

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: dict[str, Any] | bytes) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any, max_tokens: int = 6, **fields: Any) -> Any:
        """The answer to a completion request that must succeed."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        status, answer = await self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream up to [DONE]."""
        events: list[Any] = []
        data = json.dumps(body | {"stream": True})
        async with self.session.post(self.url + path, data=data) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        *lines, last = [part for part in text.split("\n\n") if part]
        assert last == "data: [DONE]"
        for line in lines:
            assert line.startswith("data: ")
            events.append(json.loads(line[6:]))
        return events


@asynccontextmanager
async def serving(running: Running, node_id: str | None = "node-1") -> AsyncIterator[Http]:
    """Serve the engine of `running`, which the caller closes."""
    parts = running.parts
    server = Server(parts.engine, parts.front, parts.registry, node_id=node_id, clock=SystemClock())
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1, lingering_time=5.0
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            yield Http(session, url, running, server)
    finally:
        await runner.cleanup()
