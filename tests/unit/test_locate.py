"""Asking the leader where blocks are: a good answer, and everything else as nothing known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mooncaked import locate
from mooncaked.locate import Locator

TEXT, BINARY = b"key", bytes(range(16))


@asynccontextmanager
async def leader(answer: Callable[[dict[str, Any]], web.Response]) -> AsyncIterator[Locator]:
    """A locator, and a leader that answers as `answer` says."""

    async def handle(request: web.Request) -> web.Response:
        return answer(await request.json())

    app = web.Application()
    app.router.add_post("/v1/locate", handle)
    async with TestServer(app) as server:
        locator = Locator(lambda: str(server.make_url("")))
        try:
            yield locator
        finally:
            await locator.close()


async def test_the_answer_names_nodes_by_key() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> web.Response:
        asked.append(body)
        held = [{"node_id": "n1", "tier": "dram", "size": 5}, {"node_id": "n2", "tier": "dram", "size": 5}]
        return web.Response(body=msgspec.json.encode({"0x" + BINARY.hex(): held, "key": []}))

    async with leader(answer) as locator:
        assert await locator.locate("ns", [TEXT, BINARY]) == {TEXT: [], BINARY: ["n1", "n2"]}
    assert asked == [{"namespace": "ns", "keys": ["key", "0x" + BINARY.hex()]}]


@pytest.mark.parametrize(
    "reply",
    [
        lambda: web.Response(status=503),
        lambda: web.Response(text="no json"),
        lambda: web.Response(text='{"key": ["n1"]}'),
        lambda: web.Response(text='{"0xzz": []}'),
        lambda: web.Response(body=b'{"key": "' + b"x" * 100_000 + b'"}'),
    ],
)
async def test_a_bad_answer_is_nothing_known(
    reply: Callable[[], web.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "ANSWER_BYTES_MAX", 50_000)
    async with leader(lambda _: reply()) as locator:
        assert await locator.locate("ns", [TEXT]) == {}


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9", "nonsense", "http://[::1"])
async def test_a_leader_that_is_not_there_is_nothing_known(url: str | None) -> None:
    locator = Locator(lambda: url)
    assert await locator.locate("ns", [TEXT]) == {}
    await locator.close()
