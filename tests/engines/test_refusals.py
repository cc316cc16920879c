"""What the HTTP interface refuses: a clear error, and the service stays up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from mooncaked.engines.reference import engine as engine_module
from tests.engines.serving import Http
from tests.engines.test_model import prompt_of

CHAT = [{"role": "user", "content": "on the in"}]
PROMPT = prompt_of(21)

BASE: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 2}
BAD: list[tuple[str, dict[str, Any] | bytes, int, str, str | None]] = [
    ("/v1/completions", b"{", 400, "invalid_request", None),
    ("/v1/completions", b"", 400, "invalid_request", None),
    ("/v1/completions", b"\xff\xfe", 400, "invalid_request", None),
    ("/v1/completions", b"[1, 2]", 400, "invalid_request", None),
    ("/v1/completions", b"[" * 100_000, 400, "invalid_request", None),
    ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400, "invalid_request", None),
    ("/v1/completions", {"model": "tiny"}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"model": "other"}, 404, "model_not_found", "model"),
    ("/v1/completions", BASE | {"max_tokens": "many"}, 400, "invalid_request", "max_tokens"),
    ("/v1/completions", BASE | {"max_tokens": 0}, 400, "invalid_request", "max_tokens"),
    ("/v1/completions", BASE | {"temperature": -1}, 400, "invalid_request", "temperature"),
    ("/v1/completions", BASE | {"top_p": 0}, 400, "invalid_request", "top_p"),
    ("/v1/completions", BASE | {"n": 2}, 400, "invalid_request", "n"),
    ("/v1/completions", BASE | {"logprobs": 3}, 400, "invalid_request", "logprobs"),
    ("/v1/completions", BASE | {"prompt": ""}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"prompt": []}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"prompt": ["a", "b"]}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"prompt": [1, 288]}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"prompt": [-1]}, 400, "invalid_request", "prompt"),
    ("/v1/completions", BASE | {"max_tokens": 10_000}, 400, "context_length_exceeded", None),
    ("/v1/completions", BASE | {"prompt": [5] * 600}, 400, "context_length_exceeded", None),
    ("/v1/completions", BASE | {"prompt": "the " * 100_000}, 400, "context_length_exceeded", None),
    (
        "/v1/completions",
        BASE | {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
        400,
        "invalid_request",
        "kv_transfer_params",
    ),
    (
        "/v1/completions",
        BASE | {"kv_transfer_params": {"do_remote_prefill": True, "first_token": 288}},
        400,
        "invalid_request",
        "kv_transfer_params",
    ),
    (
        "/v1/completions",
        BASE | {"kv_transfer_params": {"first_token": -1}},
        400,
        "invalid_request",
        "kv_transfer_params.first_token",
    ),
    ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "invalid_request", "messages"),
    ("/v1/chat/completions", {"model": "tiny", "messages": "hi"}, 400, "invalid_request", "messages"),
    (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "invalid_request",
        "messages[0].content[0]",
    ),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "invalid_request", None),
    ("/tokenize", {}, 400, "invalid_request", None),
    ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model_not_found", "model"),
    ("/v1/nothing", BASE, 404, "not_found", None),
    ("/v1/models", BASE, 405, "invalid_request", None),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), BAD)
async def test_bad_input_gets_a_clear_error_and_the_next_request_is_served(
    http: Http, path: str, body: dict[str, Any] | bytes, status: int, code: str, param: str | None
) -> None:
    got, answer = await http.post(path, body)
    error = answer["error"]
    assert (got, error["code"]) == (status, code), error
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
    assert len(error["message"]) < 500
    assert "Traceback" not in error["message"]
    assert (await http.complete("the"))["choices"]


async def test_a_body_of_100_mb_is_refused(http: Http) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * (1 << 20)

    for body in (b"x" * (100 << 20), endless()):
        try:
            async with http.session.post(http.url + "/v1/completions", data=body) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "body_too_large"
        except aiohttp.ClientConnectionError:
            # The server need not take the whole of it in; then this client may miss the answer.
            continue
    assert (await http.complete("the"))["choices"]


async def test_too_many_requests_are_refused_and_may_be_repeated(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "REQUESTS_MAX", 0)
    async with http.session.post(http.url + "/v1/completions", data=json.dumps(BASE)) as response:
        answer = await response.json()
        assert response.status == 503
        assert response.headers["Retry-After"]
    assert answer["error"]["code"] == "overloaded"


async def test_an_error_in_mid_stream_is_an_event(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(http.running.engine._model, "decode", fail)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "stream": True, "ignore_eos": True}
    async with http.session.post(http.url + "/v1/completions", data=json.dumps(body)) as response:
        assert response.status == 200
        text = await response.text()
    assert "event: error" in text
    assert "[DONE]" not in text
    status, answer = await http.post("/v1/completions", body | {"stream": False})
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (500, "internal", "server_error")


async def test_many_at_once(http: Http) -> None:
    prompts = [prompt_of(3 + i, seed=i) for i in range(30)]
    answers = await asyncio.gather(
        *(http.complete(p, 5, return_token_ids=True, ignore_eos=True) for p in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["token_ids"] == http.running.run(prompt, 5, ignore_eos=True).tokens
