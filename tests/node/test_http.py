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
from mooncaked.api.http import NodeHttp, PoolAdmin
from mooncaked.api.protocol import Kind
from mooncaked.errors import AddressInUse, ConfigError, NoLeader, Refused


class Status(msgspec.Struct):
    blocks: int


class Served:
    """A listener whose answers the test decides."""

    def __init__(self, token: str | None = None) -> None:
        self.sizes: list[int] = []
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
            pool=PoolAdmin(show=lambda: Status(blocks=7), resize=self._resize, token=token),
        )

    def _status(self) -> Status:
        if self.fails:
            raise NoLeader(detail="none was elected")
        return Status(blocks=3)

    def _resize(self, size: int) -> Status:
        if size < 0:
            raise Refused(problem="no", remedy="")
        self.sizes.append(size)
        return Status(blocks=size)

    async def resize(self, body: object, **headers: str) -> tuple[int, dict[str, object]]:
        """Status code and JSON of a request to resize the pool."""
        code, _, text = await self.get("/v1/pool/resize", "POST", json=body, headers=headers)
        return code, json.loads(text)

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


async def test_the_pool_is_shown_and_resized(served: Served) -> None:
    assert json.loads((await served.get("/v1/pool"))[2]) == {"blocks": 7}
    assert await served.resize({"size_bytes": 5}) == (202, {"blocks": 5})
    assert served.sizes == [5]
    code, answer = await served.resize({"size_bytes": -5})
    assert (code, answer["error"]) == (409, {"code": "refused", "message": "Refused: no. "})
    for body in ({}, {"size_bytes": "5"}, [], {"size_bytes": 5, "more": 1}):
        assert (await served.resize(body))[0] == 400


async def test_who_may_resize() -> None:
    served = Served(token="s3cret")
    served.address = await served.http.start()  # type: ignore[attr-defined]
    for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        code, answer = await served.resize({"size_bytes": 5}, **wrong)
        assert (code, answer["error"]["code"]) == (401, "unauthenticated")  # type: ignore[index]
    assert (await served.resize({"size_bytes": 5}, Authorization="Bearer s3cret"))[0] == 202
    await served.http.close()


async def test_without_a_token_changes_come_from_this_machine_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiohttp.web.BaseRequest.remote", "10.0.0.9")
    code, answer = await served.resize({"size_bytes": 5})
    assert code == 401
    assert "from this machine only, not from 10.0.0.9" in answer["error"]["message"]  # type: ignore[index]
