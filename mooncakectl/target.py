"""Which cluster a command talks to: etcd's endpoints, the key prefix, credentials.

In this order: `--etcd` or MOONCAKE_ETCD; `--config` or MOONCAKE_CONFIG (the [etcd] section of a
mooncaked.toml, for TLS and passwords); the local cluster of `mooncakectl up`; 127.0.0.1:2379.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from mooncakectl.local.plan import gateway_urls
from mooncakectl.local.state import default_directory, read_state
from mooncaked.cluster.connect import connect
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.config import EtcdConfig, load_config
from mooncaked.errors import InvalidRequest
from mooncaked.units import split_address

DEFAULT_ENDPOINT = "127.0.0.1:2379"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cluster's records are."""

    etcd: EtcdConfig
    gateways: list[str] = []  # base URLs that are known without etcd: those of the local cluster


def resolve_target(etcd: str | None, config: Path | None, directory: Path | None = None) -> Target:
    """Apply the order above; raises `InvalidRequest` or `ConfigError` for what cannot be read."""
    target = _configured(config, directory or default_directory())
    section, gateways = target.etcd, target.gateways
    if etcd:
        section, gateways = msgspec.structs.replace(section, endpoints=parse_endpoints(etcd)), []
    if prefix := os.environ.get("MOONCAKE_PREFIX"):
        section = msgspec.structs.replace(section, prefix=prefix)
    return Target(etcd=section, gateways=gateways)


def _configured(config: Path | None, directory: Path) -> Target:
    if config is not None:
        return Target(etcd=load_config(config).etcd)
    local = read_state(directory)
    if local is not None:
        section = EtcdConfig(endpoints=[local.etcd], prefix=local.prefix)
        return Target(etcd=section, gateways=gateway_urls(local.options))
    return Target(etcd=EtcdConfig(endpoints=[DEFAULT_ENDPOINT]))


def parse_endpoints(text: str) -> list[str]:
    """`host:port,host:port` as a list; raises `InvalidRequest`."""
    endpoints = [part.strip().rstrip("/") for part in text.split(",")]
    for endpoint in endpoints:
        try:
            split_address(endpoint.removeprefix("http://").removeprefix("https://"))
        except ValueError as error:
            raise InvalidRequest(problem=f"--etcd: {error}. Write host:port, several with commas.") from error
    return endpoints


@asynccontextmanager
async def open_etcd(target: Target, timeout_s: float | None = None) -> AsyncIterator[EtcdSession]:
    """A session on the target's etcd; nothing is sent before it is used."""
    section = target.etcd
    if timeout_s is not None:
        section = msgspec.structs.replace(section, request_timeout=timeout_s)
    async with connect(section) as session:
        yield session
