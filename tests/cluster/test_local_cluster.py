"""`mooncakectl up` brings a whole cluster up: real processes and a tiny model, from the command line only."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncaked.keys import chain_keys, show_key
from tests.engines.tiny_model import write_hf

pytestmark = pytest.mark.timeout(300)

TEXT = "The cache keeps what was read before, so that nobody has to read it again. " * 8


class Local:
    """The cluster in `directory`, as a user meets it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_hf(directory / "tiny", max_position_embeddings=2048)
        self.base_port = random.Random(os.getpid()).randrange(20_000, 30_000, 400)

    def ctl(self, *arguments: str, code: int = 0) -> str:
        """Run `mooncakectl`, expect the exit code, and return what it printed."""
        environment = {**os.environ, "MOONCAKE_LOCAL": str(self.directory / "local")}
        environment.pop("MOONCAKE_ETCD", None)
        command = [sys.executable, "-m", "mooncakectl", *arguments]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ctl(*arguments, "-o", "json"))

    def up(self) -> str:
        options = ("--base-port", str(self.base_port), "--pool", "64MiB", "--threads", "1")
        return self.ctl("up", "--model", str(self.model), *options)

    def chat(self, question: str) -> Any:
        return self.json("chat", f"{TEXT}\n{question}", "--max-tokens", "8")

    def process(self, name: str) -> Any:
        state = json.loads((self.directory / "local" / "cluster.json").read_text())
        return next(process for process in state["processes"] if process["name"] == name)


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    directory = Path(tempfile.mkdtemp(prefix="mooncake-test-"))
    local = Local(directory)
    try:
        local.up()
        yield local
    finally:
        local.ctl("down", "--purge")
        shutil.rmtree(directory)


def test_everything_is_there_and_well(local: Local) -> None:
    status = local.json("status")
    assert (status["healthy"], status["problems"]) == (True, [])
    assert [node["node_id"] for node in status["nodes"]] == ["node-1", "node-2", "node-3"]
    roles = {instance["instance_id"]: instance["role"] for instance in status["instances"]}
    assert roles == {"prefill-1": "prefill", "prefill-2": "prefill", "decode-1": "decode"}
    assert len(status["candidates"]) == 3


def test_a_second_question_about_a_text_reuses_it_across_nodes(local: Local) -> None:
    first, second = local.chat("What is kept?"), local.chat("What is read?")
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] / second["prompt_tokens"] > 0.8
    assert (first["decode"], second["decode"]) == ("decode-1", "decode-1")
    assert local.process(first["prefill"])["node"] != local.process("decode-1")["node"]
    assert local.json("top", "--once")["totals"]["blocks"] > 0


def test_a_block_is_located_where_it_was_computed_and_where_it_was_used(local: Local) -> None:
    question = f"{TEXT}\nWhere is it?"
    answer = local.json("chat", question, "--max-tokens", "4")
    instance = local.json("instance", "show", answer["prefill"])["instance"]
    tokens = tokenize(instance["url"], question)
    root = chain_keys(instance["namespace"], tokens, instance["block_tokens"])[0]
    replicas = local.json("block", "locate", show_key(root))["replicas"]
    used = {local.process(answer[stage])["node"] for stage in ("prefill", "decode")}
    assert used <= {replica["node_id"] for replica in replicas}
    assert all(replica["size_bytes"] > 0 for replica in replicas)
    local.ctl("block", "locate", "0x" + "00" * 16, code=4)


def tokenize(url: str, question: str) -> list[int]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/tokenize", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def test_the_cluster_answers_while_etcd_is_away(local: Local) -> None:
    os.kill(local.process("etcd")["pid"], signal.SIGKILL)
    assert local.chat("Who is there?")["finish_reason"]
    local.ctl("status", code=5)
    local.up()
    assert local.json("status")["healthy"]


def test_what_was_killed_is_revived_by_up_and_the_rest_is_left_alone(local: Local) -> None:
    before = {name: local.process(name)["pid"] for name in ("etcd", "node-1", "node-2", "decode-1")}
    os.kill(before["node-1"], signal.SIGKILL)
    assert "Ready after" in local.up()
    after = {name: local.process(name)["pid"] for name in before}
    assert {name for name in before if before[name] != after[name]} == {"node-1"}
    assert local.chat("Is it back?")["finish_reason"]
    assert local.json("status")["healthy"]
