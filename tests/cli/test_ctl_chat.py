"""`mooncakectl chat`: the question that is asked, the answer that is shown, and all the ways to fail."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from mooncakectl.ask import Answer
from mooncakectl.commands.chat import footer
from mooncaked.cluster import keys
from tests.cli.conftest import Ctl


def test_the_answer_goes_to_stdout_and_what_it_took_to_stderr(cluster: Ctl) -> None:
    assert cluster("chat", "hello") == 0
    assert cluster.out == "Hello\n"
    assert "prompt 100 tokens, 96 reused (96 %)" in cluster.err
    assert "prefill prefill-1, decode decode-1" in cluster.err


def test_the_request_is_what_was_typed(cluster: Ctl, tmp_path: Path) -> None:
    text = tmp_path / "text.md"
    text.write_text("A long text.\n")
    options = ("--system", "Be brief.", "--max-tokens", "7", "--seed", "3", "--temperature", "0.5")
    assert cluster("chat", "What?", "--file", str(text), *options) == 0
    (request,) = cluster.web.chats
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A long text.\n\nWhat?"},
    ]
    sampling = {name: request[name] for name in ("model", "max_tokens", "seed", "temperature", "stream")}
    assert sampling == {"model": "tiny", "max_tokens": 7, "seed": 3, "temperature": 0.5, "stream": True}


def test_json_has_everything(cluster: Ctl) -> None:
    body = cluster.json("chat", "hello", "--model", "tiny")
    assert body["schema"] == "mooncake.chat/1"
    assert (body["answer"], body["finish_reason"], body["answer_tokens"]) == ("Hello", "stop", 2)
    assert (body["prompt_tokens"], body["reused_tokens"]) == (100, 96)
    assert (body["prefill"], body["decode"], body["request_id"]) == ("prefill-1", "decode-1", "r-1")
    assert 0 < body["ttft_ms"] <= body["total_ms"]


def test_a_gateway_that_is_away_is_passed_over(cluster: Ctl) -> None:
    dead = cluster.candidate("node-0", "http://127.0.0.1:1")
    ahead = keys.candidate_key(cluster.prefix, 1)
    behind = keys.candidate_key(cluster.prefix, 2)
    cluster.put(ahead, dead)
    cluster.put(behind, cluster.candidate("node-1", cluster.web.url))
    assert cluster("chat", "hello") == 0
    assert cluster.out == "Hello\n"


def test_no_gateway_at_all(ctl: Ctl) -> None:
    assert ctl("chat", "hello") == 6
    assert ctl.err.startswith("error: No conductor leads at the moment")
    assert ctl("chat", "hello", "--gateway", "http://127.0.0.1:1") == 5
    assert "Cannot reach the gateway at http://127.0.0.1:1" in ctl.err


def test_no_model(cluster: Ctl) -> None:
    cluster.web.models = []
    assert cluster("chat", "hello") == 6
    assert "none is registered" in cluster.err


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (429, "admission_refused", 6),
        (400, "context_length_exceeded", 2),
        (404, "not_found", 4),
        (503, "no_instance", 6),
        (502, "unreachable", 5),
        (500, "something_new", 1),
    ],
)
def test_the_gateways_error_is_told_and_decides_the_exit_code(
    cluster: Ctl, status: int, code: str, exit_code: int
) -> None:
    cluster.web.failure = (status, {"error": {"message": "What happened.", "type": "x", "code": code}})
    assert cluster("chat", "hello", "--model", "tiny") == exit_code
    assert "What happened." in cluster.err
    assert cluster.err.count("\n") == 1


def test_an_answer_that_is_no_api_answer(cluster: Ctl) -> None:
    cluster.web.failure = (418, {"detail": "teapot"})
    assert cluster("chat", "hello", "--model", "tiny") == 1
    assert "http_418" in cluster.err


def test_an_answer_that_breaks_off_is_an_error_after_the_text_so_far(cluster: Ctl) -> None:
    cluster.web.broken_after = 1
    assert cluster("chat", "hello") == 5
    assert cluster.out == "Hel"
    assert "broke during the answer" in cluster.err


def test_an_error_event_in_the_stream(cluster: Ctl) -> None:
    cluster.web.error_event = {"code": "no_instance", "message": "All engines went away."}
    assert cluster("chat", "hello") == 6
    assert "error: All engines went away." in cluster.err


def test_a_file_that_cannot_be_read(cluster: Ctl, tmp_path: Path) -> None:
    assert cluster("chat", "q", "--file", str(tmp_path / "missing")) == 4
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert cluster("chat", "q", "--file", str(binary)) == 2


def test_without_a_question_there_must_be_a_terminal(cluster: Ctl) -> None:
    assert cluster("chat") == 2
    assert "chat needs a question" in cluster.err


class Typed(io.StringIO):
    """Standard input as if from a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_carries_what_was_said(cluster: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Typed("first\n\nsecond\n"))
    assert cluster("chat") == 0
    assert [len(request["messages"]) for request in cluster.web.chats] == [1, 3]
    assert cluster.web.chats[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "second"},
    ]


def test_a_failed_turn_of_a_conversation_is_told_and_forgotten(
    cluster: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Typed("first\n"))
    cluster.web.failure = (429, {"error": {"message": "Busy.", "code": "admission_refused"}})
    assert cluster("chat") == 0
    assert "error: Busy." in cluster.err


def test_the_footer_of_a_gateway_that_tells_nothing() -> None:
    assert footer(Answer(model="m", finish_reason="length")) == (
        "[TTFT - | prompt - tokens, - reused (-) | answer - tokens | prefill -, decode - | "
        "cut off at --max-tokens]"
    )
