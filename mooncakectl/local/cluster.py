"""Starts, revives and stops the processes of the local cluster."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from mooncakectl.local.plan import (
    HOST,
    PREFIX,
    SHM,
    LocalOptions,
    Part,
    ProcessPlan,
    gateway_urls,
    log_path,
    plan,
    shm_path,
)
from mooncakectl.local.progress import Progress
from mooncakectl.local.state import (
    ClusterState,
    ProcessState,
    alive,
    fresh_state,
    make_private,
    read_state,
    socket_directory,
    start_ticks,
    state_path,
    with_process,
    write_state,
)
from mooncaked.errors import AddressInUse, Unhealthy, Unreachable

READY_S = {Part.ETCD: 30.0, Part.NODE: 60.0, Part.ENGINE: 240.0}
CONDUCTOR_READY_S = 60.0
STOP_S = 15.0
_POLL_S = 0.1
_LOG_BYTES_MAX = 16 << 20  # a log beyond this is set aside when its process starts again
_TAIL_BYTES = 4096
_TAIL_LINES = 6
_NAMES = {Part.ETCD: "etcd", Part.NODE: "node", Part.ENGINE: "engine"}
_NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
MakePlan = Callable[[LocalOptions, Path, Path], list[ProcessPlan]]
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no place on loopback


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Whether `url` answers with 200."""
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


def fetch_json(url: str, timeout_s: float = 2.0) -> dict[str, object]:
    """The JSON object at `url`; empty when it cannot be had."""
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            body = json.load(response)
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


def log_tail(path: Path) -> str:
    """The last lines of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:]) or "(empty)"


def check_ports(plans: Sequence[ProcessPlan]) -> None:
    """Raise `AddressInUse` when a port that a process of `plans` needs is taken."""
    for port in (port for item in plans for port in item.ports.values()):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise AddressInUse(address=f"{HOST}:{port}", key="--base-port") from error


def plural(count: int, noun: str) -> str:
    """E.g. `1 node`, `3 nodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


class LocalCluster:
    """The processes whose state is in `directory`. The caller holds the directory's lock (`state.locked`)."""

    def __init__(self, directory: Path, progress: Progress, make_plan: MakePlan = plan) -> None:
        self._directory = directory
        self._progress = progress
        self._make_plan = make_plan
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def up(self, options: LocalOptions) -> ClusterState:
        """Start whatever of the cluster does not run, and wait until requests can be served.

        Raises `AddressInUse`, `Unhealthy` (a process ended) or `Unreachable` (not ready in time)."""
        sockets = socket_directory(self._directory)
        make_private(sockets)
        plans = self._make_plan(options, self._directory, sockets)
        state = read_state(self._directory)
        running = {p.name for p in state.processes if alive(p)} if state else set()
        if state is None or not running:
            state = fresh_state(options, PREFIX, sockets)
        missing = [item for item in plans if item.name not in running]
        check_ports(missing)
        for part in Part:
            state = self._start_part(part, plans, missing, state)
        with self._progress.step("waiting for the conductor to see all of them"):
            self._wait_conductor(options, plans)
        return state

    def _start_part(
        self, part: Part, plans: list[ProcessPlan], missing: list[ProcessPlan], state: ClusterState
    ) -> ClusterState:
        """Start the missing processes of one part, and wait until all of that part are ready."""
        mine = [item for item in plans if item.part is part]
        new = [item for item in missing if item.part is part]
        what = "etcd" if part is Part.ETCD else plural(len(new), _NAMES[part])
        text = f"starting {what}" if new else f"checking {_NAMES[part]}{'' if part is Part.ETCD else 's'}"
        with self._progress.step(text):
            for item in new:
                state = with_process(state, self._start(item))
                write_state(self._directory, state)
            self._wait_ready(mine, READY_S[part])
        return state

    def _start(self, item: ProcessPlan) -> ProcessState:
        if item.config is not None and item.config_path is not None:
            item.config_path.parent.mkdir(parents=True, exist_ok=True)
            item.config_path.write_text(item.config)
        if item.part is Part.NODE and SHM.is_dir():
            make_private(shm_path(socket_directory(self._directory) / item.name))
        if item.part is Part.ETCD:
            (self._directory / "etcd").mkdir(mode=0o700, exist_ok=True)  # etcd warns about anything wider
        log = log_path(self._directory, item.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > _LOG_BYTES_MAX:
            log.replace(log.with_suffix(".log.1"))
        child = self._spawn(item, log)
        self._children[item.name] = child
        return ProcessState(
            name=item.name,
            part=item.part,
            pid=child.pid,
            start_ticks=start_ticks(child.pid) or 0,
            argv=item.argv,
            ports=item.ports,
            log=str(log),
            node=item.node,
            role=item.role,
        )

    def _spawn(self, item: ProcessPlan, log: Path) -> subprocess.Popen[bytes]:
        """Detached: a session of its own, so that neither Ctrl-C nor the end of the terminal reaches it."""
        environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        environment["PYTHONUNBUFFERED"] = "1"
        with log.open("ab") as sink:
            return subprocess.Popen(
                item.argv,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                env=environment,
                cwd=self._directory,
            )

    def _wait_ready(self, items: list[ProcessPlan], limit_s: float) -> None:
        waiting = [item for item in items if item.ready_url]

        def all_ready() -> bool:
            for item in list(waiting):
                self._check_child(item.name)
                if item.ready_url and answers(item.ready_url):
                    waiting.remove(item)
            return not waiting

        if not self._poll(all_ready, limit_s):
            item = waiting[0]
            log = log_path(self._directory, item.name)
            cause = f"it is not ready after {limit_s:.0f} s; its log ends:\n{log_tail(log)}\n"
            remedy = f"Look into {log}, then run `mooncakectl up` again."
            raise Unreachable(what=item.name, address=item.ready_url, cause=cause, remedy=remedy)

    def _wait_conductor(self, options: LocalOptions, plans: list[ProcessPlan]) -> None:
        """Until every gateway names a leader and knows every engine."""
        nodes = {item.name for item in plans if item.part is Part.NODE}
        engines = {item.name for item in plans if item.part is Part.ENGINE}
        waiting = gateway_urls(options)

        def all_informed() -> bool:
            for item in plans:
                self._check_child(item.name)
            waiting[:] = [url for url in waiting if not conductor_knows(url, nodes, engines)]
            return not waiting

        if not self._poll(all_informed, CONDUCTOR_READY_S):
            cause = f"it knows no leader, or not all nodes and engines, after {CONDUCTOR_READY_S:.0f} s"
            remedy = f"Look into the logs in {self._directory / 'logs'}."
            raise Unreachable(what="the conductor", address=waiting[0], cause=cause, remedy=remedy)

    def _poll(self, condition: Callable[[], bool], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def _check_child(self, name: str) -> None:
        """Raise `Unhealthy` when a process that was started here has ended."""
        child = self._children.get(name)
        if child is None or child.poll() is None:
            return
        log = log_path(self._directory, name)
        raise Unhealthy(what=name, cause=f"it exited with {child.returncode}; {log} ends:\n{log_tail(log)}")

    def down(self, timeout_s: float = STOP_S) -> int:
        """Stop everything, engines first and etcd last; returns how many processes ran."""
        state = read_state(self._directory)
        count = 0
        for part in reversed(Part):
            running = [p for p in (state.processes if state else []) if p.part is part and alive(p)]
            if running:
                count += len(running)
                what = "etcd" if part is Part.ETCD else plural(len(running), _NAMES[part])
                with self._progress.step(f"stopping {what}"):
                    self._stop(running, timeout_s)
        if state is not None:
            shutil.rmtree(shm_path(Path(state.socket_dir) / "node"), ignore_errors=True)
            shutil.rmtree(state.socket_dir, ignore_errors=True)
        return count

    def _stop(self, processes: list[ProcessState], timeout_s: float) -> None:
        for process in processes:
            _signal(os.kill, process.pid, signal.SIGTERM)
        self._poll(lambda: not any(alive(process) for process in processes), timeout_s)
        for process in processes:  # its session too: a conductor whose node had to be killed
            _signal(os.killpg, process.pid, signal.SIGKILL)
        self._poll(lambda: not any(alive(process) for process in processes), timeout_s)

    def purge(self) -> None:
        """Remove everything that a stopped cluster left in its directories, and nothing else."""
        for folder in (self._directory / "etcd", self._directory / "logs", *self._directory.glob("node-*")):
            shutil.rmtree(folder, ignore_errors=True)
        state_path(self._directory).unlink(missing_ok=True)
        (self._directory / "lock").unlink(missing_ok=True)


def _signal(send: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it ended meanwhile; a new owner of its pid is none of ours


def conductor_knows(gateway_url: str, nodes: set[str], engines: set[str]) -> bool:
    """Whether the conductor at `gateway_url` names a leader, follows all `nodes` and has all `engines`."""
    about = fetch_json(f"{gateway_url}/v1/conductor")
    followed = _names(about.get("sources"), "node_id", {"state": "live"})
    return (
        bool(about.get("leader"))
        and nodes <= followed
        and engines <= _names(about.get("instances"), "instance_id")
    )


def _names(items: object, key: str, having: Mapping[str, str] = MappingProxyType({})) -> set[str]:
    """The values of `key` in those of `items` that have the values `having`."""
    listed = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return {str(item.get(key)) for item in listed if all(item.get(k) == v for k, v in having.items())}
