"""The daemon's configuration: every key, its meaning, unit, default, and whether it applies live.

The structs below are the one source. `etc/mooncaked.toml`, `--print-config` and docs/configuration.md are
made from them (`mooncaked.config_text`). Values come, later ones over earlier ones, from the defaults here,
the TOML file, `MOONCAKED_<SECTION>_<KEY>` in the environment, and `--set section.key=value`.

Leases. Of a lease's `ttl`, a keepalive is sent every ttl/3, may take ttl/6 at one etcd member before the next
is asked, and the holder stops to rely on the lease ttl/5 (the margin, for clock drift and pauses) before etcd
may end it. It counts from the *send* time of the last keepalive, or grant, that was acknowledged. So

    ttl/3 (interval) + 2 ttl/6 (two dead members in a row) + ttl/5 (margin) = 13/15 ttl < ttl  by construction
    request_timeout (a slow grant) + 2 ttl/6 + ttl/5 < ttl, or: request_timeout < 7/15 ttl     by `check`

The second holds for `etcd.lease_ttl`. A conductor's lease is shorter, so that another can take over quickly;
where its grant came too late, the candidate does not lead by it and asks for another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from mooncaked.errors import ConfigError
from mooncaked.settings import Key, Section, build, from_environment, from_overrides, read_toml
from mooncaked.units import format_duration, split_address

POLICIES = ("algorithm1", "random", "round-robin", "least-load", "prefix-only")
ADMISSIONS = ("off", "baseline", "early", "predicted")
GRANT_SHARE_MAX = 7 / 15  # of a lease's ttl: what a request to etcd may take, see above
SOCKET_PATH_BYTES_MAX = 107  # of sockaddr_un

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class NodeConfig(Section, frozen=True, kw_only=True):
    """Who this node is."""

    id: Annotated[
        str, Key(kind="text", doc="Name of the node. Empty: made once and kept in state_dir/node-id.")
    ] = ""
    state_dir: Annotated[Path, Key(kind="path", doc="Where the node keeps what must survive a restart.")] = (
        Path("/var/lib/mooncaked")
    )
    labels: Annotated[
        dict[str, str],
        Key(
            kind="table",
            live=True,
            doc='Free labels for placement, for example { zone = "a", rack = "r12" }.',
        ),
    ] = msgspec.field(default_factory=dict)
    advertise_host: Annotated[
        str, Key(kind="text", doc="Host name or address that other nodes reach this one by. Empty: guessed.")
    ] = ""
    drain_timeout: Annotated[
        float,
        Key(
            kind="duration",
            live=True,
            low=0,
            high=3600,
            doc="How long SIGTERM waits for readers and transfers that are under way, before it ends them.",
        ),
    ] = 5.0


class ListenConfig(Section, frozen=True, kw_only=True):
    """Where the node listens."""

    client_socket: Annotated[Path, Key(kind="path", doc="Unix socket for the engines on this node.")] = Path(
        "/run/mooncaked/client.sock"
    )
    peer: Annotated[
        str, Key(kind="text", doc="host:port for other nodes and conductors. Port 0: any free one.")
    ] = "0.0.0.0:7801"
    http: Annotated[
        str, Key(kind="text", doc="host:port of /livez, /readyz, /healthz, /metrics and /v1/status.")
    ] = "127.0.0.1:7802"
    token_file: Annotated[
        Path | None,
        Key(
            kind="path",
            doc="File with the secret that peers and clients must show, one for the cluster. Empty: none.",
        ),
    ] = None


class DramConfig(Section, frozen=True, kw_only=True):
    """The pool of host memory that blocks live in."""

    size: Annotated[
        int,
        Key(
            kind="size",
            low=1 << 20,
            doc="Memory of the pool, taken and touched at start. Units: B KiB MiB GiB TiB.",
        ),
    ] = 4 << 30
    high_watermark: Annotated[
        float,
        Key(
            kind="number",
            live=True,
            low=0.01,
            high=1,
            doc="Share of the pool in use at which eviction starts.",
        ),
    ] = 0.95
    low_watermark: Annotated[
        float,
        Key(
            kind="number",
            live=True,
            low=0.01,
            high=1,
            doc="Share of the pool in use at which eviction stops.",
        ),
    ] = 0.90
    prefault_threads: Annotated[
        int, Key(kind="count", low=1, high=256, doc="Threads that touch the pool's pages at start.")
    ] = 4


class EtcdConfig(Section, frozen=True, kw_only=True):
    """The etcd cluster that nodes, instances and the leader are recorded in."""

    endpoints: Annotated[
        list[str],
        Key(
            kind="texts",
            doc="Members of the etcd cluster, each host:port. TLS with ca_file or https://host:port.",
        ),
    ] = msgspec.field(default_factory=lambda: ["127.0.0.1:2379"])
    prefix: Annotated[
        str, Key(kind="text", doc="Where in etcd this cluster lives. Two clusters need two prefixes.")
    ] = "/mooncake"
    ca_file: Annotated[
        Path | None, Key(kind="path", doc="CA certificate (PEM) that etcd's certificate is checked against.")
    ] = None
    cert_file: Annotated[
        Path | None, Key(kind="path", doc="Client certificate (PEM) shown to etcd. Needs key_file.")
    ] = None
    key_file: Annotated[Path | None, Key(kind="path", doc="Private key (PEM) of cert_file.")] = None
    user: Annotated[str, Key(kind="text", doc="etcd user. Needs password_file. Empty: no log-in.")] = ""
    password_file: Annotated[Path | None, Key(kind="path", doc="File with the password of user.")] = None
    lease_ttl: Annotated[
        float,
        Key(
            kind="duration",
            low=2,
            high=3600,
            doc="How long after its last sign of life a node counts as lost. Whole seconds.",
        ),
    ] = 10.0
    request_timeout: Annotated[
        float,
        Key(
            kind="duration",
            low=0.1,
            high=60,
            doc="Limit of one request to etcd. Under 7/15 of lease_ttl: a slow grant still leaves a lease.",
        ),
    ] = 3.0


class ConductorConfig(Section, frozen=True, kw_only=True):
    """The conductor candidate of this node: scheduler and OpenAI-compatible gateway."""

    enabled: Annotated[
        bool, Key(kind="flag", doc="Run a candidate, in a process of its own, beside the node.")
    ] = True
    listen: Annotated[
        str, Key(kind="text", doc="host:port of the gateway and the scheduling API. Port 0: any free one.")
    ] = "0.0.0.0:7803"
    lease_ttl: Annotated[
        float,
        Key(
            kind="duration",
            low=2,
            high=60,
            doc="How long after its last sign of life a leader is replaced. Whole seconds.",
        ),
    ] = 2.0
    policy: Annotated[
        str, Key(kind="text", choices=POLICIES, doc="How instances are chosen for a request.")
    ] = "algorithm1"
    balancing_threshold: Annotated[
        float,
        Key(
            kind="number",
            low=1,
            doc="algorithm1: pull from a peer whose prefix is longer than the local one by this factor.",
        ),
    ] = 4.0
    admission: Annotated[
        str,
        Key(
            kind="text",
            choices=ADMISSIONS,
            doc="Refuse at arrival: off, baseline (queue limits), early (load now), predicted (load then).",
        ),
    ] = "predicted"
    slo_ttft: Annotated[
        float, Key(kind="duration", live=True, low=0.001, doc="Promise: time to the first token.")
    ] = 30.0
    slo_tbt: Annotated[
        float, Key(kind="duration", live=True, low=0.001, doc="Promise: time between two tokens.")
    ] = 0.1
    body_max: Annotated[
        int, Key(kind="size", low=1 << 10, high=1 << 30, doc="Largest request body that the gateway reads.")
    ] = 16 << 20
    request_timeout: Annotated[
        float, Key(kind="duration", low=1, doc="Limit of one request, from arrival to its last token.")
    ] = 600.0
    index_blocks_max: Annotated[
        int, Key(kind="count", low=1000, doc="Blocks that the prefix index remembers; about 100 bytes each.")
    ] = 10_000_000


class LogConfig(Section, frozen=True, kw_only=True):
    """The log, on standard error."""

    level: Annotated[
        str,
        Key(
            kind="text",
            live=True,
            choices=("debug", "info", "warning", "error"),
            doc="Least serious line to log.",
        ),
    ] = "info"
    format: Annotated[
        str,
        Key(
            kind="text",
            live=True,
            choices=("text", "json"),
            doc="text (key=value) or json (one object a line).",
        ),
    ] = "text"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `Config()` is the defaults."""

    node: NodeConfig = NodeConfig()
    listen: ListenConfig = ListenConfig()
    dram: DramConfig = DramConfig()
    etcd: EtcdConfig = EtcdConfig()
    conductor: ConductorConfig = ConductorConfig()
    log: LogConfig = LogConfig()


# --- load --------------------------------------------------------------------------------------------------

ENVIRONMENT_PREFIX = "MOONCAKED_"


def load_config(
    path: Path | None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration of the file (none: defaults), `MOONCAKED_*` in `environment` and `--set` overrides.

    Raises `ConfigError` for anything unknown, ill-typed, without a unit, or that does not fit together."""
    origin = str(path) if path else "configuration"
    layers = [(origin, read_toml(path))] if path else []
    layers.append(("environment", from_environment(Config, ENVIRONMENT_PREFIX, environment or {})))
    layers.append(("--set", from_overrides(Config, "--set", overrides or {})))
    config = build(Config, layers)
    check(config, origin)
    return config


def check(config: Config, origin: str) -> None:
    """Raise `ConfigError` where values that are fine one by one do not fit together."""

    def refuse(key: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(file=origin, key=key, problem=problem, remedy=remedy)

    for rule in (_check_names, _check_addresses, _check_paths, _check_watermarks, _check_leases, _check_etcd):
        rule(config, refuse)


Refuse = Callable[[str, str, str], ConfigError]


def _check_names(config: Config, refuse: Refuse) -> None:
    if config.node.id and not _NAME.fullmatch(config.node.id):
        remedy = "Use 1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise refuse("node.id", f"{config.node.id!r} is no usable name", remedy)
    if any(not name for name in config.node.labels):
        raise refuse("node.labels", "a label has no name", 'Write { name = "value" }')
    host = config.node.advertise_host
    if host and (any(c.isspace() or c == "/" for c in host) or host in ("0.0.0.0", "::", "[::]")):
        raise refuse(
            "node.advertise_host", f"{host!r} is no address that others can reach", "Write a host name or IP"
        )


def _check_addresses(config: Config, refuse: Refuse) -> None:
    used: dict[int, tuple[str, str]] = {}
    listeners = {"listen.peer": config.listen.peer, "listen.http": config.listen.http}
    if config.conductor.enabled:
        listeners["conductor.listen"] = config.conductor.listen
    for key, address in listeners.items():
        try:
            host, port = split_address(address)
        except ValueError as error:
            raise refuse(key, str(error), "Write host:port, for example 0.0.0.0:7801") from error
        other_key, other_host = used.get(port, ("", ""))
        if port and other_key and (host == other_host or {host, other_host} & {"0.0.0.0", "::"}):
            raise refuse(
                key, f"port {port} is also that of {other_key}", "Give each listener a port of its own"
            )
        used[port] = (key, host)


def _check_paths(config: Config, refuse: Refuse) -> None:
    path = str(config.listen.client_socket)
    if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
        problem = (
            f"the path has {len(path.encode())} bytes, a unix socket's has at most {SOCKET_PATH_BYTES_MAX}"
        )
        raise refuse("listen.client_socket", problem, "Use a shorter path")
    files = {"listen.token_file": config.listen.token_file, "etcd.password_file": config.etcd.password_file}
    files |= {f"etcd.{name}": getattr(config.etcd, name) for name in ("ca_file", "cert_file", "key_file")}
    for key, file in files.items():
        if file is not None and not file.is_file():
            raise refuse(key, f"there is no file {file}", "Correct the path, or create the file")


def _check_watermarks(config: Config, refuse: Refuse) -> None:
    low, high = config.dram.low_watermark, config.dram.high_watermark
    if not low < high:
        problem = f"{low} is not below high_watermark ({high})"
        raise refuse(
            "dram.low_watermark", problem, "Eviction runs from the high down to the low one: lower it"
        )


def _check_leases(config: Config, refuse: Refuse) -> None:
    for key, ttl in {
        "etcd.lease_ttl": config.etcd.lease_ttl,
        "conductor.lease_ttl": config.conductor.lease_ttl,
    }.items():
        if ttl != int(ttl):
            problem = f"{format_duration(ttl)} is no whole number of seconds"
            raise refuse(key, problem, "etcd counts leases in whole seconds: round it")
    ttl, timeout = config.etcd.lease_ttl, config.etcd.request_timeout
    if timeout >= ttl * GRANT_SHARE_MAX:
        limit = format_duration(round(ttl * GRANT_SHARE_MAX, 3))
        problem = f"{format_duration(timeout)} is too long for a lease_ttl of {format_duration(ttl)}"
        raise refuse("etcd.request_timeout", problem, f"Set it below {limit}, or raise lease_ttl")


def endpoint_address(endpoint: str) -> tuple[str, int]:
    """Host and port of one of `etcd.endpoints`, with or without http:// or https://; raises `ValueError`."""
    return split_address(endpoint.removeprefix("http://").removeprefix("https://"))


def _check_etcd(config: Config, refuse: Refuse) -> None:
    etcd = config.etcd
    if not etcd.endpoints:
        raise refuse(
            "etcd.endpoints", "the list is empty", 'Name one member at least, for example ["127.0.0.1:2379"]'
        )
    for endpoint in etcd.endpoints:
        try:
            _, port = endpoint_address(endpoint)
        except ValueError as error:
            raise refuse("etcd.endpoints", str(error), "Write host:port or https://host:port") from error
        if port == 0:
            raise refuse(
                "etcd.endpoints",
                f"{endpoint!r} has port 0",
                "Write the port that etcd listens on, often 2379",
            )
    if not etcd.prefix.startswith("/") or etcd.prefix.endswith("/") or "//" in etcd.prefix:
        remedy = "Begin it with one slash and end it without, for example /mooncake"
        raise refuse("etcd.prefix", f"{etcd.prefix!r} is no usable prefix", remedy)
    pairs = (("cert_file", "key_file"), ("key_file", "cert_file"), ("cert_file", "ca_file"))
    for one, other in (*pairs, ("user", "password_file"), ("password_file", "user")):
        if getattr(etcd, one) and not getattr(etcd, other):
            raise refuse(
                f"etcd.{one}", f"it needs etcd.{other}, which is not set", f"Set etcd.{other} as well"
            )
