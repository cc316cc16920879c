"""A node starts: it serves and is registered; what it cannot start with is one clear line and exit 3."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.client import PutResult
from mooncaked.errors import Unauthenticated
from mooncaked.types import NodePhase
from mooncaked.units import split_address
from tests.node.daemons import Daemon, MakeDaemon, node_records, until


def refusal(daemon: Daemon) -> str:
    """The last line of a daemon that was started and ends at once; checks that it says no more than that."""
    assert daemon.wait() == 3, daemon.log
    assert "Traceback" not in daemon.log
    assert f"STATUS={daemon.log.splitlines()[-1].partition('mooncaked: ')[2]}" in daemon.notifications()
    return daemon.log.splitlines()[-1]


def test_a_node_serves_and_is_registered(
    make_daemon: MakeDaemon, tmp_path: Path, etcd_endpoint: str, etcd_prefix: str
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    daemon = make_daemon(node__labels="zone=z1", listen__token_file=f"{tmp_path}/token").start().ready()
    with daemon.client(token="s3cret") as client:
        assert client.put("key", b"value") is PutResult.STORED
        assert client.get("key") == b"value"
        node_id, epoch = client.hello().node_id, client.hello().epoch
    with daemon.client() as stranger, pytest.raises(Unauthenticated):
        stranger.get("key")
    (record,) = node_records(etcd_endpoint, etcd_prefix).values()
    assert (record.node_id, record.epoch, record.phase) == (node_id, epoch, NodePhase.READY)
    assert (record.pid, record.labels) == (daemon.process.pid, {"zone": "z1"})
    assert record.capacity_bytes == {"dram": 16 << 20}
    assert record.client_socket == str(daemon.socket_path)
    assert (record.peer_address, record.http_address) == (daemon.peer_address, daemon.http_address)
    assert split_address(record.peer_address)[1] > 0
    socket.create_connection(split_address(record.peer_address)).close()
    assert daemon.http("/livez")[0] == daemon.http("/healthz")[0] == 200
    status = daemon.status()
    assert (status["not_ready"], status["node"]["node_id"], status["conductor"]) == ([], node_id, None)
    assert daemon.metric("mooncaked_pool_capacity_bytes") == 16 << 20
    until(lambda: daemon.metric('mooncaked_reads_total{result="hit"}') == 1, "the hit is counted")
    assert daemon.metric("mooncaked_registered") == 1
    assert 0 < daemon.metric("mooncaked_lease_left_seconds") < 3
    until(lambda: daemon.status_line() == "ready; 1 blocks, 0B of 16MiB in use", "the status line")


def test_it_starts_again_after_a_crash_as_the_same_node(
    make_daemon: MakeDaemon, etcd_endpoint: str, etcd_prefix: str
) -> None:
    daemon = make_daemon().start().ready()
    first = node_records(etcd_endpoint, etcd_prefix)
    daemon.kill()
    assert daemon.socket_path.exists(), "a crash leaves the socket file"
    daemon.start().ready()
    second = node_records(etcd_endpoint, etcd_prefix)
    assert first.keys() == second.keys()
    (old,), (new,) = first.values(), second.values()
    assert new.pid == daemon.process.pid
    assert new.epoch != old.epoch
    with daemon.client() as client:
        assert client.put("key", b"value") is PutResult.STORED


def test_a_second_daemon_leaves_the_first_unharmed(make_daemon: MakeDaemon) -> None:
    first = make_daemon("first").start().ready()
    pid, state, http = first.process.pid, first.folder / "state", first.http_address
    with first.client() as client:
        client.put("key", b"value")
        second = make_daemon("b", listen__client_socket=str(first.socket_path)).start()
        third = make_daemon("c", node__state_dir=str(state)).start()
        fourth = make_daemon("d", listen__http=http).start()
        assert f"Another mooncaked (pid {pid}) already serves {first.socket_path}" in refusal(second)
        assert f"Another mooncaked (pid {pid}) already serves {state}" in refusal(third)
        assert f"Cannot listen on {http}: another process uses it" in refusal(fourth)
        assert "set listen.http to a free address" in refusal(fourth)
        assert client.get("key") == b"value"
    with first.client() as late:
        assert late.get("key") == b"value"
    assert first.http("/readyz")[0] == 200


def test_what_it_cannot_start_with_is_one_clear_line(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "token").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cases = {
            "listen__peer": (
                address,
                f"Cannot listen on {address}: another process uses it. Stop that process, ",
            ),
            "listen__http": ("192.0.2.1:0", "listen.http: cannot listen on 192.0.2.1:0: "),
            "listen__client_socket": (
                f"{tmp_path}/file",
                f"listen.client_socket: {tmp_path}/file: it exists ",
            ),
            "listen__token_file": (f"{tmp_path}/token", f"listen.token_file: {tmp_path}/token is empty"),
            "dram__size": ("512TiB", "A memory pool of 562949953421312 bytes does not fit here"),
            "node__state_dir": (f"{tmp_path}/file/x", "node.state_dir: cannot be used (Not a directory)"),
        }
        started = {key: make_daemon(key, **{key: value}).start() for key, (value, _) in cases.items()}
        for key, (_, words) in cases.items():
            assert words in refusal(started[key])
            assert not started[key].socket_path.exists()
    assert (tmp_path / "file").read_text() == "precious"


def test_without_etcd_it_serves_locally_and_says_so(
    make_daemon: MakeDaemon, own_etcd: EtcdServer, etcd_prefix: str
) -> None:
    daemon = make_daemon(etcd=own_etcd.endpoint).start().serving()
    with daemon.client() as client:
        assert client.put("key", b"value") is PutResult.STORED
        assert client.get("key") == b"value"
    assert daemon.http("/livez")[0] == 200
    code, body = daemon.http("/readyz?verbose")
    assert code == 503
    assert "not registered in etcd" in body
    until(lambda: "not registered in etcd: Cannot reach etcd" in daemon.notifications(), "a status line")
    assert daemon.metric("mooncaked_registered") == daemon.metric("mooncaked_etcd_connected") == 0
    own_etcd.start()
    own_etcd.wait_ready()
    daemon.ready()
    assert [record.pid for record in node_records(own_etcd.endpoint, etcd_prefix).values()] == [
        daemon.process.pid
    ]
    until(lambda: daemon.status_line().endswith("in use"), "a status line without trouble")
