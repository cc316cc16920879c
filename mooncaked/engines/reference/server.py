"""The engine's HTTP: OpenAI's routes, and those that the gateway needs."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mooncaked import log as logs
from mooncaked.clock import Clock
from mooncaked.engines.reference.answering import Piece, answer, timing_of
from mooncaked.engines.reference.engine import Engine
from mooncaked.engines.reference.requests import (
    Extras,
    Front,
    KvTransferParams,
    parse_extras,
    parse_tokenize,
    stops_of,
)
from mooncaked.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    MooncakeError,
    NotFound,
    Unhealthy,
)
from mooncaked.gateway.openai import Request, invalid, parse_chat, parse_text
from mooncaked.gateway.shapes import Shape, Usage, error_event, error_headers, error_shape

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 16 << 20  # unless set otherwise
BODY_S = 60.0  # for a request's body to arrive
WRITE_S = 60.0  # a client that takes nothing for this long has gone
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The routes of one instance. `app` makes the application that has them."""

    def __init__(
        self,
        engine: Engine,
        front: Front,
        registry: CollectorRegistry,
        *,
        node_id: str | None,
        body_bytes_max: int = BODY_BYTES_MAX,
        clock: Clock,
    ) -> None:
        self._engine, self._front, self._registry = engine, front, registry
        self._node_id, self._body_bytes_max, self._clock = node_id, body_bytes_max, clock
        self._created_s = int(clock.wall())
        self.draining = False

    def app(self) -> web.Application:
        """The application; its runner needs handler_cancellation, so that a client who leaves is noticed."""
        app = web.Application(middlewares=[_shield])
        app.router.add_post("/v1/completions", self._text)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model_card)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    # --- completions -------------------------------------------------------------------------------

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat)

    async def _complete(self, request: web.Request, parse: Callable[[bytes], Request]) -> web.StreamResponse:
        body = await self._body(request)
        parsed, extras = parse(body), parse_extras(body)
        self._front.check_model(parsed.model)
        params = extras.kv_transfer_params or KvTransferParams()
        request_id = params.request_id or secrets.token_hex(12)
        with logs.request_id(request_id):
            prompt = await asyncio.to_thread(self._front.tokens_of, parsed)
            work = self._front.generation(parsed, extras, prompt, request_id)
            shape = Shape(parsed, request_id, int(self._clock.wall()))
            pieces = answer(self._engine, self._front.tokenizer, work, stops_of(parsed))
            began_s = self._clock.monotonic()
            async with aclosing(pieces):
                if parsed.stream:
                    response, usage = await self._stream(request, shape, pieces, parsed, extras)
                else:
                    response, usage = await self._collect(shape, pieces, extras)
            log.info(
                "served prompt_tokens=%d cached_tokens=%d answer_tokens=%d ms=%.0f",
                usage.prompt_tokens,
                usage.reused_tokens,
                usage.completion_tokens,
                (self._clock.monotonic() - began_s) * 1000,
            )
            return response

    async def _collect(
        self, shape: Shape, pieces: AsyncGenerator[Piece, None], extras: Extras
    ) -> tuple[web.StreamResponse, Usage]:
        texts, tokens = [], []
        async for piece in pieces:
            last = piece
            texts.append(piece.text)
            if piece.token is not None:
                tokens.append(piece.token)
        more = self._more(extras, last, tokens)
        body = shape.whole("".join(texts), last.reason or "stop", last.usage, more)
        return web.Response(body=body, content_type="application/json"), last.usage

    async def _stream(
        self,
        request: web.Request,
        shape: Shape,
        pieces: AsyncGenerator[Piece, None],
        parsed: Request,
        extras: Extras,
    ) -> tuple[web.StreamResponse, Usage]:
        """One event per token. An error before the first one is raised, and has a status of its own."""
        first = await anext(pieces)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        await response.prepare(request)
        # The gateway wants to know with the first token how much was reused; others get usage at the end.
        more = self._more(extras, first, [first.token])
        early = {"usage": first.usage.shape()} if extras.kv_transfer_params and parsed.include_usage else {}
        await _write(response, shape.chunk(first.text, first.reason, more | early))
        last = first
        try:
            async for last in pieces:
                tokens = [] if last.token is None else [last.token]
                await _write(response, shape.chunk(last.text, last.reason, self._more(extras, last, tokens)))
        except MooncakeError as error:
            log.warning("request failed in mid-stream cause=%s", error)
            await _write(response, error_event(error))
        else:
            await _write(response, shape.last_chunks(last.usage))
        await response.write_eof()
        return response, last.usage

    def _more(self, extras: Extras, piece: Piece, tokens: list[Any]) -> dict[str, Any]:
        """Fields beside OpenAI's: token ids where asked for, and at the end what became of the KV."""
        more: dict[str, Any] = {"token_ids": tokens} if extras.return_token_ids else {}
        params = extras.kv_transfer_params
        if params is not None and piece.reason is not None:
            about: dict[str, Any] = {"node_id": self._node_id, "timing": timing_of(piece.finish)}
            if piece.finish is not None:
                about["loaded_tokens"] = piece.finish.cached_tokens
            if params.do_remote_decode and tokens:
                about |= {"first_token": tokens[0], "finished": piece.reason == "stop"}
            more["kv_transfer_params"] = about
        return more

    # --- the rest ----------------------------------------------------------------------------------

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = parse_tokenize(await self._body(request))
        self._front.check_model(body.model)
        tokens = await asyncio.to_thread(self._front.tokenize, body)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._front.context_tokens})

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._card()]})

    async def _model_card(self, request: web.Request) -> web.StreamResponse:
        self._front.check_model(request.match_info["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._front.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "reference",
            "max_model_len": self._front.context_tokens,
        }

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        if not self._engine.alive:
            raise Unhealthy(what=f"engine {self._front.name}", cause="its step thread has ended")
        return _json(
            {"status": "draining" if self.draining else "ok", "requests": self._engine.open_requests},
            503 if self.draining else 200,
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(self._registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def _body(self, request: web.Request) -> bytes:
        """The request's body; raises `BodyTooLarge` without reading more than the limit."""
        too_large = BodyTooLarge(limit=self._body_bytes_max, key="--body-max")
        if (request.content_length or 0) > self._body_bytes_max:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while part := await request.content.readany():
                    data += part
                    if len(data) > self._body_bytes_max:
                        raise too_large
        except TimeoutError:
            operation = "receiving the request's body"
            raise DeadlineExceeded(operation=operation, limit_ms=round(BODY_S * 1000)) from None
        return bytes(data)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError("the client does not read its answer") from None


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def _shield(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever is raised becomes an answer in OpenAI's error shape."""
    try:
        return await handler(request)
    except MooncakeError as error:
        return _error(error)
    except web.HTTPException as error:
        return _error(_known(request, error), error.status)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:  # a bug that one request meets must not leave its client without an answer
        log.exception("unexpected error route=%s", request.path)
        return _error(MooncakeError(detail="see the log of the engine"))


def _known(request: web.Request, error: web.HTTPException) -> MooncakeError:
    if error.status == 404:
        return NotFound(kind="Route", name=request.path, remedy="The API begins at /v1/models.")
    return invalid(f"{request.method} {request.path}: {error.reason}")


def _error(error: MooncakeError, status: int | None = None) -> web.Response:
    response = _json(error_shape(error), status or error.http_status, error_headers(error))
    if error.http_status == 413:
        response.force_close()
    return response
