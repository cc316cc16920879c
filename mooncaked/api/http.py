"""HTTP for probes, metrics and operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from mooncaked.api.listen import bind_tcp, bound_address
from mooncaked.errors import MooncakeError

log = logging.getLogger(__name__)

KEY = "listen.http"
_KEEPALIVE_S = 30.0
_CLOSE_S = 2.0


class NodeHttp:
    """Serves /livez, /healthz, /readyz (with ?verbose the reasons), /metrics and /v1/status."""

    def __init__(
        self,
        address: str,
        registry: CollectorRegistry,
        *,
        ready: Callable[[], list[str]],
        live: Callable[[], bool],
        status: Callable[[], Any],
    ) -> None:
        """`ready` gives the reasons why the node is not ready (none: it is), `live` whether its working loop
        works, `status` what /v1/status shows, as anything that msgspec can encode."""
        self._address = address
        self._registry = registry
        self._ready = ready
        self._live = live
        self._status = status
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
        return web.Response(body=msgspec.json.encode(self._status()), content_type="application/json")


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
