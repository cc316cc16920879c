"""The conductor beside a node: started, started again, told of reloads, and never left behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.keys import instance_key
from mooncaked.cluster.records import encode
from mooncaked.keys import show_key
from mooncaked.types import InstanceRecord, Role
from mooncaked.units import split_address
from tests.node.daemons import ROOT, Daemon, MakeDaemon, until
from tests.unit.conductors import instance


@pytest.fixture
def pair(make_daemon: MakeDaemon) -> Daemon:
    """A node with a conductor, both serving."""
    daemon = make_daemon(conductor__enabled="true").start().ready()
    until(lambda: gateway(daemon), "the gateway's address in the log")
    return daemon


def gateway(daemon: Daemon) -> str:
    """host:port of the conductor that was started last; empty before it serves."""
    since = daemon.log.rpartition("conductor process started pid=")[2]
    found = re.search(r"gateway serves url=http://(\S+)", since)
    return found.group(1) if found else ""


def answers(address: str, path: str = "/livez") -> bool:
    connection = http.client.HTTPConnection(*split_address(address), timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_leads_and_is_started_again_after_a_crash_with_a_growing_pause(pair: Daemon) -> None:
    status: dict[str, Any] = pair.status()
    assert alive(status["conductor"]["pid"])
    assert answers(gateway(pair))
    until(lambda: pair.status()["leader"] == status["node"]["node_id"], "a leader, under the node's name")
    assert pair.metric("mooncaked_conductor_running") == 1
    first = status["conductor"]["pid"]
    os.kill(first, signal.SIGKILL)
    until(lambda: pair.status()["conductor"]["starts"] == 2, "a second start")
    until(lambda: gateway(pair) and answers(gateway(pair)), "the gateway serving again")
    second = pair.status()["conductor"]
    assert second["pid"] != first
    assert second["last_exit"] == -signal.SIGKILL
    assert pair.http("/readyz")[0] == 200
    os.kill(second["pid"], signal.SIGKILL)
    until(lambda: pair.log.count("conductor process ended") == 2, "its end in the log")
    assert "conductor process ended code=-9 next_start_in_s=0.5" in pair.log
    assert "conductor process ended code=-9 next_start_in_s=1.0" in pair.log


def test_it_dies_with_its_node(pair: Daemon) -> None:
    pid, address = pair.status()["conductor"]["pid"], gateway(pair)
    pair.kill()
    until(lambda: not alive(pid), "the conductor's end", within_s=10)
    assert not answers(address)


def test_a_conductor_that_hangs_dies_with_its_node_too(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(conductor__enabled="true", node__drain_timeout="0s").start().ready()
    until(lambda: gateway(daemon), "the gateway's address in the log")
    pid = daemon.status()["conductor"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    daemon.kill()
    os.kill(pid, signal.SIGCONT)
    until(lambda: not alive(pid), "the conductor's end", within_s=15)


def test_sigterm_ends_both(pair: Daemon) -> None:
    pid = pair.status()["conductor"]["pid"]
    pair.signal(signal.SIGTERM)
    assert pair.wait(within_s=15) == 0, pair.log
    assert not alive(pid)
    assert "conductor ended candidate=" in pair.log
    assert "Traceback" not in pair.log


def test_sigterm_ends_a_conductor_that_hangs(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(conductor__enabled="true", node__drain_timeout="0s").start().ready()
    until(lambda: gateway(daemon), "the gateway's address in the log")
    pid = daemon.status()["conductor"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(within_s=20) == 0, daemon.log
    assert not alive(pid)
    assert "conductor process does not end, killing it" in daemon.log


def test_a_reload_reaches_it(pair: Daemon) -> None:
    pair.config_path.write_text('[conductor]\nslo_ttft = "7s"\n[log]\nlevel = "debug"')
    pair.signal(signal.SIGHUP)
    until(
        lambda: pair.log.count("configuration reloaded applied=conductor.slo_ttft,log.level") == 2,
        "two reloads",
    )
    pair.config_path.write_text("[conductor")
    pair.signal(signal.SIGHUP)
    until(lambda: "reload refused" in pair.log, "a refusal")
    os.kill(pair.status()["conductor"]["pid"], signal.SIGKILL)
    until(lambda: pair.status()["conductor"]["starts"] == 2, "a second start")
    until(lambda: gateway(pair), "the gateway serving, from the configuration in force and not the bad file")


def test_a_port_in_use_leaves_the_node_serving(make_daemon: MakeDaemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = make_daemon(conductor__enabled="true", conductor__listen=address).start().ready()
        until(lambda: daemon.status()["conductor"]["last_exit"] == 3, "the conductor's refusal")
        assert f"Cannot listen on {address}: another process uses it" in daemon.log
        assert "set conductor.listen to a free address" in daemon.log
        until(lambda: "the conductor ended with code 3" in daemon.notifications(), "a status line")
        assert daemon.http("/readyz")[0] == 200
    until(lambda: gateway(daemon) and answers(gateway(daemon)), "the gateway, once the port is free")
    assert "Traceback" not in daemon.log


# --- alone -----------------------------------------------------------------------------------------------


def test_a_conductor_alone_needs_no_node(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.arguments = ["--role", "conductor"]
    daemon.start().serving()
    until(lambda: "gateway at http://" in daemon.notifications(), "its address for the service manager")
    address = daemon.status_line().partition("http://")[2]
    assert answers(address)
    until(lambda: answers(address, "/readyz"), "a leader: itself")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(within_s=15) == 0, daemon.log
    assert not daemon.socket_path.exists()


def test_a_conductor_loads_nothing_of_a_pool() -> None:
    code = "import sys, mooncaked.__main__, mooncaked.conductor_role; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert "mooncaked.gateway.process" in loaded
    assert not {
        name for name in loaded if name.startswith(("mooncaked.pools", "mooncaked.transports", "torch"))
    }
    assert not loaded & {"mooncaked.store", "mooncaked.daemon"}


def test_it_has_the_node_bring_up_what_a_placed_request_will_read(
    make_daemon: MakeDaemon, tmp_path: Path, etcd_endpoint: str, etcd_prefix: str
) -> None:
    (tmp_path / "disk").mkdir()
    disk = {
        "ssd__devices": f"{tmp_path / 'disk'}=64MiB",
        "ssd__segment_size": "8MiB",
        "ssd__admission": "all",
    }
    daemon = make_daemon(conductor__enabled="true", dram__size="4MiB", **disk).start().ready()
    engine = instance("e1", Role.BOTH, daemon.status()["node"]["node_id"], kv_bytes_per_token=4 << 10)
    asyncio.run(register(etcd_endpoint, etcd_prefix, engine))
    keys = [show_key(b"%d" % number) for number in range(64)]
    with daemon.client(namespace=engine.namespace) as client:
        for number in range(64):  # 8 MiB, half of which has to leave
            client.put(b"%d" % number, bytes(128 << 10))
            until(partial(saved, daemon, number - 16), "the disk keeping up")
    until(lambda: gateway(daemon), "the gateway's address in the log")

    def on_disk_alone() -> list[str]:
        found = post(daemon, "/v1/locate", {"namespace": engine.namespace, "keys": keys})
        return [key for key in keys if [copy["tier"] for copy in found.get(key, [])] == ["ssd"]]

    until(lambda: len(on_disk_alone()) >= 16, "blocks that are on disk alone")
    wanted = on_disk_alone()[:4]
    chain = {"namespace": engine.namespace, "block_tokens": engine.block_tokens, "keys": wanted}
    ask = {"model": engine.model, "prompt_tokens": 10 * len(wanted) + 1, "chains": [chain]}
    until(lambda: post(daemon, "/v1/schedule", ask).get("term", 0) > 0, "a leader placing the request")
    until(lambda: not set(wanted) & set(on_disk_alone()), "the blocks in memory")
    _, metrics = request(daemon, "GET", "/metrics")
    assert re.search(r'prefetch_orders_total{result="obeyed"} [1-9]', metrics)


def saved(daemon: Daemon, count: int) -> bool:
    return bool(daemon.status()["tiers"]["demoted_blocks"] >= count)


async def register(endpoint: str, prefix: str, record: InstanceRecord) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[endpoint])) as session:
        await session.put(instance_key(prefix, record.instance_id), encode(record))


def request(daemon: Daemon, method: str, path: str, body: object = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*split_address(gateway(daemon)), timeout=5)
    try:
        connection.request(method, path, json.dumps(body))
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def post(daemon: Daemon, path: str, body: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request(daemon, "POST", path, body)[1])
    return found
