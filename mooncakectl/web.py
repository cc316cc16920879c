"""HTTP to gateways and nodes, with this project's errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from mooncaked.errors import MooncakeError, RemoteError, Unreachable, from_message

CONNECT_S = 3.0
ANSWER_S = 10.0


@asynccontextmanager
async def open_web(total_s: float | None = ANSWER_S) -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose requests take at most `total_s` seconds each."""
    limits = aiohttp.ClientTimeout(total=total_s, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        yield session


async def get_json(web: aiohttp.ClientSession, url: str, what: str) -> dict[str, Any]:
    """The JSON object at `url`; raises `Unreachable` or the error that `what` answered."""
    return await _request(web, "GET", url, what, None)


async def post_json(
    web: aiohttp.ClientSession,
    url: str,
    what: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Like `get_json`, with a request body."""
    return await _request(web, "POST", url, what, body, headers)


async def _request(
    web: aiohttp.ClientSession,
    method: str,
    url: str,
    what: str,
    body: Mapping[str, Any] | None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    async with translate(what, url), web.request(method, url, json=body, headers=headers) as response:
        text = await response.text()
        if response.status >= 400:
            raise answered_error(response.status, text, what)
        return _object(text, what)


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RemoteError(peer=what, code="malformed", message=f"no JSON object: {text[:200]!r}")
    return body


@asynccontextmanager
async def translate(what: str, url: str) -> AsyncIterator[None]:
    """Turn what aiohttp raises inside into `Unreachable`."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable(what=what, address=url, cause="no answer in time", remedy=_REMEDY) from error
    except (aiohttp.ClientError, OSError) as error:
        cause = str(error) or type(error).__name__
        raise Unreachable(what=what, address=url, cause=cause, remedy=_REMEDY) from error


_REMEDY = "Is it running? `mooncakectl status` shows what is."


def answered_error(status: int, text: str, what: str) -> MooncakeError:
    """The error in an answer, in the OpenAI API's shape or not."""
    try:
        error = json.loads(text)["error"]
        return from_message(str(error["code"]), str(error["message"]), what)
    except (ValueError, KeyError, TypeError):
        return RemoteError(peer=what, code=f"http_{status}", message=text.strip()[:300] or "(empty)")
