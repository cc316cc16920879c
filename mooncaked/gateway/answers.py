"""Where an answer goes: streamed to the client as it comes, or collected and sent in one piece.

Until `begun`, nothing has been sent: the request can start over at another instance, and an error still has a
status of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

from aiohttp import web

from mooncaked.errors import DeadlineExceeded, MooncakeError
from mooncaked.gateway.shapes import Shape, Usage, error_event

WRITE_S = 60.0  # a client that takes nothing for this long has gone or is a danger to the others
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Answer(Protocol):
    """One answer, in the order start, add..., end. `start` again drops what was added before."""

    @property
    def begun(self) -> bool:
        """Whether the client has been sent anything."""

    async def start(self, headers: dict[str, str]) -> None:
        """The first token is there."""

    async def add(self, pieces: list[tuple[str, str | None]]) -> None:
        """More text; each piece with its finish reason, None but for the last of all."""

    async def end(self, usage: Usage) -> web.StreamResponse:
        """All is there."""


class Streamed(Answer):
    """Server-sent events."""

    def __init__(self, request: web.BaseRequest, shape: Shape) -> None:
        self._request = request
        self._shape = shape
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def start(self, headers: dict[str, str]) -> None:
        response = web.StreamResponse(headers=_STREAM_HEADERS | headers)
        self._response = response
        await response.prepare(self._request)

    async def add(self, pieces: list[tuple[str, str | None]]) -> None:
        await self._write(b"".join(self._shape.chunk(text, reason) for text, reason in pieces))

    async def end(self, usage: Usage) -> web.StreamResponse:
        return await self._end(self._shape.last_chunks(usage))

    async def fail(self, error: MooncakeError) -> web.StreamResponse:
        """Say in the stream what went wrong, and end it."""
        return await self._end(error_event(error))

    async def _write(self, data: bytes) -> None:
        await _bounded(self._started().write(data))

    async def _end(self, data: bytes) -> web.StreamResponse:
        response = self._started()
        await _bounded(response.write_eof(data))
        return response

    def _started(self) -> web.StreamResponse:
        if self._response is None:
            raise RuntimeError("an answer is written before it was started")
        return self._response


async def _bounded(writing: Awaitable[None]) -> None:
    """Wait for a write, but not for ever for a client that does not read."""
    try:
        async with asyncio.timeout(WRITE_S):
            await writing
    except TimeoutError:
        operation = "sending the answer to a client that does not read it"
        raise DeadlineExceeded(operation=operation, limit_ms=round(WRITE_S * 1000)) from None


class Collected(Answer):
    """One JSON object."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._headers: dict[str, str] = {}
        self._texts: list[str] = []
        self._finish_reason = "stop"

    @property
    def begun(self) -> bool:
        return False

    async def start(self, headers: dict[str, str]) -> None:
        self._headers = headers
        self._texts = []

    async def add(self, pieces: list[tuple[str, str | None]]) -> None:
        for text, reason in pieces:
            self._texts.append(text)
            if reason is not None:
                self._finish_reason = reason

    async def end(self, usage: Usage) -> web.StreamResponse:
        body = self._shape.whole("".join(self._texts), self._finish_reason, usage)
        return web.Response(body=body, content_type="application/json", headers=self._headers)
