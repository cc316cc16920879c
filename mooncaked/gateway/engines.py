"""Talking to engine instances: tokenize, prefill, and the stream of a generation.

An instance that refuses a connection, breaks it, answers nonsense or says 429 or 5xx raises `EngineFailed`:
another one may do better. One that says that the request is wrong (any other 4xx) raises `InvalidRequest`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from mooncaked.errors import EngineFailed, InvalidRequest

CONNECT_S = 3.0
TOKENIZE_S = 60.0
ANSWER_BYTES_MAX = 64 << 20  # of an answer that is not a stream
EVENT_BYTES_MAX = 4 << 20  # of one event of a stream
_BUSY = (408, 429)  # the instance's own affair, not the request's fault
_DONE = b"[DONE]"

T = TypeVar("T")


class Target(msgspec.Struct, frozen=True):
    """An instance to call."""

    instance_id: str
    url: str


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of an engine's usage."""

    cached_tokens: int | None = None


class EngineUsage(msgspec.Struct, frozen=True):
    """An engine's usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Timing(msgspec.Struct, frozen=True):
    """Where an engine spent its time, by its own clock."""

    queue_ms: float | None = None
    load_ms: float | None = None
    prefill_ms: float | None = None
    store_ms: float | None = None


class KvParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of an answer."""

    node_id: str | None = None
    first_token: int | None = None
    finished: bool = False
    timing: Timing | None = None


class Choice(msgspec.Struct, frozen=True):
    """A choice of an answer or of a chunk."""

    text: str = ""
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True):
    """An answer, or a chunk of a stream."""

    choices: list[Choice] = []
    usage: EngineUsage | None = None
    kv_transfer_params: KvParams | None = None
    error: Any = None


class Tokens(msgspec.Struct, frozen=True):
    """What /tokenize answers."""

    tokens: list[int]
    max_model_len: int | None = None


_completion = msgspec.json.Decoder(Completion).decode
_tokens = msgspec.json.Decoder(Tokens).decode
_encode = msgspec.json.Encoder().encode
_HEADERS = {"Content-Type": "application/json"}


class Engines:
    """One session with all engines. `start` it on the loop that uses it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Make the session. Connections are kept open; their number is bounded by the gateway's own limit."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=_HEADERS,
            auto_decompress=False,
            read_bufsize=256 << 10,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    async def tokenize(self, target: Target, body: dict[str, Any]) -> Tokens:
        """The prompt's token ids, with the chat template applied to messages."""
        try:
            async with asyncio.timeout(TOKENIZE_S):
                return await self._call(target, "/tokenize", body, _tokens)
        except TimeoutError:
            cause = f"it did not tokenize within {TOKENIZE_S:.0f} s"
            raise EngineFailed(instance=target.instance_id, cause=cause) from None

    async def complete(self, target: Target, body: dict[str, Any]) -> Completion:
        """One completion in one piece."""
        return await self._call(target, "/v1/completions", body, _completion)

    @asynccontextmanager
    async def generate(self, target: Target, body: dict[str, Any]) -> AsyncIterator[Generation]:
        """A completion as a stream. Leaving the context ends the connection, and with it the engine's work,
        unless the stream is at its end."""
        async with self._post(target, "/v1/completions", body) as response:
            yield Generation(target, response)

    async def _call(
        self, target: Target, path: str, body: dict[str, Any], decoder: Callable[[bytes], T]
    ) -> T:
        async with self._post(target, path, body) as response:
            return _decode(target, decoder, await _read(target, response))

    @asynccontextmanager
    async def _post(
        self, target: Target, path: str, body: dict[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await self._send(target, target.url.rstrip("/") + path, _encode(body))
        try:
            if response.status != 200:
                await _raise_status(target, response)
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _send(self, target: Target, url: str, data: bytes) -> aiohttp.ClientResponse:
        """Send a request. An idle connection that the engine ended meanwhile is no failure: once more."""
        if self._session is None:
            raise EngineFailed(instance=target.instance_id, cause="this gateway is closing")
        try:
            try:
                return await self._session.post(url, data=data, allow_redirects=False)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                return await self._session.post(url, data=data, allow_redirects=False)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineFailed(instance=target.instance_id, cause=_cause(error)) from error


class Generation:
    """The events of one stream, in the portions in which they arrive."""

    def __init__(self, target: Target, response: aiohttp.ClientResponse) -> None:
        self._target = target
        self._content = response.content
        self._rest = b""
        self._done = False
        self._broken: EngineFailed | None = None

    async def next(self) -> list[Completion]:
        """The next chunks, at least one; an empty list at the proper end of the stream.

        Raises `EngineFailed` when the stream breaks, or carries an error."""
        while not self._done:
            if self._broken is not None:
                raise self._broken
            data = await _read_some(self._target, self._content)
            if not data:
                raise EngineFailed(instance=self._target.instance_id, cause="its stream broke off")
            chunks = self._cut(data)
            if chunks:
                return chunks
        return []

    async def finish(self) -> None:
        """Read what may follow the end, so that the connection can be used again."""
        while await _read_some(self._target, self._content):
            continue

    def _cut(self, data: bytes) -> list[Completion]:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise EngineFailed(instance=self._target.instance_id, cause="an event of its stream has no end")
        chunks = []
        for event in events:
            payload = event[5:].strip() if event.startswith(b"data:") else _payload(event)
            if payload == _DONE:
                self._done = True
                break
            if payload:
                try:
                    chunks.append(self._chunk(payload))
                except EngineFailed as error:  # what came before it is good, and goes out first
                    self._broken = error
                    break
        return chunks

    def _chunk(self, payload: bytes) -> Completion:
        chunk = _decode(self._target, _completion, payload)
        if chunk.error is not None:
            cause = f"it reported an error: {_message(chunk.error)}"
            raise EngineFailed(instance=self._target.instance_id, cause=cause)
        return chunk


def _payload(event: bytes) -> bytes:
    """The data of an event that has other lines as well."""
    lines = (line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def _decode(target: Target, decoder: Callable[[bytes], T], data: bytes) -> T:
    try:
        return decoder(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        cause = f"its answer cannot be read: {error}"
        raise EngineFailed(instance=target.instance_id, cause=cause) from error


async def _read_some(target: Target, content: aiohttp.StreamReader) -> bytes:
    """What has arrived, waiting for something; empty at the end. Raises `EngineFailed`."""
    try:
        return await content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise EngineFailed(instance=target.instance_id, cause=_cause(error)) from error


async def _read(target: Target, response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while part := await _read_some(target, response.content):
        data += part
        if len(data) > ANSWER_BYTES_MAX:
            cause = f"its answer is larger than {ANSWER_BYTES_MAX} bytes"
            raise EngineFailed(instance=target.instance_id, cause=cause)
    return bytes(data)


async def _raise_status(target: Target, response: aiohttp.ClientResponse) -> None:
    data = await _read(target, response)
    try:
        detail = _message(msgspec.json.decode(data).get("error"))
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        detail = data[:200].decode(errors="replace")
    if 400 <= response.status < 500 and response.status not in (*_BUSY, 404, 405):
        raise InvalidRequest(problem=detail or f"the engine refused it with status {response.status}")
    raise EngineFailed(instance=target.instance_id, cause=f"status {response.status}: {detail}")


def _message(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
