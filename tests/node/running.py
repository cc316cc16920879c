"""Small nodes, running in a thread of the test's process or in a process of their own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from tests.node.small_node import SmallNode

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0


def until(holds: Callable[[], object], what: str, within_s: float = WAIT_S) -> None:
    """Return when `holds()` is true; fail when it is not within `within_s`."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s} s: {what}"
        time.sleep(0.005)


@contextmanager
def node_thread(socket: Path, **options: Any) -> Iterator[SmallNode]:
    """A node whose loop runs in a thread, so that the test may block, and look into its store."""
    started: list[SmallNode | BaseException] = []
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def live() -> None:
        loop, halt = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with SmallNode(socket, **options) as node:
                started.append(node)
                stop.append(lambda: loop.call_soon_threadsafe(halt.set))
                ready.set()
                await halt.wait()
        except Exception as error:  # the thread that waits raises it
            started.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: uvloop.run(live()), name="node")
    thread.start()
    assert ready.wait(WAIT_S), "the node did not start"
    try:
        node = started[0]
        if isinstance(node, BaseException):
            raise node
        yield node
    finally:
        if stop:
            stop[0]()
        thread.join(WAIT_S)
    if started[1:]:
        raise AssertionError("the node did not end well") from started[1]  # type: ignore[misc]


class NodeProcess:
    """A node in a process that the test may kill and start again."""

    def __init__(self, socket: Path, **options: str) -> None:
        self.socket = socket
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.peer_address = ""

    def start(self) -> NodeProcess:
        """Start, and wait until it serves."""
        arguments = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.small_node", "--socket", str(self.socket), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.peer_address = self._process.stdout.readline().strip()
        assert self.peer_address, "the node did not start"
        return self

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9, if it runs."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self._process is not None:
            self._process.send_signal(number)


@contextmanager
def node_process(
    socket: Path, node_id: str = "n1", size: int = 64 << 20, peers: Mapping[str, str] | None = None
) -> Iterator[NodeProcess]:
    """A started `NodeProcess`, killed in the end."""
    options = {"node-id": node_id, "size": str(size), "peers": json.dumps(dict(peers or {}))}
    node = NodeProcess(socket, **options)
    try:
        yield node.start()
    finally:
        node.kill()


@contextmanager
def script(source: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `source`, with pipes to talk to it; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], text: str = "go") -> None:
    """Send the process a line."""
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()
