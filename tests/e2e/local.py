"""A local cluster for the scenarios: `mooncakectl` as a user runs it, and the means to hurt its processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
UP_S = 300.0
ASK_S = 300.0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What `mooncakectl chat -o json` says of one answer."""

    answer: str
    ttft_ms: float
    prompt_tokens: int
    reused_tokens: int
    prefill: str
    decode: str


class Local:
    """One cluster in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        rng = random.Random(os.getpid() ^ time.monotonic_ns())
        self.base_port = rng.randrange(18_400, 31_000, 400)
        self.environment = {**os.environ, "MOONCAKE_LOCAL": str(directory)}

    def ctl(
        self, *arguments: str, check: bool = True, timeout_s: float = ASK_S
    ) -> subprocess.CompletedProcess[str]:
        """Run `mooncakectl`; with `check`, an exit code other than 0 fails the test with the output."""
        command = [sys.executable, "-m", "mooncakectl", *arguments]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"mooncakectl {arguments} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done

    def json(self, *arguments: str) -> Any:
        """The JSON that a command prints."""
        return json.loads(self.ctl(*arguments, "-o", "json").stdout)

    def up(self) -> None:
        """Start the cluster, or whatever of it is missing."""
        self.ctl("up", "--base-port", str(self.base_port), "--pool", "512MiB", timeout_s=UP_S)

    def down(self) -> None:
        """Stop it and remove its state."""
        self.ctl("down", "--purge", timeout_s=60)

    # --- asking ---------------------------------------------------------------------------------------

    def chat(self, question: str, *, max_tokens: int) -> Reply:
        """Ask at temperature 0."""
        arguments = ["chat", question, "--max-tokens", str(max_tokens), "--temperature", "0", "-o", "json"]
        return msgspec.json.decode(self.ctl(*arguments).stdout.encode(), type=Reply)

    def gateways(self) -> list[str]:
        """Base URLs of all gateways that should be there."""
        return [f"http://127.0.0.1:{p['ports']['gateway']}" for p in self.processes() if p["part"] == "node"]

    # --- processes ------------------------------------------------------------------------------------

    def processes(self) -> list[dict[str, Any]]:
        """What cluster.json lists."""
        processes: list[dict[str, Any]] = json.loads((self.directory / "cluster.json").read_text())[
            "processes"
        ]
        return processes

    def process(self, name: str) -> dict[str, Any]:
        """The process of that name."""
        return next(p for p in self.processes() if p["name"] == name)

    def kill(self, name: str) -> None:
        """SIGKILL, no goodbye."""
        os.kill(int(self.process(name)["pid"]), signal.SIGKILL)

    def leader(self) -> dict[str, Any]:
        """The leading candidate, as a gateway that answers tells it."""
        for gateway in self.gateways():
            try:
                about = get_json(f"{gateway}/v1/conductor")
            except OSError:
                continue
            if about.get("leader"):
                leader: dict[str, Any] = about["leader"]
                return leader
        raise AssertionError("no gateway knows a leader")


def get_json(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """GET a JSON object; raises OSError when it cannot be had."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        body: dict[str, Any] = json.load(response)
    return body


def post(url: str, body: bytes | Mapping[str, Any], timeout_s: float = ASK_S) -> tuple[int, dict[str, Any]]:
    """POST JSON (or raw bytes that may be none); the status and the JSON object of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def eventually(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Poll until `condition` holds; fail the test after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {what}")
        time.sleep(0.1)
