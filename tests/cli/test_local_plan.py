"""What `up` plans to run: names, ports, configuration, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from mooncakectl.local.options import Asked, default_pool, resolve, resolve_model
from mooncakectl.local.plan import LocalOptions, Part, ProcessPlan, gateway_urls, plan
from mooncakectl.local.progress import Progress
from mooncakectl.local.state import ClusterState, ProcessState, fresh_state, start_ticks
from mooncaked.config import load_config
from mooncaked.errors import InvalidRequest, ModelInvalid, Refused
from mooncaked.types import Role

OPTIONS = LocalOptions(
    model="/models/tiny.gguf",
    model_name="tiny",
    nodes=3,
    prefill=2,
    decode=1,
    pool_bytes=1 << 30,
    base_port=17800,
    threads=2,
)


def planned(options: LocalOptions = OPTIONS) -> list[ProcessPlan]:
    return plan(options, Path("/state dir"), Path("/run/s"))


def test_the_parts_start_in_order_and_every_engine_has_its_own_node() -> None:
    assert [process.name for process in planned()] == [
        "etcd",
        "node-1",
        "node-2",
        "node-3",
        "prefill-1",
        "prefill-2",
        "decode-1",
    ]
    engines = [process for process in planned() if process.part is Part.ENGINE]
    assert [engine.node for engine in engines] == ["node-1", "node-2", "node-3"]
    assert [engine.role for engine in engines] == [Role.PREFILL, Role.PREFILL, Role.DECODE]


def test_no_two_processes_share_a_port_however_many_there_are() -> None:
    largest = msgspec.structs.replace(OPTIONS, nodes=16, prefill=16, decode=16, base_port=65135)
    ports = [port for process in planned(largest) for port in process.ports.values()]
    assert len(ports) == len(set(ports)) == 2 + 3 * 16 + 32
    assert max(ports) < 65536


def test_a_nodes_configuration_is_one_that_the_daemon_accepts(tmp_path: Path) -> None:
    node = planned()[2]
    path = tmp_path / "mooncaked.toml"
    path.write_text(node.config or "")
    config = load_config(path)
    assert config.node.id == "node-2"
    assert config.node.state_dir == Path("/state dir/node-2")
    assert config.listen.client_socket == Path("/run/s/node-2.sock")
    assert config.dram.size == 1 << 30
    assert config.etcd.endpoints == ["127.0.0.1:17800"]
    assert f"http://{config.conductor.listen}" == gateway_urls(OPTIONS)[1]
    assert config.conductor.slo_ttft == 120


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes is 0"),
        ({"nodes": 17}, "--nodes is 17; 1 to 16"),
        ({"prefill": 0}, "at least 1 each"),
        ({"decode": 32}, "at most 32 together"),
        ({"base_port": 80}, "--base-port is 80"),
        ({"threads": 0}, "--threads is 0"),
        ({"pool_bytes": 1 << 20}, "--pool is 1MiB; .* at least 64MiB"),
    ],
)
def test_options_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        planned(msgspec.structs.replace(OPTIONS, **change))


def running() -> ClusterState:
    """A cluster of which this very process is the only one."""
    mine = ProcessState(
        name="etcd",
        part=Part.ETCD,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()) or 0,
        argv=[],
        ports={},
        log="",
    )
    return msgspec.structs.replace(fresh_state(OPTIONS, "/mooncake", Path("/run/s")), processes=[mine])


def test_a_running_cluster_keeps_its_options() -> None:
    assert resolve(Asked(), running(), Progress()) == OPTIONS
    assert resolve(Asked(nodes=3, pool="1GiB"), running(), Progress()) == OPTIONS
    with pytest.raises(Refused, match=r"already runs, with --nodes 3.*mooncakectl down"):
        resolve(Asked(nodes=5), running(), Progress())
    with pytest.raises(Refused, match="already runs, with --pool 1GiB"):
        resolve(Asked(pool="2GiB"), running(), Progress())


def test_a_size_without_a_unit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--pool: '7' has no unit"):
        resolve(Asked(pool="7"), running(), Progress())


def test_pools_shrink_on_a_machine_that_is_short_of_memory() -> None:
    assert default_pool(64 << 30, 3) == 1 << 30
    assert default_pool(6 << 30, 3) == 512 << 20
    assert default_pool(1 << 30, 3) == 128 << 20


def test_a_model_is_named_after_its_file_or_directory(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.Q4.gguf"
    gguf.touch()
    folder = tmp_path / "Tiny-Instruct"
    folder.mkdir()
    (folder / "config.json").touch()
    assert resolve_model(gguf, Progress()) == (gguf, "tiny.Q4")
    assert resolve_model(folder, Progress()) == (folder, "Tiny-Instruct")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="it is not there"):
        resolve_model(tmp_path / "missing.gguf", Progress())
    with pytest.raises(ModelInvalid, match=r"neither a GGUF file nor a directory with a config\.json"):
        resolve_model(tmp_path, Progress())
