"""Answers in OpenAI's shape, and errors that our own clients can rebuild."""

from __future__ import annotations

import json
from typing import Any

from mooncaked.errors import AdmissionRefused, ModelNotFound, NoLeader, from_wire
from mooncaked.gateway.openai import parse_chat, parse_text
from mooncaked.gateway.shapes import Shape, Usage, error_event, error_headers, error_shape

CHAT = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}')
TEXT = parse_text(b'{"model": "m", "prompt": "x"}')
USAGE = Usage(10, 3, 8)


def data(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))


def test_a_whole_chat() -> None:
    answer = json.loads(Shape(CHAT, "abc", 7).whole("hi", "stop", USAGE))
    assert answer == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "hi"},
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 8},
        },
    }


def test_the_first_chunk_names_the_role_and_an_empty_last_one_has_an_empty_delta() -> None:
    shape = Shape(CHAT, "abc", 7)
    assert data(shape.chunk("a", None))["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert data(shape.chunk("b", None))["choices"][0]["delta"] == {"content": "b"}
    last = data(shape.chunk("", "stop"))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")


def test_text_chunks() -> None:
    chunk = data(Shape(TEXT, "abc", 7).chunk("a", None))
    assert (chunk["id"], chunk["object"]) == ("cmpl-abc", "text_completion")
    assert chunk["choices"] == [{"index": 0, "logprobs": None, "finish_reason": None, "text": "a"}]


def test_completions_default_to_16_tokens_and_chats_to_what_fits() -> None:
    assert TEXT.max_tokens == 16
    assert CHAT.max_tokens is None


def test_a_refusal_says_reason_prediction_limit_and_when() -> None:
    error = AdmissionRefused(reason="too late", cause="ttft", predicted_ms=900, limit_ms=500, retry_after_s=4)
    shaped = error_shape(error)["error"]
    assert shaped["type"] == "rate_limit_error"
    assert shaped["code"] == "admission_refused"
    assert (shaped["reason"], shaped["predicted_ms"], shaped["limit_ms"]) == ("ttft", 900, 500)
    assert error_headers(error) == {"Retry-After": "4"}


def test_errors_survive_the_wire() -> None:
    for error in (
        AdmissionRefused(reason="too late", cause="ttft", predicted_ms=900, limit_ms=500, retry_after_s=4),
        ModelNotFound(name="x", served="y", param="model"),
        NoLeader(detail="none"),
    ):
        shaped = json.loads(json.dumps(error_shape(error)))["error"]
        again = from_wire(shaped["code"], shaped["fields"], shaped["message"], "peer")
        assert type(again) is type(error)
        assert str(again) == str(error)


def test_an_error_in_a_stream_is_an_event_of_its_own() -> None:
    event = error_event(NoLeader(detail="none")).decode()
    first, second = event.rstrip("\n").split("\n")
    assert first == "event: error"
    assert json.loads(second.removeprefix("data: "))["error"]["code"] == "no_leader"
    assert event.endswith("\n\n")
