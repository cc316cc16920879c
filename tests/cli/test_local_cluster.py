"""`up` and `down` with stand-in processes: what is started, revived, reported and stopped."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncakectl.local.cluster import LocalCluster
from mooncakectl.local.etcd_server import free_ports
from mooncakectl.local.plan import LocalOptions, Part, ProcessPlan, gateway_urls, shm_path
from mooncakectl.local.progress import Progress
from mooncakectl.local.state import (
    ClusterState,
    ProcessState,
    alive,
    locked,
    make_private,
    read_state,
    socket_directory,
)
from mooncaked.errors import AddressInUse, Refused, Unhealthy

SERVER = Path(__file__).parents[1] / "fakes" / "tiny_server.py"


class Local:
    """A cluster of an etcd, one node and two engines, all of them tiny servers on free ports."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.output = io.StringIO()
        self.argv: dict[str, list[str]] = {}
        self.options = self._options()
        gateway = int(gateway_urls(self.options)[0].rpartition(":")[2])
        self.ports = dict(zip(("etcd", "engine-1", "engine-2"), free_ports(3), strict=True), node=gateway)

    def _options(self) -> LocalOptions:
        (port,) = free_ports(1)
        return LocalOptions(
            model="m",
            model_name="m",
            nodes=1,
            prefill=1,
            decode=1,
            pool_bytes=1 << 30,
            base_port=port - 12,  # so that the one gateway is at `port`
            threads=1,
        )

    def plan(self, _options: LocalOptions, _directory: Path, _sockets: Path) -> list[ProcessPlan]:
        parts = {"etcd": Part.ETCD, "node": Part.NODE, "engine-1": Part.ENGINE, "engine-2": Part.ENGINE}
        return [self.process(name, part) for name, part in parts.items()]

    def process(self, name: str, part: Part) -> ProcessPlan:
        port = self.ports[name]
        argv = self.argv.get(name, [str(port), "engine-1,engine-2"])
        return ProcessPlan(
            name=name,
            part=part,
            argv=[sys.executable, str(SERVER), *argv],
            ports={"http": port},
            ready_url=f"http://127.0.0.1:{port}/ready",
        )

    def cluster(self) -> LocalCluster:
        return LocalCluster(self.directory, Progress(self.output), self.plan)

    def up(self) -> ClusterState:
        return self.cluster().up(self.options)

    def processes(self) -> dict[str, ProcessState]:
        state = read_state(self.directory)
        return {process.name: process for process in state.processes} if state else {}


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    local = Local(tmp_path / "local")
    local.directory.mkdir()
    yield local
    local.cluster().down(timeout_s=0.2)
    assert not any(alive(process) for process in local.processes().values())


def test_up_starts_everything_and_a_second_up_nothing(local: Local) -> None:
    state = local.up()
    assert [process.name for process in state.processes] == ["etcd", "node", "engine-1", "engine-2"]
    assert all(alive(process) for process in state.processes)
    pids = {process.pid for process in state.processes}
    assert {process.pid for process in local.up().processes} == pids


def test_up_revives_what_was_killed(local: Local) -> None:
    before = {process.name: process.pid for process in local.up().processes}
    os.kill(before["node"], signal.SIGKILL)
    wait_gone(local.processes()["node"])
    after = {process.name: process.pid for process in local.up().processes}
    assert after["node"] != before["node"]
    assert {**after, "node": 0} == {**before, "node": 0}
    assert "starting 1 node" in local.output.getvalue()


def wait_gone(process: ProcessState) -> None:
    end = time.monotonic() + 5
    while alive(process):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_ends_while_starting_is_reported_with_the_end_of_its_log(local: Local) -> None:
    local.argv["engine-2"] = ["exit", "3", "no such model"]
    with pytest.raises(Unhealthy, match=r"(?s)engine-2 is not healthy: it exited with 3; .*no such model"):
        local.up()
    assert alive(local.processes()["node"]), "the others stay, for the next `up`"
    del local.argv["engine-2"]
    local.up()
    assert alive(local.processes()["engine-2"])


def test_a_port_that_is_taken_is_named_before_anything_starts(local: Local) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", local.ports["engine-1"]))
        taken.listen()
        with pytest.raises(AddressInUse, match=rf"127.0.0.1:{local.ports['engine-1']}.*--base-port"):
            local.up()
    assert local.processes() == {}


def test_down_stops_engines_first_and_etcd_last(local: Local) -> None:
    local.up()
    assert local.cluster().down() == 4
    said = local.output.getvalue()
    order = [said.index(text) for text in ("stopping 2 engines", "stopping 1 node", "stopping etcd")]
    assert order == sorted(order)
    assert local.cluster().down() == 0


def test_down_kills_what_does_not_stop(local: Local) -> None:
    local.argv["node"] = [str(local.ports["node"]), "engine-1,engine-2", "stubborn"]
    local.up()
    assert local.cluster().down(timeout_s=0.3) == 4
    assert not alive(local.processes()["node"])


def test_purge_removes_what_is_ours_and_nothing_else(local: Local) -> None:
    (local.directory / "notes.txt").write_text("mine")
    state = local.up()
    cluster = local.cluster()
    kept = shm_path(Path(state.socket_dir) / "node-1")
    assert kept.stat().st_mode & 0o077 == 0
    (kept / "region-0").write_bytes(b"the memory of a node")
    cluster.down()
    assert not Path(state.socket_dir).exists()
    assert not kept.exists(), "the memory that outlives a node does not outlive the cluster"
    cluster.purge()
    assert [path.name for path in local.directory.iterdir()] == ["notes.txt"]


def test_another_process_with_a_recorded_pid_is_left_alone(local: Local) -> None:
    mine = ProcessState(
        name="node", part=Part.NODE, pid=os.getpid(), start_ticks=1, argv=[], ports={}, log=""
    )
    assert not alive(mine)


def test_two_commands_at_once_are_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(Refused, match="another `mooncakectl up` or `down`"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_sockets_lie_in_a_short_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    path = socket_directory(tmp_path)
    make_private(path)
    try:
        assert len(str(path / "node-16.sock")) < 100
        assert path.stat().st_mode & 0o777 == 0o700
        path.chmod(0o755)
        with pytest.raises(Refused, match="not a private directory"):
            make_private(path)
    finally:
        path.rmdir()


def test_state_of_another_version_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"schema": "mooncake.local/99"}')
    assert read_state(tmp_path) is None
