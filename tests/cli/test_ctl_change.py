"""The commands that change the cluster: `instance add` and `instance remove`."""

from __future__ import annotations

import json

from tests.cli.conftest import Ctl

ADD = ("instance", "add", "vllm-1", "--url", "http://10.0.0.7:8000/", "--role", "decode", "--model", "m")


def test_an_added_instance_is_listed_and_can_be_removed(ctl: Ctl) -> None:
    assert ctl(*ADD, "--engine", "vllm", "--node", "node-1") == 0
    (instance,) = ctl.json("instance", "list")["instances"]
    assert (instance["instance_id"], instance["url"]) == ("vllm-1", "http://10.0.0.7:8000")
    assert (instance["static"], instance["engine"], instance["node_id"]) == (True, "vllm", "node-1")
    assert instance["namespace"] == "m"
    assert ctl("instance", "remove", "vllm-1", "--yes") == 0
    assert ctl.json("instance", "list")["instances"] == []


def test_an_id_that_is_taken_is_refused(ctl: Ctl) -> None:
    assert ctl(*ADD) == 0
    assert ctl(*ADD) == 7
    assert "an instance vllm-1 is registered already" in ctl.err


def test_a_dry_run_prints_the_record_and_changes_nothing(ctl: Ctl) -> None:
    assert ctl(*ADD, "--dry-run") == 0
    assert json.loads(ctl.out)["instance_id"] == "vllm-1"
    assert ctl.json("instance", "list")["instances"] == []


def test_what_no_instance_can_be_is_a_usage_error(ctl: Ctl) -> None:
    assert ctl("instance", "add", "a b", "--url", "http://h", "--role", "both", "--model", "m") == 2
    assert ctl("instance", "add", "a", "--url", "ftp://h", "--role", "both", "--model", "m") == 2
    assert ctl("instance", "add", "a", "--url", "http://h", "--role", "boss", "--model", "m") == 2
    assert ctl("instance", "add", "a", "--url", "http://h", "--model", "m") == 2


def test_an_instance_that_registered_itself_is_not_removed(cluster: Ctl) -> None:
    assert cluster("instance", "remove", "both-1", "--yes") == 7
    assert "Stop the engine" in cluster.err
    assert len(cluster.json("instance", "list")["instances"]) == 1


def test_removing_asks_and_without_a_terminal_refuses(ctl: Ctl) -> None:
    ctl(*ADD)
    assert ctl("instance", "remove", "vllm-1") == 7
    assert "Add --yes" in ctl.err
    assert ctl("instance", "remove", "nobody", "--yes") == 4
    assert "Instances are: vllm-1." in ctl.err
