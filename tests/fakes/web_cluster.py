"""The HTTP side of a cluster on a thread of its own: a node, an engine and gateways that answer as told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

POOL = {
    "used_bytes": 1 << 29,
    "pinned_bytes": 0,
    "blocks": 128,
    "hits": 30,
    "misses": 10,
    "stored": 140,
    "evicted": 12,
}
MOVED = {"demoted_blocks": 70, "promoted_blocks": 50, "unsaved_blocks": 3, "failed_blocks": 0}
CONDUCTOR = {"leader": "node-1", "instances": [{"instance_id": "both-1", "running": 2}]}


class WebCluster:
    """Serves everything on one port. Attributes may be changed while it runs."""

    def __init__(self) -> None:
        self.healthy = True  # the engine
        self.models = ["tiny"]
        self.disks: list[dict[str, Any]] = []  # of the node
        self.replicas: dict[str, list[dict[str, Any]]] = {}
        self.located: list[dict[str, Any]] = []  # requests
        self.chats: list[dict[str, Any]] = []  # requests
        self.pieces: list[str] = ["Hel", "lo"]
        self.failure: tuple[int, dict[str, Any]] | None = None  # instead of an answer
        self.broken_after: int | None = None  # pieces, then the connection ends
        self.error_event: dict[str, Any] | None = None  # after the pieces
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        runner = self._loop.run_until_complete(self._serve())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        answers: dict[str, Callable[[], Any]] = {
            "/v1/status": lambda: {"pool": POOL, "not_ready": [], "tiers": {"disks": self.disks, **MOVED}},
            "/v1/models": lambda: {"data": [{"id": model} for model in self.models]},
            "/v1/conductor": lambda: CONDUCTOR,
        }
        for path, make in answers.items():
            app.router.add_get(path, self._answer(make))
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/locate", self._locate)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _answer(self, make: Callable[[], Any]) -> Callable[[web.Request], Any]:
        async def handle(_request: web.Request) -> web.Response:
            return web.json_response(make())

        return handle

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _locate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.located.append(body)
        return web.json_response({key: self.replicas.get(key, []) for key in body["keys"]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.chats.append(await request.json())
        if self.failure is not None:
            status, body = self.failure
            return web.json_response(body, status=status)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "X-Mooncake-Request-Id": "r-1",
                "X-Mooncake-Prefill": "prefill-1",
                "X-Mooncake-Decode": "decode-1",
                "X-Mooncake-Reused-Tokens": "96",
                "X-Mooncake-Prompt-Tokens": "100",
            }
        )
        await response.prepare(request)
        for count, piece in enumerate(self.pieces):
            if count == self.broken_after:
                return response
            await self._event(response, {"choices": [{"delta": {"content": piece}}]})
        if self.error_event is not None:
            await self._event(response, {"error": self.error_event})
            return response
        await self._event(response, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 100, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 96}}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(body).encode() + b"\n\n")
