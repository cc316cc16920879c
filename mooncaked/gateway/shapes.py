"""OpenAI's answers: whole ones, chunks of a stream, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mooncaked.errors import AdmissionRefused, MooncakeError
from mooncaked.gateway.openai import Request

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
_NOTHING: Mapping[str, Any] = {}
RETRY_AFTER_S = 1  # for errors that pass by themselves and name no time


class Usage(msgspec.Struct, frozen=True):
    """What a request took, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int  # of the prompt

    def shape(self) -> dict[str, Any]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }


class Shape:
    """Shapes the answer to one request."""

    def __init__(self, request: Request, request_id: str, created_s: int) -> None:
        self._chat = request.chat
        self._include_usage = request.include_usage
        prefix, kind = ("chatcmpl-", "chat.completion") if request.chat else ("cmpl-", "text_completion")
        self._head = {
            "id": prefix + request_id,
            "object": kind,
            "created": created_s,
            "model": request.model,
        }
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if request.chat else {})
        self._fresh = True

    def chunk(self, text: str, finish_reason: str | None, more: Mapping[str, Any] = _NOTHING) -> bytes:
        """A piece of the answer, as one event of a stream; `more` are fields beside OpenAI's."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if not self._chat:
            choice["text"] = text
        elif self._fresh:
            choice["delta"] = {"role": "assistant", "content": text}
        else:
            choice["delta"] = {"content": text} if text else {}
        self._fresh = False
        return event(self._chunk_head | {"choices": [choice], **more})

    def last_chunks(self, usage: Usage) -> bytes:
        """What ends a stream."""
        if not self._include_usage:
            return DONE
        return event(self._chunk_head | {"choices": [], "usage": usage.shape()}) + DONE

    def whole(self, text: str, finish_reason: str, usage: Usage, more: Mapping[str, Any] = _NOTHING) -> bytes:
        """The answer in one piece; `more` are fields beside OpenAI's."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return _encode(self._head | {"choices": [choice], "usage": usage.shape(), **more})


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


def error_event(error: MooncakeError) -> bytes:
    """An error in the middle of a stream, where the status has been sent already."""
    return b"event: error\n" + event(error_shape(error))


def error_shape(error: MooncakeError) -> dict[str, Any]:
    """An error as OpenAI has it, and with the fields that our own clients rebuild it from."""
    fields = {
        k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in error.fields.items()
    }
    content: dict[str, Any] = {
        "message": str(error),
        "type": _type(error.http_status),
        "param": fields.pop("param", None),
        "code": error.code,
        "fields": fields,
    }
    if isinstance(error, AdmissionRefused):
        content["reason"] = fields.get("cause")
        content |= {name: fields.get(name) for name in ("predicted_ms", "limit_ms")}
    return {"error": content}


def error_headers(error: MooncakeError) -> dict[str, str]:
    """`Retry-After` for what may work later."""
    if error.http_status not in (429, 503):
        return {}
    seconds = error.fields.get("retry_after_s", RETRY_AFTER_S)
    return {"Retry-After": str(seconds)}


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 401:
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
