"""What the local cluster consists of: which processes, on which ports, with which configuration. Pure."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path

import msgspec

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.errors import InvalidRequest
from mooncaked.types import Role
from mooncaked.units import format_size

PREFIX = "/mooncake"
HOST = "127.0.0.1"
SHM = Path("/dev/shm")
NODES_MAX = 16
ENGINES_MAX = 32
BASE_PORT = 17800
BASE_PORT_MAX = 65535 - 400
_ENGINE_OFFSET = 200


class Part(StrEnum):
    """What a process of the local cluster is, in the order in which they start."""

    ETCD = "etcd"
    NODE = "node"
    ENGINE = "engine"


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `mooncakectl up` was asked for; kept in cluster.json."""

    model: str  # path of a GGUF file or a Hugging Face directory
    model_name: str  # what requests call it
    nodes: int
    prefill: int
    decode: int
    pool_bytes: int  # of each node
    base_port: int
    threads: int  # of each engine


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process to run."""

    name: str
    part: Part
    argv: list[str]
    ports: dict[str, int]  # by use
    node: str | None = None  # the node that an engine belongs to
    role: Role | None = None  # of an engine
    config: str | None = None  # TOML of a node, for `config_path`
    config_path: Path | None = None
    ready_url: str | None = None  # answers 200 once the process serves


def check_options(options: LocalOptions) -> None:
    """Raise `InvalidRequest` for counts and ports that cannot be."""
    if not 1 <= options.nodes <= NODES_MAX:
        raise InvalidRequest(problem=f"--nodes is {options.nodes}; 1 to {NODES_MAX} can run on one machine.")
    engines = options.prefill + options.decode
    if options.prefill < 1 or options.decode < 1 or engines > ENGINES_MAX:
        problem = f"--prefill and --decode need at least 1 each and at most {ENGINES_MAX} together."
        raise InvalidRequest(problem=problem)
    if not 1024 <= options.base_port <= BASE_PORT_MAX:
        problem = f"--base-port is {options.base_port}; it must lie between 1024 and {BASE_PORT_MAX}."
        raise InvalidRequest(problem=problem)
    if options.threads < 1:
        raise InvalidRequest(problem=f"--threads is {options.threads}; an engine needs at least 1.")
    if options.pool_bytes < 64 << 20:
        problem = f"--pool is {format_size(options.pool_bytes)}; a node's pool needs at least 64MiB."
        raise InvalidRequest(problem=problem)


def etcd_address(options: LocalOptions) -> str:
    """`host:port` of the local etcd."""
    return f"{HOST}:{options.base_port}"


def gateway_urls(options: LocalOptions) -> list[str]:
    """Base URL of every node's gateway."""
    return [f"http://{HOST}:{_node_ports(options, i)['gateway']}" for i in range(1, options.nodes + 1)]


def etcd_server(options: LocalOptions, directory: Path) -> EtcdServer:
    """The etcd of the cluster, not started."""
    log = log_path(directory, "etcd")
    return EtcdServer(directory / "etcd", options.base_port, options.base_port + 1, log)


def log_path(directory: Path, name: str) -> Path:
    """Where the process `name` logs."""
    return directory / "logs" / f"{name}.log"


def plan(options: LocalOptions, directory: Path, sockets: Path) -> list[ProcessPlan]:
    """All processes of the cluster in start order; `directory` holds their state, `sockets` their sockets."""
    check_options(options)
    nodes = [_node(options, i, directory, sockets) for i in range(1, options.nodes + 1)]
    return [_etcd(options, directory), *nodes, *_engines(options, sockets)]


def _etcd(options: LocalOptions, directory: Path) -> ProcessPlan:
    argv = etcd_server(options, directory).command()
    ports = {"client": options.base_port, "peer": options.base_port + 1}
    ready_url = f"http://{etcd_address(options)}/health"
    return ProcessPlan(name="etcd", part=Part.ETCD, argv=argv, ports=ports, ready_url=ready_url)


def _node_ports(options: LocalOptions, number: int) -> dict[str, int]:
    first = options.base_port + 10 * number
    return {"peer": first, "http": first + 1, "gateway": first + 2}


def _node(options: LocalOptions, number: int, directory: Path, sockets: Path) -> ProcessPlan:
    name, ports = f"node-{number}", _node_ports(options, number)
    path = directory / name / "mooncaked.toml"
    return ProcessPlan(
        name=name,
        part=Part.NODE,
        argv=[sys.executable, "-m", "mooncaked", "--config", str(path)],
        ports=ports,
        node=name,
        config=_node_config(options, name, ports, directory / name, socket_path(sockets, name)),
        config_path=path,
        ready_url=f"http://{HOST}:{ports['http']}/readyz",
    )


def socket_path(sockets: Path, node: str) -> Path:
    """The unix socket that engines reach `node` by."""
    return sockets / f"{node}.sock"


def shm_path(socket: Path) -> Path:
    """Where a node's memory outlives it: named like the directory of the sockets, private to this user."""
    return SHM / socket.parent.name


def _node_config(options: LocalOptions, name: str, ports: dict[str, int], state: Path, socket: Path) -> str:
    """A node's configuration; its promises suit a small model on a few cores, not a GPU."""
    return f"""\
# Written by `mooncakectl up`, which writes it again at the next start of this node.
[node]
id = "{name}"
state_dir = {_quoted(state)}
advertise_host = "{HOST}"

[listen]
client_socket = {_quoted(socket)}
peer = "{HOST}:{ports["peer"]}"
http = "{HOST}:{ports["http"]}"

[dram]
size = "{format_size(options.pool_bytes)}"
prefault_threads = 2
shm_dir = {_quoted(shm_path(socket))}

[etcd]
endpoints = ["{etcd_address(options)}"]
prefix = "{PREFIX}"

[conductor]
listen = "{HOST}:{ports["gateway"]}"
slo_ttft = "120s"
slo_tbt = "2s"
"""


def _quoted(path: Path) -> str:
    """As a TOML text."""
    return json.dumps(str(path), ensure_ascii=False)


def _engines(options: LocalOptions, sockets: Path) -> list[ProcessPlan]:
    """Prefill instances first; each on the next node in turn, so that blocks have to travel."""
    roles = [(Role.PREFILL, i) for i in range(1, options.prefill + 1)]
    roles += [(Role.DECODE, i) for i in range(1, options.decode + 1)]
    return [_engine(options, sockets, index, role, number) for index, (role, number) in enumerate(roles)]


def _engine(options: LocalOptions, sockets: Path, index: int, role: Role, number: int) -> ProcessPlan:
    name, node = f"{role}-{number}", f"node-{index % options.nodes + 1}"
    port = options.base_port + _ENGINE_OFFSET + index
    argv = [sys.executable, "-m", "mooncaked.engines.reference", "--model", options.model]
    argv += ["--role", str(role), "--listen", f"{HOST}:{port}", "--store", str(socket_path(sockets, node))]
    argv += ["--etcd", etcd_address(options), "--prefix", PREFIX, "--instance-id", name, "--node-id", node]
    argv += ["--threads", str(options.threads), "--model-name", options.model_name]
    return ProcessPlan(
        name=name,
        part=Part.ENGINE,
        argv=argv,
        ports={"http": port},
        node=node,
        role=role,
        ready_url=f"http://{HOST}:{port}/health",
    )
