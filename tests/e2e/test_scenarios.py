"""What a user must see of a whole cluster: etcd, 3 nodes, 2 prefill and 1 decode instance, a real model.

Each scenario heals the cluster first (`mooncakectl up` starts what is missing), so each can run alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.local import ROOT, Local, Reply, eventually, get_json, post

pytestmark = pytest.mark.timeout(400)

MODEL = "smollm2-135m-instruct"
ANSWER_TOKENS = 16
QUESTIONS = ("Name the parts of the system.", "What happens when a node is lost?")
PROSE = (ROOT / "docs" / "architecture.md").read_text()


def prose(words: int, *, title: str) -> str:
    """So many words of the project's own documentation; `title` makes the prompt one of its own."""
    return f"{title}\n\n" + " ".join(PROSE.split()[:words])


def ask(cluster: Local, text: str, question: str) -> Reply:
    return cluster.chat(prompt(text, question), max_tokens=ANSWER_TOKENS)


def prompt(text: str, question: str) -> str:
    return f"{text}\n\nQuestion: {question}"


def reused_share(reply: Reply) -> float:
    return reply.reused_tokens / reply.prompt_tokens


@contextmanager
def store_off(local: Local) -> Iterator[Callable[[str], str]]:
    """The same engine with the store switched off: what it answers to a question."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = local.process("prefill-1")["argv"]
    model = running[running.index("--model") + 1]
    command = [sys.executable, "-m", "mooncaked.engines.reference", "--model", model, "--model-name", MODEL]
    command += ["--role", "both", "--listen", address, "--store", "none", "--etcd", "none"]
    engine = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _healthy(address), 60, "the engine without a store serves")
        yield lambda question: answer_of(f"http://{address}", question)
    finally:
        engine.kill()
        engine.wait()


def answer_of(base: str, question: str) -> str:
    """What the OpenAI API at `base` answers at temperature 0."""
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    status, answer = post(f"{base}/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def _healthy(address: str) -> bool:
    try:
        get_json(f"http://{address}/v1/models")
    except OSError:
        return False
    return True


def test_second_question_about_a_long_text_reuses_it(healed: Local) -> None:
    text = prose(1750, title="A long text.")
    first, second = (ask(healed, text, question) for question in QUESTIONS)
    assert first.prompt_tokens >= 2000
    assert reused_share(second) >= 0.9
    assert second.ttft_ms * 5 < first.ttft_ms
    nodes = {name: healed.process(name)["node"] for name in (first.prefill, second.prefill, second.decode)}
    assert nodes[first.prefill] != nodes[second.decode], "computed on one node, decoded on another"
    with store_off(healed) as plain:
        for reply, question in zip((first, second), QUESTIONS, strict=True):
            assert reply.answer == plain(prompt(text, question)), "equal, token for token, to no store at all"


def test_killed_leader_is_replaced_and_the_prefix_is_still_found(healed: Local) -> None:
    text = prose(250, title="Before the leader dies.")
    ask(healed, text, QUESTIONS[0])
    old = healed.leader()
    os.kill(int(old["pid"]), signal.SIGKILL)
    killed_at = time.monotonic()
    reply = ask(healed, text, QUESTIONS[1])
    assert reply.ttft_ms < 5000
    assert reused_share(reply) > 0.5
    eventually(lambda: healed.leader()["pid"] != old["pid"], 5, "another candidate leads")
    assert time.monotonic() - killed_at < 30


def test_killed_node_with_the_only_copy_costs_a_recompute_and_nothing_else(healed: Local) -> None:
    text = prose(250, title="Before the node dies.")
    first = ask(healed, text, QUESTIONS[0])
    for name in {healed.process(first.prefill)["node"], healed.process(first.decode)["node"]}:
        healed.kill(name)
    reply = ask(healed, text, QUESTIONS[0])
    assert reply.answer == first.answer
    assert reply.reused_tokens == 0


def test_every_node_lost_still_answers(healed: Local) -> None:
    """Engines whose daemons are gone compute everything themselves, as long as one gateway lives."""
    first = ask(healed, prose(120, title="Before the stores die."), QUESTIONS[0])
    survivor = healed.process(first.prefill)["node"]
    for process in healed.processes():
        if process["part"] == "node" and process["name"] != survivor:
            os.kill(process["pid"], signal.SIGKILL)
    assert ask(healed, prose(120, title="After the stores died."), QUESTIONS[0]).answer


def test_etcd_restart_interrupts_nothing(healed: Local) -> None:
    text = prose(250, title="Before etcd restarts.")
    ask(healed, text, QUESTIONS[0])
    healed.kill("etcd")
    while_away = answer_of(healed.gateways()[0], prompt(text, QUESTIONS[1]))
    healed.up()
    after = ask(healed, text, QUESTIONS[1])
    assert while_away == after.answer
    assert reused_share(after) > 0.5
    names = {node["node_id"] for node in healed.json("node", "list")["nodes"]}
    assert names == {"node-1", "node-2", "node-3"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "invalid_request"),
        (b'{"model": "smollm2-135m-instruct", "messages": "hello"}', 400, "invalid_request"),
        (
            b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}',
            404,
            "model_not_found",
        ),
    ],
)
def test_bad_request_gets_a_clear_error(cluster: Local, body: bytes, status: int, code: str) -> None:
    got, answer = post(f"{cluster.gateways()[0]}/v1/chat/completions", body)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]


def test_request_over_the_context_length_is_refused(cluster: Local) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9000}]}
    status, answer = post(f"{cluster.gateways()[0]}/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_body_of_100_mb_is_refused_and_the_service_stays_up(healed: Local) -> None:
    host, port = healed.gateways()[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100000000\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert get_json(f"{healed.gateways()[0]}/v1/models")["data"]


def test_engine_refuses_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("no model at all")
    command = [sys.executable, "-m", "mooncaked.engines.reference", "--model", str(path), "--role", "both"]
    command += ["--listen", "127.0.0.1:0", "--store", "none", "--etcd", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "notes.gguf" in done.stderr
    assert "Traceback" not in done.stderr
