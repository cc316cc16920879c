"""The daemon's configuration: every key, its meaning, unit, default, and whether it applies live.

The structs of `mooncaked.config_keys` are the one source: `etc/mooncaked.toml`, `--print-config` and
docs/configuration.md are made from them (`mooncaked.config_text`). Values come, later ones over earlier
ones, from the defaults there, the TOML file, `MOONCAKED_<SECTION>_<KEY>` in the environment, and
`--set section.key=value`.

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

from mooncaked.config_keys import (
    ADMISSIONS,
    POLICIES,
    REGIONS_MAX,
    ConductorConfig,
    Config,
    DramConfig,
    EtcdConfig,
    ListenConfig,
    LogConfig,
    NamespacesConfig,
    NodeConfig,
    SsdConfig,
)
from mooncaked.errors import ConfigError
from mooncaked.settings import build, from_environment, from_overrides, read_toml
from mooncaked.units import (
    format_duration,
    format_size,
    parse_duration,
    parse_ranges,
    parse_size,
    split_address,
)

__all__ = [
    "ADMISSIONS",
    "POLICIES",
    "REGIONS_MAX",
    "ConductorConfig",
    "Config",
    "DramConfig",
    "EtcdConfig",
    "ListenConfig",
    "LogConfig",
    "NamespacesConfig",
    "NodeConfig",
    "SsdConfig",
    "check",
    "endpoint_address",
    "load_config",
    "quotas",
    "ssd_devices",
    "ttls_s",
]

SEGMENTS_MIN = 4  # that a disk must have room for
GRANT_SHARE_MAX = 7 / 15  # of a lease's ttl: what a request to etcd may take, see above
SOCKET_PATH_BYTES_MAX = 107  # of sockaddr_un

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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

    for rule in RULES:
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


def _check_regions(config: Config, refuse: Refuse) -> None:
    try:
        parse_ranges(config.dram.numa)
    except ValueError as error:
        raise refuse("dram.numa", str(error), 'Write the nodes as in "0" or "0-1,3"') from error


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


def quotas(config: Config) -> dict[str, int]:
    """Bytes by namespace; raises `ValueError` where one is no size."""
    return {name: parse_size(text) for name, text in config.namespaces.quotas.items()}


def ttls_s(config: Config) -> dict[str, float]:
    """Seconds by namespace; raises `ValueError` where one is no duration."""
    return {name: parse_duration(text) for name, text in config.namespaces.ttls.items()}


def _check_namespaces(config: Config, refuse: Refuse) -> None:
    for key, read, example in (("quotas", quotas, "10GiB"), ("ttls", ttls_s, "1h")):
        try:
            values = read(config)
        except ValueError as error:
            raise refuse(
                f"namespaces.{key}", str(error), f'Write {{ "tenant/model" = "{example}" }}'
            ) from error
        if any(not name or value <= 0 for name, value in values.items()):
            raise refuse(f"namespaces.{key}", "a name is empty, or a value is not over 0", "Leave it out")


def _check_gpu(config: Config, refuse: Refuse) -> None:
    devices = config.gpu.devices
    for device in devices:
        if device != "cpu" and not re.fullmatch(r"cuda:\d+", device):
            remedy = 'Write "cuda:0", "cuda:1" and so on'
            raise refuse("gpu.devices", f"{device!r} is no name of a device", remedy)
        if devices.count(device) > 1:
            raise refuse("gpu.devices", f"{device!r} comes twice", "Name each device once")
    if config.gpu.size % 4096:
        problem = f"{config.gpu.size} bytes are no multiple of 4 KiB"
        raise refuse("gpu.size", problem, "Round it, for example to whole MiB")


def ssd_devices(config: Config) -> dict[Path, int]:
    """Bytes by directory; raises `ValueError` where one is no size."""
    return {Path(name): parse_size(text) for name, text in config.ssd.devices.items()}


def _check_ssd(config: Config, refuse: Refuse) -> None:
    try:
        devices = ssd_devices(config)
    except ValueError as error:
        raise refuse("ssd.devices", str(error), 'Write { "/mnt/nvme0" = "1TiB" }') from error
    if any(not directory.is_absolute() for directory in devices):
        raise refuse("ssd.devices", "a directory is no absolute path", "Begin it with a slash")
    if len({str(directory) for directory in devices}) < len(config.ssd.devices):
        raise refuse("ssd.devices", "a directory comes twice", "Give each disk one directory")
    segment = config.ssd.segment_size
    if segment % 4096:
        raise refuse("ssd.segment_size", f"{segment} bytes are no whole pages", "Use a multiple of 4KiB")
    for directory, size in devices.items():
        if size < SEGMENTS_MIN * segment:
            least = format_size(SEGMENTS_MIN * segment)
            problem = f"{directory} has room for less than {SEGMENTS_MIN} segments"
            raise refuse("ssd.devices", problem, f"Give it {least} at least, or lower ssd.segment_size")


RULES = (
    _check_names,
    _check_addresses,
    _check_paths,
    _check_watermarks,
    _check_regions,
    _check_gpu,
    _check_leases,
    _check_etcd,
    _check_namespaces,
    _check_ssd,
)
