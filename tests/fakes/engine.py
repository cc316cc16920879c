"""An engine that speaks the engine protocol without a model, and fails when it is told to.

One word is one token. An answer is "w0 w1 w2 ...", of as many words as were asked for.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

from aiohttp import web

from mooncaked.types import InstanceRecord, Role


class FakeEngine:
    """Attributes may be changed while it runs."""

    def __init__(
        self, instance_id: str, role: Role = Role.BOTH, node_id: str | None = None, model: str = "tiny"
    ) -> None:
        self.instance_id = instance_id
        self.role = role
        self.node_id = node_id
        self.model = model
        self.context_tokens = 1000
        self.block_tokens = 4
        self.batch_max = 64
        self.cached_tokens = 0  # what it says it reused
        self.prefill_s = 0.0
        self.token_s = 0.0
        self.timing: dict[str, float] | None = {
            "queue_ms": 0.0,
            "load_ms": 0.0,
            "prefill_ms": 5.0,
            "store_ms": 1.0,
        }
        self.stop_at_first = False  # the first token ends the answer
        self.tokens_per_event = 1
        # faults
        self.fail_status: int | None = None  # of every completion
        self.fail_message = "out of order"
        self.hang = asyncio.Event()  # set: completions say nothing at all
        self.break_before_first = 0  # so many completions break before their first byte
        self.break_after: int | None = None  # tokens, then the connection ends
        self.error_after: int | None = None  # tokens, then an error event
        # what it saw
        self.tokenized: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.broken_off = 0  # completions whose client went away
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def prefills(self) -> list[dict[str, Any]]:
        return [b for b in self.bodies if b.get("kv_transfer_params", {}).get("do_remote_decode")]

    @property
    def decodes(self) -> list[dict[str, Any]]:
        return [b for b in self.bodies if b.get("kv_transfer_params", {}).get("do_remote_prefill")]

    def record(self, **changes: Any) -> InstanceRecord:
        fields: dict[str, Any] = {
            "instance_id": self.instance_id,
            "url": self.url,
            "role": self.role,
            "model": self.model,
            "engine": "fake",
            "node_id": self.node_id,
            "namespace": self.model,
            "hash_name": "mooncake_xxh3",
            "block_tokens": self.block_tokens,
            "kv_bytes_per_token": 1000,
            "context_tokens": self.context_tokens,
            "kv_capacity_tokens": 100_000,
            "batch_max": self.batch_max,
            "pid": 1,
            "started_at_s": 1_700_000_000.0,
        }
        return InstanceRecord(**(fields | changes))

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End it: its port refuses connections from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenized.append(body)
        if self.fail_status is not None:
            return self._failure()
        if "messages" in body:
            text = " ".join(f"<{m['role']}> {m['content']}" for m in body["messages"])
        else:
            text = body["prompt"]
        tokens = [zlib.crc32(word.encode()) % 50_000 for word in text.split()]
        return web.json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self.context_tokens}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.broken_off += 1
            raise
        finally:
            self.running -= 1

    def _failure(self) -> web.Response:
        return web.json_response({"error": {"message": self.fail_message}}, status=self.fail_status or 500)

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.hang.is_set():
            await asyncio.Event().wait()
        if self.fail_status is not None:
            return self._failure()
        if self.break_before_first > 0:
            self.break_before_first -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        params = body.get("kv_transfer_params", {})
        if self.prefill_s and not params.get("do_remote_prefill"):
            await asyncio.sleep(self.prefill_s)
        if not body.get("stream"):
            return web.json_response(self._whole(body))
        return await self._stream(request, body)

    def _usage(self, body: dict[str, Any], completion: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        count = body["max_tokens"]
        text = "" if self.stop_at_first else "".join(f"w{i} " for i in range(count))
        answer: dict[str, Any] = {
            "choices": [
                {"index": 0, "text": text, "finish_reason": "stop" if self.stop_at_first else "length"}
            ],
            "usage": self._usage(body, 1),
        }
        if body.get("kv_transfer_params", {}).get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "node_id": self.node_id,
                "first_token": 42,
                "finished": self.stop_at_first,
                "timing": self.timing,
            }
        return answer

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"]
        for i in range(count):
            if self.break_after == i and request.transport is not None:
                request.transport.abort()
                return response
            if self.error_after == i:
                await response.write(b'data: {"error": {"message": "lost my mind"}}\n\n')
                return response
            if self.token_s:
                await asyncio.sleep(self.token_s)
            reason = "length" if i == count - 1 else None
            choice = {"index": 0, "text": f"w{i} ", "finish_reason": reason}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"choices": [], "usage": self._usage(body, count)}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response
