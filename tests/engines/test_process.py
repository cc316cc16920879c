"""The program as it is started and stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from mooncaked.clock import SystemClock
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.cluster.keys import instance_key
from mooncaked.engines.reference.__main__ import main
from mooncaked.engines.reference.options import chunk_for, parse
from mooncaked.errors import ConfigError
from mooncaked.types import InstanceRecord, Role
from tests.engines.test_model import prompt_of

START_S = 60.0


class Process:
    """One instance. `output` is what it has written so far."""

    def __init__(self, model: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "mooncaked.engines.reference", "--model", str(model)]
        self.process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JOURNAL_STREAM": ""},
        )
        self.output = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.output += line
                self._news.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Until a line matches."""
        deadline = time.monotonic() + START_S
        with self._news:
            while not (found := re.search(pattern, self.output)):
                left = deadline - time.monotonic()
                assert left > 0, self.output
                assert self.process.poll() is None or self._reader.is_alive(), self.output
                self._news.wait(min(left, 0.5))
            return found

    def url(self) -> str:
        return self.wait_for(r"ready url=(\S+)").group(1)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def launch(tiny_gguf: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(*arguments: str, model: Path = tiny_gguf) -> Process:
        processes.append(Process(model, *arguments))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()


async def test_it_serves_registers_finishes_and_leaves(
    launch: Callable[..., Process], etcd_endpoint: str, etcd_prefix: str, etcd_session: EtcdSession
) -> None:
    cluster = ["--etcd", etcd_endpoint, "--prefix", etcd_prefix, "--instance-id", "decode-1"]
    process = launch(*cluster, "--role", "decode", "--model-name", "tiny", "--threads", "1")
    url = await asyncio.to_thread(process.url)
    record = await _record(etcd_session, instance_key(etcd_prefix, "decode-1"), present=True)
    assert record is not None
    assert (record.url, record.role, record.model) == (url, Role.DECODE, "tiny")
    assert (record.engine, record.node_id, record.block_tokens) == ("reference", None, 32)
    assert record.context_tokens == 512
    assert record.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert record.pid == process.process.pid
    async with aiohttp.ClientSession() as session:
        body = {"model": "tiny", "prompt": prompt_of(9), "max_tokens": 400, "ignore_eos": True}
        asked = asyncio.create_task(_complete(session, url, body))
        await _until_running(session, url)
        process.process.send_signal(signal.SIGTERM)
        answer = await asked  # what runs is finished
        assert answer["usage"]["completion_tokens"] == 400
    assert await asyncio.to_thread(process.process.wait, 30) == 0
    await _record(etcd_session, instance_key(etcd_prefix, "decode-1"), present=False)
    assert "Traceback" not in process.output


async def _complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(f"{url}/v1/completions", json=body) as response:
        return await response.json()


async def _until_running(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/health") as response:
                if (await response.json())["requests"]:
                    return


async def _record(session: EtcdSession, key: str, *, present: bool) -> InstanceRecord | None:
    """The record, once it is there (or gone)."""
    async with asyncio.timeout(START_S):
        while ((found := await session.get(key)) is not None) != present:
            await SystemClock().sleep(0.05)
    return None if found is None else msgspec.json.decode(found.value, type=InstanceRecord)


def test_a_file_that_is_no_model_ends_it_with_one_line(
    launch: Callable[..., Process], tmp_path: Path
) -> None:
    text = tmp_path / "readme.txt"
    text.write_text("no model")
    process = launch(model=text)
    assert process.process.wait(START_S) == 3
    process.kill()
    assert process.output.splitlines()[-1].startswith(f"error: {text} cannot be served as a model")
    assert "Traceback" not in process.output


# --- the command line, in this process ---------------------------------------------------------------


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the last line on standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        code = main(arguments)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return code, capsys.readouterr().err.splitlines()[-1]


def test_a_port_in_use_is_known_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, line = run_main(capsys, "--model", str(tmp_path / "none"), "--listen", address)
    assert code == 3
    assert line.startswith(f"error: Cannot listen on {address}: another process uses it")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "nonsense"], "--listen: 'nonsense' is no host:port"),
        (["--listen", "203.0.113.7:0"], "--listen: cannot listen on 203.0.113.7:0"),
        (["--threads", "-1"], "--threads: -1 is too small"),
        (["--block-tokens", "0"], "--block-tokens: 0 is too small"),
        (["--kv-memory", "1KiB"], "--kv-memory: it holds 0 blocks"),
        (["--device", "cuda:7"], "--device: cuda:7 cannot be used"),
        (["--store-token-file", "/nonexistent"], "--store-token-file: /nonexistent cannot be read"),
        (["--etcd", "127.0.0.1:1", "--etcd-key-file", "x"], "etcd"),
    ],
)
def test_wrong_options(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    store = ["--store", str(tmp_path / "sock")] if "--store-token-file" in arguments else []
    code, line = run_main(capsys, "--model", str(tiny_gguf), "--listen", "127.0.0.1:0", *store, *arguments)
    assert code == 3, line
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments", [[], ["--model", "x", "--kv-memory", "5"], ["--model", "x", "--role", "boss"]]
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_defaults() -> None:
    options = parse(["--model", "/models/Llama-1B.Q4_0.gguf"], "host")
    assert (options.model_name, options.role, options.instance_id) == (
        "Llama-1B.Q4_0",
        Role.BOTH,
        "host-8000",
    )
    assert (options.store, options.etcd, options.block_tokens) == (None, None, 32)
    given = parse(["--model", "m", "--etcd", "a:1,b:2", "--lease-ttl", "5s", "--store", "/run/s"], "host")
    assert given.etcd is not None
    assert (given.etcd.endpoints, given.etcd.lease_ttl) == (["a:1", "b:2"], 5.0)
    with pytest.raises(ConfigError):
        parse(["--model", "m", "--listen", "8000"], "host")


@pytest.mark.parametrize(("block", "chunk"), [(16, 64), (32, 64), (64, 64), (128, 128), (48, 48), (20, 60)])
def test_chunks_are_whole_blocks(block: int, chunk: int) -> None:
    assert chunk_for(block) == chunk
