"""What the shell completes: names that are in etcd now. Quick or not at all, and never an error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

from mooncakectl.target import open_etcd, resolve_target
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.cluster.registry import read_instances, read_nodes
from mooncaked.errors import MooncakeError

BUDGET_S = 0.3


def node_ids(incomplete: str) -> list[str]:
    """Ids of registered nodes that start with `incomplete`."""

    async def read(etcd: EtcdSession, prefix: str) -> Sequence[str]:
        return [node.node_id for node in await read_nodes(etcd, prefix)]

    return _complete(read, incomplete)


def instance_ids(incomplete: str) -> list[str]:
    """Ids of registered instances that start with `incomplete`."""

    async def read(etcd: EtcdSession, prefix: str) -> Sequence[str]:
        return [instance.instance_id for instance in await read_instances(etcd, prefix)]

    return _complete(read, incomplete)


def _complete(read: Callable[[EtcdSession, str], Awaitable[Sequence[str]]], incomplete: str) -> list[str]:
    async def names() -> Sequence[str]:
        target = resolve_target(os.environ.get("MOONCAKE_ETCD"), None)
        async with asyncio.timeout(BUDGET_S), open_etcd(target, BUDGET_S) as etcd:
            return await read(etcd, target.etcd.prefix)

    try:
        return [name for name in asyncio.run(names()) if name.startswith(incomplete)]
    except (MooncakeError, TimeoutError):
        return []
