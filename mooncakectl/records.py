"""What the cluster says of itself in etcd, and what its parts say of themselves over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from mooncakectl.web import get_json
from mooncaked.cluster.etcd import EtcdSession
from mooncaked.cluster.registry import (
    Leader,
    read_candidates,
    read_instances,
    read_leader,
    read_nodes,
)
from mooncaked.errors import MooncakeError, NoLeader, NotFound
from mooncaked.types import CandidateRecord, InstanceRecord, NodeRecord

Answer = dict[str, Any] | None  # None: it did not answer


class ClusterRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is registered."""

    nodes: list[NodeRecord]
    instances: list[InstanceRecord]
    candidates: list[CandidateRecord]  # the leader first
    leader: Leader | None

    def gateways(self) -> list[str]:
        """Base URLs of all gateways, the leader's first."""
        return [candidate.gateway_url.rstrip("/") for candidate in self.candidates]

    def require_leader(self) -> Leader:
        """The leader; raises `NoLeader`."""
        if self.leader is None:
            raise NoLeader(detail="no conductor candidate is registered in etcd")
        return self.leader

    def node(self, node_id: str) -> NodeRecord:
        """The node of that id; raises `NotFound`."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        raise NotFound(kind="Node", name=node_id, remedy=known("Nodes", (n.node_id for n in self.nodes)))

    def instance(self, instance_id: str) -> InstanceRecord:
        """The instance of that id; raises `NotFound`."""
        for instance in self.instances:
            if instance.instance_id == instance_id:
                return instance
        names = (i.instance_id for i in self.instances)
        raise NotFound(kind="Instance", name=instance_id, remedy=known("Instances", names))


def known(what: str, names: Iterable[str]) -> str:
    """A sentence that lists the names there are."""
    listed = ", ".join(sorted(names))
    return f"{what} are: {listed}." if listed else f"There are no {what.lower()}."


async def read_records(etcd: EtcdSession, prefix: str) -> ClusterRecords:
    """All records under `prefix`; raises what the session raises."""
    nodes, instances, candidates, leader = await asyncio.gather(
        read_nodes(etcd, prefix),
        read_instances(etcd, prefix),
        read_candidates(etcd, prefix),
        read_leader(etcd, prefix),
    )
    return ClusterRecords(nodes=nodes, instances=instances, candidates=candidates, leader=leader)


async def answer(web: aiohttp.ClientSession, url: str, what: str) -> Answer:
    """The JSON at `url`, or None when `what` does not answer."""
    try:
        return await get_json(web, url, what)
    except MooncakeError:
        return None


async def node_answers(web: aiohttp.ClientSession, nodes: Iterable[NodeRecord]) -> dict[str, Answer]:
    """What each node says at /v1/status, by node id."""
    listed = list(nodes)
    asked = (answer(web, f"http://{node.http_address}/v1/status", node.node_id) for node in listed)
    return dict(zip((node.node_id for node in listed), await asyncio.gather(*asked), strict=True))


async def engine_health(web: aiohttp.ClientSession, instances: Iterable[InstanceRecord]) -> dict[str, bool]:
    """Whether each engine answers /health with 200, by instance id."""

    async def healthy(instance: InstanceRecord) -> bool:
        try:
            async with web.get(f"{instance.url.rstrip('/')}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    listed = list(instances)
    found = await asyncio.gather(*(healthy(instance) for instance in listed))
    return dict(zip((instance.instance_id for instance in listed), found, strict=True))


async def conductor_answer(web: aiohttp.ClientSession, records: ClusterRecords) -> Answer:
    """What the leader says at /v1/conductor."""
    if records.leader is None:
        return None
    url = records.leader.record.gateway_url.rstrip("/")
    return await answer(web, f"{url}/v1/conductor", "the leader")
