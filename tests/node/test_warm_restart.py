"""Real daemons that start again: what was stored before is there, and equal, or it is a miss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncaked.client import Client, PutResult
from mooncaked.pools.journal import read_journal
from tests.node.daemons import Daemon, MakeDaemon, node_records, until

VALUES = {f"key{i}": bytes([i]) * (1000 + 4096 * i) for i in range(20)}


@pytest.fixture
def daemon(make_daemon: MakeDaemon, shm: Path) -> Daemon:
    """Keeps its memory in files; not started."""
    return make_daemon(dram__warm_restart="auto", dram__shm_dir=str(shm))


def store_values(client: Client, daemon: Daemon) -> None:
    for key, value in VALUES.items():
        assert client.put(key, value) is PutResult.STORED
    until(lambda: daemon.status()["pool"]["unchecked"] == 0, "all checksums worked out")


def misses(client: Client) -> set[str]:
    """The keys that are not there (any more); all others are compared."""
    missing = set()
    for key, value in VALUES.items():
        found = client.get(key)
        if found is None:
            missing.add(key)
        else:
            assert found == value
    return missing


def compared(daemon: Daemon) -> None:
    until(lambda: daemon.status()["pool"]["unverified"] == 0, "all blocks compared")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_blocks_come_back(daemon: Daemon, number: signal.Signals) -> None:
    daemon.start().ready()
    with daemon.client() as client:
        store_values(client, daemon)
        client.put("child", b"c", parent="key1")
        client.remove("key3")
        epoch = client.hello().epoch
        daemon.signal(number)
        daemon.wait()
        daemon.start().ready()
        compared(daemon)
        assert misses(client) == {"key3"}, "the same client, which connects again by itself"
        assert client.hello().epoch != epoch
        assert client.get("child") == b"c"
        assert client.put("more", b"m" * 5000) is PutResult.STORED
        assert client.get("more") == b"m" * 5000
    assert "memory taken over where=shm regions=1 blocks=20 dropped=0" in daemon.log
    assert daemon.status()["pool"]["damaged"] == 0


def test_systemd_keeps_the_memory(make_daemon: MakeDaemon, shm: Path) -> None:
    daemon = make_daemon(dram__warm_restart="auto", dram__shm_dir=str(shm), dram__region_size="8MiB")
    daemon.environment["FDSTORE"] = "100"
    daemon.start().ready()
    with daemon.client() as client:
        store_values(client, daemon)
        daemon.notifications()
        names = ["mooncaked-journal-0", "mooncaked-journal-1", "mooncaked-region-0", "mooncaked-region-1"]
        assert sorted(daemon.kept_fds) == names
        assert list(shm.iterdir()) == []
        with pytest.raises(PermissionError):
            os.truncate(daemon.kept_fds["mooncaked-region-0"], 0)
        for _ in range(2):
            daemon.kill()
            daemon.hand_over_fds()
            daemon.start().ready()
            compared(daemon)
            assert misses(client) == set()
            assert "memory taken over where=systemd regions=2 blocks=20 dropped=0" in daemon.log
    daemon.kill()
    daemon.hand_over_fds()
    daemon.arguments.append("--cold")
    daemon.start().ready()
    assert daemon.status()["pool"]["blocks"] == 0
    assert "starting cold cause='it was asked for'" in daemon.log
    daemon.notifications()
    assert sorted(daemon.kept_fds) == names


def test_other_geometry_starts_cold_and_says_why(daemon: Daemon, shm: Path) -> None:
    daemon.start().ready()
    with daemon.client() as client:
        store_values(client, daemon)
        daemon.kill()
        daemon.arguments += ["--set", "dram.huge_pages=off"]
        daemon.start().ready()
        assert misses(client) == set(VALUES)
        store_values(client, daemon)
        assert misses(client) == set()
    assert "kept memory is not used, starting cold cause=" in daemon.log
    assert "another geometry" in json.loads(daemon.http("/v1/pool")[1])["cold_because"]
    assert len(list(shm.glob("*/region-*"))) == 1


def test_a_damaged_block_is_a_miss_and_the_others_are_not(daemon: Daemon, shm: Path) -> None:
    daemon.start().ready()
    with daemon.client() as client:
        store_values(client, daemon)
        daemon.kill()
        fds = [os.open(path, os.O_RDONLY) for path in sorted(shm.glob("*/journal-*"))]
        kept = read_journal(fds)
        assert kept is not None
        damaged = next(block for block in kept.blocks if block.key == b"key7")
        with next(shm.glob("*/region-0")).open("r+b") as region:
            region.seek(damaged.offset + 500)
            region.write(b"X")
        daemon.start().ready()
        compared(daemon)
        assert misses(client) == {"key7"}
        assert client.put("key7", VALUES["key7"]) is PutResult.STORED
        assert misses(client) == set()
    assert daemon.status()["pool"]["damaged"] == 1
    assert "blocks from before the restart are damaged" in daemon.log
    for fd in fds:
        os.close(fd)


def mooncakectl(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    """What `mooncakectl node pool ...` prints as JSON."""
    command = [sys.executable, "-m", "mooncakectl", "node", "pool", *arguments, "-o", "json"]
    environment = os.environ | {"MOONCAKE_ETCD": daemon.etcd, "MOONCAKE_PREFIX": daemon.prefix}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_pool_grows_and_shrinks_while_it_is_used(daemon: Daemon) -> None:
    daemon.start().ready()
    (node_id,) = node_records(daemon.etcd, daemon.prefix)

    def capacity() -> int:
        return node_records(daemon.etcd, daemon.prefix)[node_id].capacity_bytes["dram"]

    with daemon.client() as client:
        store_values(client, daemon)
        resize = mooncakectl(daemon, "resize", node_id, "24MiB", "--wait")["resize"]
        assert (resize["state"], resize["adds_bytes"], resize["retires"]) == ("done", [8 << 20], [])
        assert "dram.size" in resize["note"]
        until(lambda: capacity() == 24 << 20, "the record follows")
        assert misses(client) == set()
        mooncakectl(daemon, "resize", node_id, "16MiB", "--wait")
        until(lambda: capacity() == 16 << 20, "the record follows")
        pool = mooncakectl(daemon, "show", node_id)["pool"]
        assert [region["region"] for region in pool["regions"]] == [0]
        assert (pool["kept_by"], pool["resize"]["state"]) == ("shm", "done")
        assert misses(client) == set(), "it was all in the older region"
        mooncakectl(daemon, "resize", node_id, "4MiB", "--wait")
        store_values(client, daemon)
        assert misses(client) == set()
        assert daemon.metric("mooncaked_pool_capacity_bytes") == 4 << 20
