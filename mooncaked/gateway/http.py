"""The gateway's routes, and the rules that hold for all of them: bounded bodies, errors as JSON, counted."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mooncaked import log as logs
from mooncaked.clock import Clock
from mooncaked.conductor.core import Conductor
from mooncaked.conductor.fleet import Model
from mooncaked.conductor.messages import Ask
from mooncaked.errors import (
    AdmissionRefused,
    BodyTooLarge,
    DeadlineExceeded,
    ModelNotFound,
    MooncakeError,
    NoInstance,
    NotFound,
    Overloaded,
)
from mooncaked.gateway.answers import Collected, Streamed
from mooncaked.gateway.counters import Counters
from mooncaked.gateway.openai import Request, invalid, parse_chat, parse_text
from mooncaked.gateway.prompts import Prompt, Prompts
from mooncaked.gateway.serve import Run, Serving
from mooncaked.gateway.shapes import Shape, error_headers, error_shape

log = logging.getLogger(__name__)

BODY_S = 60.0  # for a request's body to arrive
KEEPALIVE_S = 75.0  # of an idle connection, and for the head of a request to arrive
IN_FLIGHT_MAX = 4096
LINGER_S = (
    5.0  # how long what a refused request still sends is read and forgotten, so that it reads the answer
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one request."""

    body_bytes: int
    request_s: float
    in_flight: int = IN_FLIGHT_MAX


class Gateway:
    """The OpenAI-compatible part. `routes` adds it to an application."""

    def __init__(
        self,
        conductor: Conductor,
        prompts: Prompts,
        serving: Serving,
        counters: Counters,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self._conductor = conductor
        self._prompts = prompts
        self._serving = serving
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self.in_flight = 0

    def routes(self, app: web.Application) -> None:
        """Add the routes."""
        add = app.router.add_route
        add("POST", "/v1/chat/completions", self._chat, expect_handler=self.expect)
        add("POST", "/v1/completions", self._text, expect_handler=self.expect)
        add("GET", "/v1/models", self._models)
        add("GET", "/v1/models/{model:.+}", self._model_card)

    # --- completions -----------------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_chat)

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, parse_text)

    async def _complete(self, request: web.Request, parse: Callable[[bytes], Request]) -> web.StreamResponse:
        began_s = self._clock.monotonic()
        if self.in_flight >= self._limits.in_flight:
            raise Overloaded(what="this gateway", limit=self._limits.in_flight)
        request_id = secrets.token_hex(12)
        self.in_flight += 1
        try:
            parsed = parse(await self.body(request))
            shape = Shape(parsed, request_id, int(self._clock.wall()))
            answer = Streamed(request, shape) if parsed.stream else Collected(shape)
            with logs.request_id(request_id):
                return await self._answer(parsed, request_id, answer, began_s)
        finally:
            self.in_flight -= 1

    async def _answer(
        self, request: Request, request_id: str, answer: Streamed | Collected, began_s: float
    ) -> web.StreamResponse:
        """Serve within the deadline. What fails after the first token is said in the stream."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                model = self.model(request.model)
                prompt = await self._prompts.prompt(request, model.sites(), model.families())
                ask = self.ask(request, request_id, prompt, model)
                run = Run(request=request, prompt=prompt, ask=ask, answer=answer, began_s=began_s)
                return await self._serving.run(run)
        except TimeoutError:
            limit_ms = round(self._limits.request_s * 1000)
            error: MooncakeError = DeadlineExceeded(operation="the request", limit_ms=limit_ms)
        except MooncakeError as raised:
            error = raised
        if isinstance(answer, Streamed) and answer.begun:
            log.warning("request failed in mid-stream cause=%s", error)
            return await answer.fail(error)
        raise error

    def ask(self, request: Request, request_id: str, prompt: Prompt, model: Model) -> Ask:
        """What the conductor is asked for a tokenized request."""
        return Ask(
            request_id=request_id,
            model=request.model,
            prompt_tokens=prompt.count,
            max_tokens=request.max_tokens,
            chains=prompt.chains(model.families()),
        )

    def model(self, name: str) -> Model:
        """The model's instances; raises `ModelNotFound`, or `NoInstance` when they are all gone for now."""
        fleet = self._conductor.fleet
        model = fleet.model(name)
        if model is not None:
            return model
        served = fleet.models()
        if not served or fleet.was_served(name):
            raise NoInstance(model=name, detail="no instance is registered")
        raise ModelNotFound(name=name, served=", ".join(served), param="model")

    # --- models ----------------------------------------------------------------------------------------

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        cards = [self._card(name) for name in self._conductor.fleet.models()]
        return as_json({"object": "list", "data": cards})

    async def _model_card(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        self.model(name)
        return as_json(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        model = self.model(name)
        records = [site.record for site in model.sites()]
        return {
            "id": name,
            "object": "model",
            "created": int(min(record.started_at_s for record in records)),
            "owned_by": records[0].engine,
            "max_model_len": model.limit_tokens,
        }

    # --- bodies ----------------------------------------------------------------------------------------

    async def expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer `Expect: 100-continue`: a body that is too large need not be sent at all."""
        expected = request.headers.get(hdrs.EXPECT, "")
        if expected.lower() != "100-continue":
            return _error_response(invalid(f"Expect: {expected} is not supported"), 417)
        try:
            self._check_length(request)
        except BodyTooLarge as error:
            return _error_response(error)
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    def _check_length(self, request: web.Request) -> None:
        if (request.content_length or 0) > self._limits.body_bytes:
            raise BodyTooLarge(limit=self._limits.body_bytes, key="conductor.body_max")

    async def body(self, request: web.Request) -> bytes:
        """The request's body; raises `BodyTooLarge` without reading more than the limit."""
        self._check_length(request)
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while part := await request.content.readany():
                    data += part
                    if len(data) > self._limits.body_bytes:
                        raise BodyTooLarge(limit=self._limits.body_bytes, key="conductor.body_max")
        except TimeoutError:
            raise DeadlineExceeded(
                operation="receiving the request's body", limit_ms=round(BODY_S * 1000)
            ) from None
        return bytes(data)


def as_json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response."""
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, headers=headers, content_type="application/json")


def shield(counters: Counters) -> Middleware:
    """The middleware of all routes: whatever is raised becomes an answer, and every answer is counted."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"
        counters.in_flight.inc()
        try:
            response = await _respond(request, handler, counters)
        except (asyncio.CancelledError, ConnectionResetError):
            counters.broken_off.inc()
            raise
        finally:
            counters.in_flight.dec()
        counters.requests.labels(route, str(response.status)).inc()
        return response

    return answer


async def _respond(request: web.Request, handler: Handler, counters: Counters) -> web.StreamResponse:
    try:
        return await handler(request)
    except MooncakeError as error:
        if isinstance(error, AdmissionRefused):
            counters.refusals.labels(str(error.fields.get("cause"))).inc()
        return _error_response(error)
    except web.HTTPException as error:
        return _error_response(_http_error(request, error), error.status)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:  # a bug that one request meets must not leave its client without an answer
        log.exception("unexpected error route=%s", request.path)
        return _error_response(MooncakeError(detail="see the log of the gateway"))


def _error_response(error: MooncakeError, status: int | None = None) -> web.Response:
    response = as_json(error_shape(error), status or error.http_status, error_headers(error))
    if error.http_status == 413:
        response.force_close()
    return response


def _http_error(request: web.Request, error: web.HTTPException) -> MooncakeError:
    if error.status == 404:
        return NotFound(kind="Route", name=request.path, remedy="The API begins at /v1/models")
    return invalid(f"{request.method} {request.path}: {error.reason}")


async def metrics(registry: CollectorRegistry, request: web.Request) -> web.Response:
    """GET /metrics"""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(registry), headers={"Content-Type": content_type})
