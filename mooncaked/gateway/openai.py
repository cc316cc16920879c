"""OpenAI's requests, checked. What this gateway cannot do is refused, never silently left out."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncaked.errors import InvalidRequest

STOP_MAX = 16
TOKEN_ID_MAX = 2**32 - 1

Fraction = Annotated[float, Meta(gt=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class StreamOptions(msgspec.Struct, frozen=True):
    """How to stream."""

    include_usage: bool | None = None


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # what follows is refused unless it asks for nothing
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[Message]
    max_completion_tokens: Count | None = None


class TextBody(_Common, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has passed the checks. Either `messages` or `prompt` is there."""

    model: str
    messages: list[dict[str, str]] | None = None
    prompt: str | list[int] | None = None
    max_tokens: int | None  # None: as many as the context has room for
    stream: bool
    include_usage: bool
    sampling: dict[str, Any]  # as engines take it

    @property
    def chat(self) -> bool:
        """Whether the answer is a chat message."""
        return self.messages is not None


_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
_TEXT_TOKENS_DEFAULT = 16  # OpenAI's, for /v1/completions
_decode_chat = msgspec.json.Decoder(ChatBody).decode
_decode_text = msgspec.json.Decoder(TextBody).decode
_WHERE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def invalid(problem: str, param: str | None = None) -> InvalidRequest:
    """What is wrong with a request, and with which of its parameters."""
    return InvalidRequest(problem=problem, param=param)


def parse_chat(body: bytes) -> Request:
    """Read and check a chat request; raises `InvalidRequest`."""
    parsed = decode(_decode_chat, body)
    messages = plain_messages(parsed.messages)
    limit = parsed.max_completion_tokens or parsed.max_tokens
    return _request(parsed, limit, messages=messages)


def parse_text(body: bytes) -> Request:
    """Read and check a completion request; raises `InvalidRequest`."""
    parsed = decode(_decode_text, body)
    return _request(parsed, parsed.max_tokens or _TEXT_TOKENS_DEFAULT, prompt=check_prompt(parsed.prompt))


def decode(decoder: Any, body: bytes) -> Any:
    """`decoder(body)`, with everything that can be wrong with JSON as an `InvalidRequest`."""
    try:
        return decoder(body)
    except msgspec.ValidationError as error:
        text = str(error)
        where, missing = _WHERE.search(text), _MISSING.search(text)
        path = where.group(1) if where else ""
        param = ".".join(filter(None, (path, missing.group(1) if missing else ""))) or None
        problem = _WHERE.sub("", text)
        raise invalid(f"{param}: {problem}" if param else problem, param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("The request body is nested too deeply") from error


def check_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """One text or one list of token ids; a list that holds one of these is that one."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) != len(prompt):
        raise invalid("several prompts in one request are not supported: send one request for each", "prompt")
    if ids and not (min(ids) >= 0 and max(ids) <= TOKEN_ID_MAX):
        raise invalid(f"prompt has a token id outside 0 to {TOKEN_ID_MAX}", "prompt")
    return ids


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages with their content as one text, as engines take them; raises `InvalidRequest`."""
    if not messages:
        raise invalid("messages is empty: give at least one", "messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def _request(
    body: _Common,
    max_tokens: int | None,
    *,
    messages: list[dict[str, str]] | None = None,
    prompt: str | list[int] | None = None,
) -> Request:
    _refuse_unsupported(body)
    return Request(
        model=body.model,
        messages=messages,
        prompt=prompt,
        max_tokens=max_tokens,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        sampling=_sampling(body),
    )


def _sampling(body: _Common) -> dict[str, Any]:
    sampling = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if isinstance(stop := sampling.get("stop"), list) and len(stop) > STOP_MAX:
        raise invalid(f"stop has {len(stop)} texts, the limit is {STOP_MAX}", "stop")
    if "" in (stop if isinstance(stop, list) else [stop]):
        raise invalid("stop holds an empty text", "stop")
    return sampling


def _refuse_unsupported(body: _Common) -> None:
    asked = {
        "n": body.n not in (None, 1),
        "best_of": body.best_of not in (None, 1),
        "logprobs": body.logprobs not in (None, False),
        "top_logprobs": bool(body.top_logprobs),
        "presence_penalty": bool(body.presence_penalty),
        "frequency_penalty": bool(body.frequency_penalty),
        "logit_bias": bool(body.logit_bias),
        "echo": bool(body.echo),
        "suffix": bool(body.suffix),
        "tools": bool(body.tools),
        "functions": bool(body.functions),
        "response_format": (body.response_format or {}).get("type", "text") != "text",
    }
    for name, is_asked in asked.items():
        if is_asked:
            only = "only 1 is" if name in ("n", "best_of") else "it is not"
            raise invalid(f"{name}: {only} supported here; leave it out", name)


def _message(position: int, message: Message) -> dict[str, str]:
    where = f"messages[{position}]"
    if not message.role:
        raise invalid(f"{where}.role is empty", f"{where}.role")
    if message.tool_calls:
        raise invalid("tool calls are not supported here", f"{where}.tool_calls")
    content = message.content
    if content is None:
        raise invalid(f"{where}.content is missing", f"{where}.content")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    result = {"role": message.role, "content": content}
    return result | {"name": message.name} if message.name else result


def _part(where: str, part: Part) -> str:
    if part.type != "text" or part.text is None:
        raise invalid(f"{where}: a part of type {part.type} is not supported here, only text is", where)
    return part.text
