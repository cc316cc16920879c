"""The commands that read the cluster: what they show, to people and to programs."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest
import yaml

from mooncaked.cluster import keys
from mooncaked.types import NodePhase
from tests.cli.conftest import Ctl


def test_node_list_shows_the_pool_as_the_node_tells_it(cluster: Ctl) -> None:
    body = cluster.json("node", "list")
    assert body["schema"] == "mooncake.nodes/1"
    (node,) = body["nodes"]
    assert (node["node_id"], node["phase"], node["answers"]) == ("node-1", "ready", True)
    assert (node["capacity_bytes"], node["used_bytes"], node["blocks"]) == ({"dram": 1 << 30}, 1 << 29, 128)
    assert node["uptime_s"] >= 300
    assert cluster("node", "list") == 0
    head, line = cluster.out.splitlines()
    assert head.split() == ["NODE", "PHASE", "ADDRESS", "POOL", "USED", "BLOCKS", "HITS", "UP_FOR"]
    assert line.split() == [
        "node-1",
        "ready",
        "127.0.0.1:1",
        "1.0",
        "GiB",
        "50",
        "%",
        "128",
        "75",
        "%",
        "5",
        "min",
    ]


def test_a_node_that_does_not_answer_is_shown_all_the_same(cluster: Ctl) -> None:
    lost = msgspec.structs.replace(cluster.node(), node_id="node-2", http_address="127.0.0.1:1")
    cluster.put(keys.node_key(cluster.prefix, "node-2"), lost)
    nodes = {node["node_id"]: node for node in cluster.json("node", "list")["nodes"]}
    assert (nodes["node-2"]["answers"], nodes["node-2"]["used_bytes"]) == (False, None)
    cluster("node", "list")
    assert "node-2  unreachable" in cluster.out


def test_node_show_lists_what_runs_on_it(cluster: Ctl) -> None:
    node = cluster.json("node", "show", "node-1")["node"]
    assert (node["instances"], node["labels"], node["evicted"]) == (["both-1"], {"zone": "a"}, 12)
    cluster("node", "show", "node-1")
    assert "zone=a" in cluster.out


DISK = {
    "directory": "/mnt/nvme0",
    "state": "active",
    "reason": "",
    "capacity_bytes": 1 << 40,
    "used_bytes": 1 << 39,
    "blocks": 1000,
    "errors": {"write_error": 2},
}


def test_node_show_lists_the_disks_with_their_state(cluster: Ctl) -> None:
    cluster("node", "show", "node-1")
    assert "DISK" not in cluster.out
    cluster.web.disks = [DISK, {**DISK, "directory": "/mnt/nvme1", "state": "failed", "reason": "it is gone"}]
    disks = cluster.json("node", "show", "node-1")["node"]["disks"]
    assert [disk["state"] for disk in disks] == ["active", "failed"]
    cluster("node", "show", "node-1")
    lines = [line.split() for line in cluster.out.splitlines()]
    assert ["/mnt/nvme0", "active", "1.0", "TiB", "50", "%", "1,000", "2", "-"] in lines
    assert ["/mnt/nvme1", "failed", "1.0", "TiB", "50", "%", "1,000", "2", "it", "is", "gone"] in lines
    assert ["evicted", "before", "they", "could", "be", "written", "3"] in lines


def test_status_warns_of_a_disk_that_took_itself_out(cluster: Ctl) -> None:
    cluster.web.disks = [{**DISK, "state": "read_only", "reason": "5 writes in a row failed"}]
    assert cluster("status") == 10
    assert "disk /mnt/nvme0 of node node-1 is read-only: 5 writes in a row failed" in cluster.err


def test_instance_list_and_show(cluster: Ctl) -> None:
    (instance,) = cluster.json("instance", "list")["instances"]
    assert (instance["instance_id"], instance["healthy"], instance["role"]) == ("both-1", True, "both")
    assert cluster.json("instance", "show", "both-1")["instance"]["kv_bytes_per_token"] == 1024
    cluster.web.healthy = False
    assert cluster.json("instance", "list")["instances"][0]["healthy"] is False
    cluster("instance", "show", "both-1")
    assert "unreachable" in cluster.out


def test_status_of_a_healthy_cluster(cluster: Ctl) -> None:
    body = cluster.json("status")
    assert body["schema"] == "mooncake.status/1"
    assert (body["healthy"], body["problems"]) == (True, [])
    assert body["leader"]["candidate_id"] == "node-1"
    assert body["leader"]["term"] > 0
    assert body["etcd"][0]["leads"] is True
    assert cluster("status") == 0
    assert "1 of 1 members answer" in cluster.out


def test_status_says_what_is_wrong_and_exits_with_10(cluster: Ctl) -> None:
    cluster.web.healthy = False
    draining = msgspec.structs.replace(cluster.node(), phase=NodePhase.DRAINING)
    cluster.put(keys.node_key(cluster.prefix, "node-1"), draining)
    assert cluster("status") == 10
    assert "node node-1 is draining; instance both-1 does not answer" in cluster.err


def test_status_names_a_node_that_this_machine_could_reach_and_cannot(cluster: Ctl) -> None:
    lost = msgspec.structs.replace(cluster.node(), http_address="127.0.0.1:1")
    key = keys.node_key(cluster.prefix, "node-1")
    cluster.put(key, lost)
    assert cluster("status") == 0, "on its own loopback, somewhere else"
    cluster.put(key, msgspec.structs.replace(lost, host=socket.gethostname()))
    assert cluster("status") == 10
    assert "node node-1 does not answer at 127.0.0.1:1" in cluster.err


def test_status_of_nothing(ctl: Ctl) -> None:
    body = ctl.json("status", code=10)
    assert body["problems"] == ["no node is registered", "no conductor leads"]
    assert (body["leader"], body["nodes"], body["instances"]) == (None, [], [])


def test_block_locate_asks_for_the_namespaces_of_all_instances(cluster: Ctl) -> None:
    key = "0x" + "ab" * 16
    cluster.web.replicas = {key: [{"node_id": "node-1", "tier": "dram", "size": 4096}]}
    (replica,) = cluster.json("block", "locate", key)["replicas"]
    expected = {
        "namespace": "tiny-space",
        "key": key,
        "node_id": "node-1",
        "tier": "dram",
        "size_bytes": 4096,
    }
    assert replica == expected
    assert cluster.web.located == [{"namespace": "tiny-space", "keys": [key]}]
    assert cluster("block", "locate", key, "--namespace", "other") == 0
    assert cluster.web.located[-1]["namespace"] == "other"


def test_a_block_that_nobody_has_is_not_found(cluster: Ctl) -> None:
    assert cluster("block", "locate", "some-key") == 4
    assert cluster.err == (
        "error: Block some-key does not exist. Namespaces that were searched are: tiny-space.\n"
    )


def test_top_shows_the_whole_once_or_as_often_as_asked(cluster: Ctl) -> None:
    body = cluster.json("top", "--once")
    totals = {"capacity_bytes": 1 << 30, "used_bytes": 1 << 29, "blocks": 128, "hits": 30, "misses": 10}
    assert (body["leader"], body["totals"]) == ("node-1", totals)
    assert body["instances"][0]["load"]["running"] == 2
    assert cluster("top", "-n", "3", "-i", "0.2", "-o", "json") == 0
    assert [json.loads(line)["schema"] for line in cluster.out.splitlines()] == ["mooncake.top/1"] * 3


def test_yaml_is_offered_by_everything_that_lists(cluster: Ctl) -> None:
    commands = [
        ("node", "list"),
        ("node", "show", "node-1"),
        ("instance", "list"),
        ("instance", "show", "both-1"),
        ("status",),
        ("top", "--once"),
        ("version",),
    ]
    for command in commands:
        assert cluster(*command, "-o", "yaml") == 0, cluster.err
        assert yaml.safe_load(cluster.out)["schema"].startswith("mooncake.")


def test_the_cluster_may_be_named_by_a_configuration_file(
    cluster: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOONCAKE_ETCD")
    monkeypatch.delenv("MOONCAKE_PREFIX")
    file = tmp_path / "mooncaked.toml"
    file.write_text(f'[etcd]\nendpoints = ["{cluster.endpoint}"]\nprefix = "{cluster.prefix}"\n')
    assert len(cluster.json("node", "list", "--config", str(file))["nodes"]) == 1
