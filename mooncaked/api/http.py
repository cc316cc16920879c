"""HTTP for probes, metrics and operators."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mooncaked.api.listen import bind_tcp, bound_address
from mooncaked.errors import InvalidRequest, MooncakeError, Unauthenticated

log = logging.getLogger(__name__)

KEY = "listen.http"
_KEEPALIVE_S = 30.0
_CLOSE_S = 2.0


class ResizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/pool/resize."""

    size_bytes: int


class PoolAdmin(msgspec.Struct, frozen=True, kw_only=True):
    """What operators may ask about the pool, and who may change it."""

    show: Callable[[], Any]  # the answer of GET /v1/pool
    resize: Callable[[int], Any]  # to so many bytes; the answer, or raises `MooncakeError`
    token: str | None = None  # must be shown for changes; None: they may come from this machine only


class NodeHttp:
    """Serves /livez, /healthz, /readyz (with ?verbose the reasons), /metrics, /v1/status and /v1/pool; takes
    POST /v1/pool/resize."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        *,
        ready: Callable[[], list[str]],
        live: Callable[[], bool],
        status: Callable[[], Any],
        pool: PoolAdmin | None = None,
    ) -> None:
        """`ready` gives the reasons why the node is not ready (none: it is), `live` whether its working loop
        works, `status` what /v1/status shows, as anything that msgspec can encode."""
        self._address = address
        self._registry = registry
        self._ready = ready
        self._live = live
        self._status = status
        self._pool = pool
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen; returns the address with the port that it has. Raises `AddressInUse` or `ConfigError`."""
        sock = bind_tcp(self._address, KEY)
        app = web.Application(middlewares=[_errors], client_max_size=1024)
        app.router.add_get("/livez", self._get_live)
        app.router.add_get("/healthz", self._get_live)
        app.router.add_get("/readyz", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/v1/status", self._get_status)
        if self._pool is not None:
            app.router.add_get("/v1/pool", partial(self._get_pool, self._pool))
            app.router.add_post("/v1/pool/resize", partial(self._post_resize, self._pool))
        self._runner = web.AppRunner(
            app, access_log=None, keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=_CLOSE_S
        )
        await self._runner.setup()
        await web.SockSite(self._runner, sock).start()
        address = bound_address(sock)
        log.info("serving http address=%s", address)
        return address

    async def close(self) -> None:
        """Stop. May be called again, or without `start`."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _get_live(self, _request: web.Request) -> web.Response:
        if self._live():
            return web.Response(text="ok\n")
        return web.Response(text="the working loop does not work\n", status=503)

    async def _get_ready(self, request: web.Request) -> web.Response:
        reasons = self._ready()
        text = "not ready\n" if reasons else "ok\n"
        if "verbose" in request.query:
            text += "".join(f"{reason}\n" for reason in reasons)
        return web.Response(text=text, status=503 if reasons else 200)

    async def _get_metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        # In a thread, since it grows with the number of metrics; those who give the numbers allow for that.
        body = await asyncio.to_thread(encode, self._registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _json(self._status())

    async def _get_pool(self, pool: PoolAdmin, _request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(pool.show))

    async def _post_resize(self, pool: PoolAdmin, request: web.Request) -> web.Response:
        _check_rights(request, pool.token)
        try:
            wanted = msgspec.json.decode(await request.read(), type=ResizeRequest)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(problem=f'the body must be {{"size_bytes": N}}: {error}') from error
        return _json(pool.resize(wanted.size_bytes), 202)


def _check_rights(request: web.Request, token: str | None) -> None:
    """Raise `Unauthenticated` unless the request shows the node's token, or, where there is none, comes from
    this machine."""
    if token is not None:
        shown = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
            remedy = "Send Authorization: Bearer with the text of listen.token_file."
            raise Unauthenticated(what="The node", cause="the token is missing or wrong", remedy=remedy)
        return
    try:
        local = ipaddress.ip_address(request.remote or "").is_loopback
    except ValueError:
        local = False
    if not local:
        cause = f"without listen.token_file, changes come from this machine only, not from {request.remote}"
        raise Unauthenticated(what="The node", cause=cause, remedy="Ask there, or configure a token.")


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), status=status, content_type="application/json")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as JSON with a code and a message."""
    try:
        return await handler(request)
    except MooncakeError as error:
        return _error(error.code, str(error), error.http_status)
    except web.HTTPException as error:
        return _error("http", f"{request.method} {request.path}: {error.reason}", error.status)


def _error(code: str, message: str, status: int) -> web.Response:
    body = msgspec.json.encode({"error": {"code": code, "message": message}})
    return web.Response(body=body, status=status, content_type="application/json")
