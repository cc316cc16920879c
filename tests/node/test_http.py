"""The HTTP listener: probes, metrics, status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from mooncaked.api.counters import ApiCounters
from mooncaked.api.http import NodeHttp
from mooncaked.api.protocol import Kind
from mooncaked.errors import AddressInUse, ConfigError, NoLeader


class Status(msgspec.Struct):
    blocks: int


class Served:
    """A listener whose answers the test decides."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.live = True
        self.fails = False
        self.registry = CollectorRegistry()
        self.http = NodeHttp(
            "127.0.0.1:0",
            self.registry,
            ready=lambda: self.reasons,
            live=lambda: self.live,
            status=self._status,
        )

    def _status(self) -> Status:
        if self.fails:
            raise NoLeader(detail="none was elected")
        return Status(blocks=3)

    async def get(self, path: str, method: str = "GET", **options: object) -> tuple[int, str, str]:
        """Status code, content type and text."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://{self.address}{path}", **options) as reply,  # type: ignore[arg-type]
        ):
            return reply.status, reply.headers["Content-Type"], await reply.text()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    served.address = await served.http.start()  # type: ignore[attr-defined]
    yield served
    await served.http.close()


@pytest.mark.parametrize("path", ["/livez", "/healthz"])
async def test_liveness(served: Served, path: str) -> None:
    assert (await served.get(path))[::2] == (200, "ok\n")
    served.live = False
    assert (await served.get(path))[0] == 503


async def test_readiness_and_its_reasons(served: Served) -> None:
    assert (await served.get("/readyz"))[::2] == (200, "ok\n")
    served.reasons = ["starting: 3 %", "etcd is away"]
    assert (await served.get("/readyz"))[::2] == (503, "not ready\n")
    assert (await served.get("/readyz?verbose"))[::2] == (503, "not ready\nstarting: 3 %\netcd is away\n")


async def test_metrics_in_both_formats(served: Served) -> None:
    counters = ApiCounters(served.registry)
    counters.requests[Kind.PIN].inc(5)
    code, kind, text = await served.get("/metrics")
    assert (code, kind.split(";")[0]) == (200, "text/plain")
    assert 'mooncaked_requests_total{kind="pin"} 5.0' in text
    _, kind, text = await served.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_status(served: Served) -> None:
    code, kind, text = await served.get("/v1/status")
    assert (code, kind, json.loads(text)) == (200, "application/json", {"blocks": 3})


async def test_errors_are_json_with_a_code(served: Served) -> None:
    code, kind, text = await served.get("/nothing")
    assert (code, kind) == (404, "application/json")
    assert "GET /nothing" in json.loads(text)["error"]["message"]
    assert (await served.get("/livez", "POST"))[0] == 405
    served.fails = True
    code, _, text = await served.get("/v1/status")
    assert code == 503
    assert json.loads(text)["error"]["code"] == "no_leader"


async def test_rubbish_is_refused_and_the_others_served(served: Served) -> None:
    host, port = served.address.rsplit(":", 1)  # type: ignore[attr-defined]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x00\x01rubbish\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert (await served.get("/livez"))[0] == 200
    assert (await served.get("/livez", headers={"X": "y" * 100_000}))[0] == 400


async def test_a_port_in_use_is_a_clear_error(served: Served) -> None:
    other = NodeHttp(
        served.address,  # type: ignore[attr-defined]
        CollectorRegistry(),
        ready=list,
        live=lambda: True,
        status=dict,
    )
    with pytest.raises(AddressInUse, match=r"listen\.http"):
        await other.start()
    await other.close()


async def test_an_address_that_cannot_be_is_a_clear_error() -> None:
    http = NodeHttp("nowhere", CollectorRegistry(), ready=list, live=lambda: True, status=dict)
    with pytest.raises(ConfigError, match=r"listen\.http"):
        await http.start()
