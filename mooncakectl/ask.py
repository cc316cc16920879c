"""Ask a gateway a question and follow its answer as it streams."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from mooncakectl.web import answered_error, get_json, translate
from mooncaked.errors import ConnectionLost, MooncakeError, NoInstance, NoLeader, Unreachable, from_message

SCHEMA = "mooncake.chat/1"
_LINE_BYTES_MAX = 1 << 20


class Answer(msgspec.Struct, kw_only=True):
    """What came back, and what it took. A count or time is None where the gateway does not tell."""

    model: str
    answer: str = ""
    request_id: str | None = None
    gateway: str | None = None
    prefill: str | None = None  # instance that computed the prompt
    decode: str | None = None  # instance that generated the answer
    prompt_tokens: int | None = None
    reused_tokens: int | None = None  # of the prompt, found in the store
    answer_tokens: int | None = None
    finish_reason: str | None = None
    ttft_ms: float | None = None  # until the first text
    total_ms: float | None = None


async def first_model(web: aiohttp.ClientSession, gateways: Sequence[str]) -> str:
    """The name of the first model that is served; tries the gateways in turn."""
    unreachable: MooncakeError | None = None
    for gateway in gateways:
        try:
            models = (await get_json(web, f"{gateway}/v1/models", "the gateway")).get("data", [])
        except Unreachable as error:
            unreachable = error
            continue
        if models:
            return str(models[0]["id"])
        raise NoInstance(model="(any)", detail="none is registered")
    raise unreachable or NoLeader(detail="no conductor is registered in etcd")


async def ask(
    web: aiohttp.ClientSession,
    gateways: Sequence[str],
    body: Mapping[str, Any],
    on_text: Callable[[str], None],
    now: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Post the chat request `body` to the first gateway that can be reached; `on_text` gets each piece.

    Raises the error that the gateway answered, `Unreachable` when none can be reached, `ConnectionLost` when
    the answer breaks off."""
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    unreachable: MooncakeError | None = None
    for gateway in gateways:
        try:
            return await _ask_one(web, gateway, request, on_text, now)
        except Unreachable as error:
            unreachable = error  # it never saw the request: the next one may have it
    raise unreachable or NoLeader(detail="no conductor is registered in etcd")


async def _ask_one(
    web: aiohttp.ClientSession,
    gateway: str,
    request: Mapping[str, Any],
    on_text: Callable[[str], None],
    now: Callable[[], float],
) -> Answer:
    url = f"{gateway}/v1/chat/completions"
    result = Answer(model=str(request["model"]), gateway=gateway)
    began = now()
    async with translate("the gateway", url):
        response = await web.post(url, json=request)
    async with response:
        if response.status >= 400:
            raise answered_error(response.status, await response.text(), "the gateway")
        _read_headers(result, response.headers)
        pieces: list[str] = []
        async for chunk in _events(response, url):
            _read_usage(result, chunk.get("usage"))
            for choice in chunk.get("choices", []):
                text = choice.get("delta", {}).get("content") or ""
                if text:
                    result.ttft_ms = result.ttft_ms if pieces else (now() - began) * 1000
                    pieces.append(text)
                    on_text(text)
                result.finish_reason = choice.get("finish_reason") or result.finish_reason
    result.answer = "".join(pieces)
    result.total_ms = (now() - began) * 1000
    return result


async def _events(response: aiohttp.ClientResponse, url: str) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to its [DONE]."""
    buffer = b""
    try:
        async for data in response.content.iter_any():
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                yield _event(payload)
            if len(buffer) > _LINE_BYTES_MAX:
                break
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        cause = str(error) or type(error).__name__
        raise ConnectionLost(what=f"the gateway at {url}", operation="the answer", cause=cause) from error
    raise ConnectionLost(what=f"the gateway at {url}", operation="the answer", cause="it ended too early")


def _event(payload: bytes) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        cause = f"broken event {payload[:80]!r}"
        raise ConnectionLost(what="the gateway", operation="the answer", cause=cause)
    if isinstance(error := event.get("error"), dict):
        raise from_message(str(error.get("code")), str(error.get("message")), "the gateway")
    return event


def _read_headers(result: Answer, headers: Mapping[str, str]) -> None:
    result.request_id = headers.get("X-Mooncake-Request-Id")
    result.prefill = headers.get("X-Mooncake-Prefill")
    result.decode = headers.get("X-Mooncake-Decode")
    result.reused_tokens = _number(headers.get("X-Mooncake-Reused-Tokens"))
    result.prompt_tokens = _number(headers.get("X-Mooncake-Prompt-Tokens"))


def _read_usage(result: Answer, usage: object) -> None:
    if not isinstance(usage, dict):
        return
    result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
    result.answer_tokens = usage.get("completion_tokens", result.answer_tokens)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        result.reused_tokens = details.get("cached_tokens", result.reused_tokens)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
