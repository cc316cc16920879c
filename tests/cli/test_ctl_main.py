"""The frame around every command: exit codes, errors on one line, options that work anywhere, completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncakectl import __main__ as main
from mooncakectl.complete import instance_ids, node_ids
from mooncakectl.local.plan import LocalOptions
from mooncakectl.local.state import fresh_state, socket_directory, write_state
from mooncakectl.target import DEFAULT_ENDPOINT, resolve_target
from mooncaked.errors import InvalidRequest
from tests.cli.conftest import Ctl


def test_exit_codes_by_class(cluster: Ctl) -> None:
    assert cluster("version") == 0
    assert cluster("nonsense") == 2
    assert cluster("node", "list", "-o", "xml") == 2
    assert cluster("node", "list", "--config", "/nonexistent.toml") == 3
    assert cluster("node", "show", "node-9") == 4
    assert "Nodes are: node-1." in cluster.err
    assert cluster("node", "list", "--etcd", "127.0.0.1:1") == 5
    assert cluster("node", "list", "--etcd", "nonsense") == 2


def test_an_error_is_one_line_without_a_traceback_unless_asked_for(cluster: Ctl) -> None:
    assert cluster("node", "show", "node-9") == 4
    assert (cluster.err.count("\n"), cluster.out) == (1, "")
    assert cluster("node", "show", "node-9", "--debug") == 4
    assert "Traceback" in cluster.err
    assert cluster("--debug", "node", "show", "node-9") == 4
    assert "Traceback" in cluster.err


def test_a_bug_is_told_as_one(monkeypatch: pytest.MonkeyPatch, ctl: Ctl) -> None:
    def broken() -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("mooncakectl.commands.version.version_view", broken)
    assert ctl("version") == 1
    assert ctl.err == "error: Unexpected error: ZeroDivisionError: oh (a bug; --debug shows where)\n"


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, ctl: Ctl) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mooncakectl.commands.version.version_view", interrupted)
    assert ctl("version") == 130


def test_a_bare_watch_gets_its_default() -> None:
    assert main.prepare(["node", "list", "--watch"]) == (["node", "list", "--watch=2"], False)
    assert main.prepare(["node", "list", "-w", "-o", "json"])[0] == [
        "node",
        "list",
        "--watch=2",
        "-o",
        "json",
    ]
    assert main.prepare(["node", "list", "-w", "5"])[0] == ["node", "list", "-w", "5"]
    assert main.prepare(["chat", "--", "--debug"]) == (["chat", "--", "--debug"], False)


def test_a_pipe_that_closes_early_is_no_error(cluster: Ctl) -> None:
    command = f"{sys.executable} -m mooncakectl version -o json | true"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_version_of_the_program(ctl: Ctl) -> None:
    body = ctl.json("version")
    assert body["schema"] == "mooncake.version/1"
    assert body["version"][0].isdigit()


def test_names_are_completed_from_etcd(cluster: Ctl) -> None:
    assert node_ids("no") == ["node-1"]
    assert node_ids("x") == []
    assert instance_ids("") == ["both-1"]


def test_completion_without_etcd_is_empty_and_quick(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_ETCD", "127.0.0.1:1")
    assert node_ids("") == []
    monkeypatch.setenv("MOONCAKE_ETCD", "nonsense")
    assert node_ids("") == []


def test_the_shell_gets_a_completion_script(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"_MOONCAKECTL_COMPLETE": "source_bash", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", "from mooncakectl.__main__ import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "complete -o default -F" in done.stdout


class TestTarget:
    """Which etcd a command talks to."""

    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("MOONCAKE_LOCAL", str(tmp_path))
        for name in ("MOONCAKE_ETCD", "MOONCAKE_PREFIX", "MOONCAKE_CONFIG"):
            monkeypatch.delenv(name, raising=False)

    def test_the_default(self) -> None:
        target = resolve_target(None, None)
        assert (target.etcd.endpoints, target.etcd.prefix) == ([DEFAULT_ENDPOINT], "/mooncake")

    def test_the_local_cluster_where_there_is_one(self, tmp_path: Path) -> None:
        options = LocalOptions(
            model="m",
            model_name="m",
            nodes=1,
            prefill=1,
            decode=1,
            pool_bytes=1,
            base_port=4711,
            threads=1,
        )
        write_state(tmp_path, fresh_state(options, "/here", tmp_path))
        target = resolve_target(None, None)
        assert (target.etcd.endpoints, target.etcd.prefix) == (["127.0.0.1:4711"], "/here")
        assert target.gateways == ["http://127.0.0.1:4723"]
        assert resolve_target("other:1", None).gateways == []

    def test_an_option_over_everything(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "mooncaked.toml"
        file.write_text('[etcd]\nendpoints = ["a:1"]\nprefix = "/p"\n')
        monkeypatch.setenv("MOONCAKE_PREFIX", "/q")
        target = resolve_target("b:2, https://c:3/", file)
        assert (target.etcd.endpoints, target.etcd.prefix) == (["b:2", "https://c:3"], "/q")

    def test_a_malformed_endpoint(self) -> None:
        with pytest.raises(InvalidRequest, match="--etcd: 'a' is no host:port"):
            resolve_target("a", None)


def test_up_can_say_what_it_would_do(ctl: Ctl, tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.touch()
    assert ctl("up", "--model", str(model), "--nodes", "1", "--pool", "64MiB", "--dry-run") == 0
    names = [line.partition(":")[0] for line in ctl.out.splitlines()]
    assert names == ["etcd", "node-1", "prefill-1", "prefill-2", "decode-1"]
    assert not socket_directory(tmp_path / "local").exists()
    assert ctl("up", "--model", "/nonexistent.gguf") == 3
    assert ctl("up", "--nodes", "99", "--model", str(model)) == 2


def test_down_without_a_cluster(ctl: Ctl) -> None:
    assert ctl("down") == 0
    assert ctl.out == "The local cluster does not run.\n"
