"""Whatever a client sends, it gets an answer in OpenAI's shape, and the service goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from mooncaked.gateway import http
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, pair, running

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running(body_max=64 << 10) as result:
        await result.add(*pair())
        yield result
        assert (await result.chat())[0] == 200, "the service stays up"
        assert result.reservations() == 0


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("chat/completions", b"{nope", None, "not valid JSON"),
        ("chat/completions", b"", None, "not valid JSON"),
        ("chat/completions", b"\xff\xfe", None, "not valid JSON"),
        ("chat/completions", b"[" * 20_000, None, "got `array`"),
        ("chat/completions", b"[]", None, "Expected `object`, got `array`"),
        ("chat/completions", {"messages": CHAT["messages"]}, "model", "missing"),
        ("chat/completions", CHAT | {"messages": []}, "messages", "empty"),
        ("chat/completions", CHAT | {"messages": "hi"}, "messages", "got `str`"),
        ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ("chat/completions", CHAT | {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
        (
            "chat/completions",
            CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "only text",
        ),
        ("chat/completions", CHAT | {"max_tokens": "many"}, "max_tokens", "got `str`"),
        ("chat/completions", CHAT | {"max_tokens": 0}, "max_tokens", ">= 1"),
        ("chat/completions", CHAT | {"max_tokens": 10**30}, "max_tokens", "<="),
        ("chat/completions", CHAT | {"temperature": 3}, "temperature", "<= 2"),
        ("chat/completions", CHAT | {"top_p": 0}, "top_p", "> 0"),
        ("chat/completions", CHAT | {"stop": ["a", ""]}, "stop", "empty"),
        ("chat/completions", CHAT | {"stop": ["a"] * 17}, "stop", "limit is 16"),
        ("chat/completions", CHAT | {"n": 2}, "n", "only 1"),
        ("chat/completions", CHAT | {"logprobs": True}, "logprobs", "not supported"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("chat/completions", CHAT | {"stream": "yes"}, "stream", "got `str`"),
        ("completions", TEXT | {"prompt": ["a", "b"]}, "prompt", "several prompts"),
        ("completions", TEXT | {"prompt": [1, "b"]}, "prompt", "several prompts"),
        ("completions", TEXT | {"prompt": []}, "prompt", "empty"),
        ("completions", TEXT | {"prompt": ""}, "prompt", "empty"),
        ("completions", TEXT | {"prompt": [-1]}, "prompt", "outside"),
        ("completions", TEXT | {"prompt": [2**40]}, "prompt", "outside"),
        ("completions", TEXT | {"logprobs": 5}, "logprobs", "not supported"),
        ("completions", TEXT | {"best_of": 3}, "best_of", "only 1"),
    ],
)
async def test_a_bad_request_is_a_400_that_names_the_parameter(
    gateway: Running, path: str, body: Any, param: str | None, says: str
) -> None:
    status, answer, _ = await gateway.post(f"/v1/{path}", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


async def test_what_asks_for_nothing_is_accepted(gateway: Running) -> None:
    idle = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0,
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"unknown": "fields are ignored"},
    }
    assert (await gateway.post("/v1/chat/completions", CHAT | idle))[0] == 200


async def test_parts_of_text_are_joined(gateway: Running) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    await gateway.post("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": parts}]})
    [asked] = [t for engine in gateway.engines for t in engine.tokenized]
    assert asked["messages"] == [{"role": "user", "content": "hello world"}]


async def test_over_the_context_length(gateway: Running) -> None:
    status, answer, _ = await gateway.post(
        "/v1/completions", TEXT | {"prompt": list(range(990)), "max_tokens": 20}
    )
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "1010" in answer["error"]["message"]
    assert "1000" in answer["error"]["message"]


async def test_a_body_over_the_limit_is_refused_by_its_length(gateway: Running) -> None:
    """100 MB are announced; the answer comes although next to nothing of it is ever sent."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 2)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"body_too_large"' in answer
    assert b"conductor.body_max" in answer
    writer.close()


async def test_a_body_of_100_mb_that_is_really_sent(gateway: Running) -> None:
    status, answer, _ = await gateway.post("/v1/chat/completions", b"x" * 100_000_000)
    assert status == 413
    assert answer["error"]["code"] == "body_too_large"


async def test_a_body_without_a_length_is_read_up_to_the_limit(gateway: Running) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 1 << 30:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    try:
        async with gateway.http.post(gateway.url + "/v1/completions", data=endless()) as response:
            assert response.status == 413
    except aiohttp.ClientError:
        pass  # it was cut off while it still sent
    assert sent < 1 << 28


async def test_expect_continue_is_answered_before_the_body(gateway: Running) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    for length, first_line in ((100_000_000, b"HTTP/1.1 413"), (10, b"HTTP/1.1 100")):
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = (
            "POST /v1/completions HTTP/1.1",
            "Host: x",
            "Expect: 100-continue",
            f"Content-Length: {length}",
        )
        head = "\r\n".join((*lines, "", ""))
        writer.write(head.encode())
        assert (await asyncio.wait_for(reader.readline(), 2)).startswith(first_line)
        writer.close()


async def test_a_body_that_never_arrives_is_given_up(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.2)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert (await asyncio.wait_for(reader.readline(), 3)).startswith(b"HTTP/1.1 504")
    writer.close()


async def test_a_client_that_does_not_read_is_given_up(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncaked.gateway.answers.WRITE_S", 0.2)
    for engine in gateway.engines:
        engine.context_tokens = 1_000_000
        gateway.view.instances = gateway.view.instances | {
            engine.instance_id: engine.record(kv_capacity_tokens=0)
        }
    gateway.view.tell()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 60000, "stream": true}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    await asyncio.wait_for(reader.readline(), 5)

    async def ended() -> bool:
        return gateway.candidate.gateway.in_flight == 0

    await eventually(ended, 10)
    writer.close()


async def test_too_many_requests_at_once(gateway: Running) -> None:
    gateway.candidate.gateway.in_flight = http.IN_FLIGHT_MAX
    status, answer, headers = await gateway.chat()
    gateway.candidate.gateway.in_flight = 0
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert headers["Retry-After"] == "1"


async def test_unknown_routes_and_methods(gateway: Running) -> None:
    status, answer, _ = await gateway.post("/v1/embeddings", {})
    assert (status, answer["error"]["code"]) == (404, "not_found")
    async with gateway.http.get(gateway.url + "/v1/completions") as response:
        assert response.status == 405
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_bug_is_a_500_and_the_next_request_works(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_args: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(gateway.candidate.conductor, "schedule", explode)
        status, answer, _ = await gateway.chat()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" not in answer["error"]["message"]
