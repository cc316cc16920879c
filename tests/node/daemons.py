"""A real `python -m mooncaked` under test: started, listened to over sd_notify, signalled, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mooncaked.client import Client
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.registry import read_nodes
from mooncaked.types import NodeRecord

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


def until(holds: Callable[[], object], what: str, within_s: float = WAIT_S) -> float:
    """Return after how many seconds `holds()` was true; fail when it is not within `within_s`."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < within_s, f"not within {within_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begin


def node_records(endpoint: str, prefix: str) -> dict[str, NodeRecord]:
    """The records of all nodes, by id."""

    async def read() -> dict[str, NodeRecord]:
        async with EtcdSession(EtcdOptions(endpoints=[endpoint])) as session:
            return {record.node_id: record for record in await read_nodes(session, prefix)}

    return asyncio.run(read())


class Daemon:
    """One daemon with its own state, socket, ports and log below `folder`; it may be started again."""

    def __init__(self, folder: Path, etcd: str, prefix: str, **settings: str) -> None:
        """`settings` are keys with two underscores for the dot, for example `dram__size="1GiB"`."""
        self.folder = folder
        self.etcd, self.prefix = etcd, prefix
        folder.mkdir(parents=True, exist_ok=True)
        self.socket_path = folder / "c.sock"
        self.log_path = folder / "log"
        self.config_path = folder / "mooncaked.toml"
        self.environment: dict[str, str] = {}
        self.arguments: list[str] = []
        self.launcher: list[str] = []  # before the command
        self.pass_fds: list[int] = []
        self._settings = {
            "node.state_dir": str(folder / "state"),
            "listen.client_socket": str(self.socket_path),
            "listen.peer": "127.0.0.1:0",
            "listen.http": "127.0.0.1:0",
            "dram.size": "16MiB",
            "dram.warm_restart": "off",
            "etcd.endpoints": etcd,
            "etcd.prefix": prefix,
            "etcd.lease_ttl": "3s",
            "etcd.request_timeout": "1s",
            "conductor.enabled": "false",
            "conductor.listen": "127.0.0.1:0",
        }
        self._settings |= {key.replace("__", "."): value for key, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(folder / "notify"))
        self._manager.setblocking(False)
        self.kept_fds: dict[str, int] = {}  # what it gave the service manager to keep, by name
        self.notified: list[str] = []  # what the service manager was told since the last start
        self.config_path.write_text("")

    # --- its life ------------------------------------------------------------------------------------

    def start(self) -> Daemon:
        """Start the process; see `ready`."""
        self.notified.clear()
        command = [sys.executable, "-m", "mooncaked", "--config", str(self.config_path), *self.arguments]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        environment = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(self.folder / "notify")}
        self.log_path.write_bytes(b"")
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.launcher, *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | self.environment,
                pass_fds=self.pass_fds,
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was not started"
        return self._process

    def ready(self) -> Daemon:
        """Wait until it says READY and is registered."""
        self.serving()
        until(lambda: self.http("/readyz")[0] == 200, "ready")
        return self

    def serving(self) -> Daemon:
        """Wait until it says READY to the service manager; fail when it ends instead."""
        until(
            lambda: "READY=1" in self.notifications() or self.process.poll() is not None, f"READY\n{self.log}"
        )
        assert self.process.poll() is None, self.log
        return self

    def notifications(self) -> str:
        """All that the service manager was told, one assignment a line."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, fds, _, _ = socket.recv_fds(self._manager, 65536, 1)
                self.notified.append(data.decode())
                self._keep(data.decode(), fds)
        return "\n".join(self.notified)

    def _keep(self, message: str, fds: list[int]) -> None:
        """Keep and give back descriptors, as the service manager's store does."""
        lines = dict(line.split("=", 1) for line in message.splitlines() if "=" in line)
        if lines.get("FDSTOREREMOVE") == "1" and lines["FDNAME"] in self.kept_fds:
            os.close(self.kept_fds.pop(lines["FDNAME"]))
        for fd in fds:
            self.kept_fds[lines["FDNAME"]] = fd

    def hand_over_fds(self) -> None:
        """At the next start, give the daemon what it stored, as the service manager does."""
        self.notifications()
        self.pass_fds = list(self.kept_fds.values())
        names, numbers = ":".join(self.kept_fds), ",".join(map(str, self.pass_fds))
        self.launcher = [sys.executable, "-c", _HAND_OVER, numbers, names]

    def status_line(self) -> str:
        """The status that the service manager shows."""
        found: list[str] = re.findall(r"^STATUS=(.*)$", self.notifications(), re.MULTILINE)
        return found[-1]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, within_s: float = WAIT_S) -> int:
        """Its exit code."""
        return self.process.wait(within_s)

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """For teardown: end it in whatever state it is, and everything that it started."""
        self.kill()
        self._manager.close()
        for fd in self.kept_fds.values():
            os.close(fd)
        for pid in self.conductor_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- what it says ----------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def conductor_pids(self) -> list[int]:
        """Of every conductor that it started, as its log says."""
        return [int(pid) for pid in re.findall(r"conductor process started pid=(\d+)", self.log)]

    @property
    def http_address(self) -> str:
        found = re.search(r" http=(\S+)", self.log)
        assert found, self.log
        return found.group(1)

    @property
    def peer_address(self) -> str:
        found = re.search(r" peers=(\S+)", self.log)
        assert found, self.log
        return found.group(1)

    def http(self, path: str) -> tuple[int, str]:
        """Status and body of a GET; 0 when nothing answers."""
        connection = http.client.HTTPConnection(self.http_address, timeout=5)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """/v1/status."""
        code, body = self.http("/v1/status")
        assert code == 200, body
        result: dict[str, Any] = json.loads(body)
        return result

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or with the labels written out in `name`."""
        _, body = self.http("/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", body, re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def client(self, **options: Any) -> Client:
        return Client(self.socket_path, **options)


_HAND_OVER = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 200) for fd in sys.argv[1].split(",")]
for number, fd in enumerate(fds, 3):
    os.dup2(fd, number)
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=sys.argv[2])
os.execv(sys.argv[3], sys.argv[3:])
"""

MakeDaemon = Callable[..., Daemon]
