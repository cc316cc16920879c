"""What the daemon finds out about its machine: its name and directory, its address, its secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncaked.config import Config, EtcdConfig, NodeConfig
from mooncaked.errors import ConfigError, SocketInUse
from mooncaked.host import StateDir, advertised_host, read_secret


def test_the_node_id_is_made_once(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "a" / "state")
    first = state.node_id()
    assert state.node_id() == first
    state.close()
    again = StateDir(tmp_path / "a" / "state")
    assert again.node_id() == first
    again.close()
    other = StateDir(tmp_path / "b")
    assert other.node_id() != first
    other.close()


def test_an_empty_id_file_is_filled(tmp_path: Path) -> None:
    (tmp_path / "node-id").touch()
    state = StateDir(tmp_path)
    assert state.node_id()
    assert (tmp_path / "node-id").read_text().strip() == state.node_id()
    state.close()


def test_two_daemons_cannot_share_a_directory(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    code = f"from pathlib import Path; from mooncaked.host import StateDir; StateDir(Path({str(tmp_path)!r}))"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"Another mooncaked (pid {os.getpid()}) already serves {tmp_path}" in second.stderr
    with pytest.raises(SocketInUse):
        StateDir(tmp_path)
    state.close()
    StateDir(tmp_path).close()


def test_a_directory_that_cannot_be_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"node\.state_dir.*Not a directory"):
        StateDir(tmp_path / "file" / "state")


@pytest.mark.parametrize(
    ("listen", "advertise", "endpoint", "host"),
    [
        ("127.0.0.1:7801", "", "10.0.0.9:2379", "127.0.0.1"),
        ("127.0.0.1:7801", "node1.example", "10.0.0.9:2379", "127.0.0.1"),
        ("localhost:7801", "node1.example", "10.0.0.9:2379", "localhost"),
        ("[::1]:7801", "node1.example", "10.0.0.9:2379", "::1"),
        ("0.0.0.0:7801", "node1.example", "10.0.0.9:2379", "node1.example"),
        ("192.0.2.7:7801", "", "127.0.0.1:2379", "192.0.2.7"),
        ("192.0.2.7:7801", "node1.example", "127.0.0.1:2379", "node1.example"),
        ("0.0.0.0:7801", "", "127.0.0.1:2379", "127.0.0.1"),
        ("[::]:7801", "", "https://127.0.0.1:2379", "127.0.0.1"),
    ],
)
def test_the_address_that_others_are_told(listen: str, advertise: str, endpoint: str, host: str) -> None:
    config = Config(node=NodeConfig(advertise_host=advertise), etcd=EtcdConfig(endpoints=[endpoint]))
    assert advertised_host(config, listen) == host


def test_an_etcd_that_has_no_address_leaves_the_host_name() -> None:
    config = Config(etcd=EtcdConfig(endpoints=["no-such-host.invalid:2379"]))
    assert advertised_host(config, "0.0.0.0:7801") == os.uname().nodename


def test_a_secret_is_text_without_its_white_space(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert read_secret(None, "f", "k") is None
    file.write_text(" s3cret\n")
    assert read_secret(file, "f", "k") == "s3cret"
    for content, problem in [(b"\n", "is empty"), (b"\xff", "no UTF-8")]:
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            read_secret(file, "f", "listen.token_file")
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(tmp_path / "gone", "f", "listen.token_file")
