"""`mooncakectl status`: is the cluster well?"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import msgspec
import typer

from mooncakectl.commands import instance, node
from mooncakectl.commands.node_disks import disk_problems
from mooncakectl.output import Format, Table, View, columns
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, WatchOption, show
from mooncakectl.records import ClusterRecords, engine_health, node_answers, read_records
from mooncakectl.target import Target, open_etcd
from mooncakectl.web import open_web
from mooncaked.cluster.etcd import MemberStatus
from mooncaked.errors import Unhealthy
from mooncaked.types import NodePhase, NodeRecord
from mooncaked.units import split_address

app = typer.Typer()


def reachable_from_here(node: NodeRecord) -> bool:
    """Whether its HTTP address is one that this machine could reach: many listen on their loopback only."""
    host, _ = split_address(node.http_address)
    return host not in ("127.0.0.1", "::1", "localhost") or node.host == socket.gethostname()


def find_problems(
    records: ClusterRecords, members: list[MemberStatus], silent: set[str], healthy: dict[str, bool]
) -> list[str]:
    """What an operator should look at, most important first. `silent`: ids of nodes that do not answer."""
    problems = [f"etcd member {m.address} does not answer: {m.problem}" for m in members if m.problem]
    if not records.nodes:
        problems.append("no node is registered")
    problems += [f"node {n.node_id} is {n.phase}" for n in records.nodes if n.phase is not NodePhase.READY]
    problems += [
        f"node {n.node_id} does not answer at {n.http_address}"
        for n in records.nodes
        if n.node_id in silent and reachable_from_here(n)
    ]
    if records.leader is None:
        problems.append("no conductor leads")
    problems += [
        f"instance {i.instance_id} does not answer at {i.url}"
        for i in records.instances
        if not healthy[i.instance_id]
    ]
    return problems


async def status_view(target: Target) -> View:
    """The whole cluster at a glance."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        members, said, healthy = await asyncio.gather(
            etcd.members(), node_answers(web, records.nodes), engine_health(web, records.instances)
        )
    now = time.time()
    nodes = [node.describe(n, said[n.node_id], now) for n in records.nodes]
    instances = [instance.describe(i, healthy[i.instance_id], now) for i in records.instances]
    silent = {node_id for node_id, answer in said.items() if answer is None}
    problems = find_problems(records, members, silent, healthy)
    for node_id, answer in said.items():
        problems += disk_problems(node_id, answer)
    data: dict[str, Any] = {
        "healthy": not problems,
        "problems": problems,
        "etcd": msgspec.to_builtins(members),
        "prefix": target.etcd.prefix,
        "leader": leader_data(records),
        "candidates": [msgspec.to_builtins(candidate) for candidate in records.candidates],
        "nodes": nodes,
        "instances": instances,
    }
    tables = [
        summary(records, members, problems),
        node.node_table(nodes, title="Nodes"),
        instance.instance_table(instances, title="Instances"),
    ]
    return View(schema="mooncake.status/1", data=data, tables=tables)


def leader_data(records: ClusterRecords) -> dict[str, Any] | None:
    """The leader for programs."""
    if records.leader is None:
        return None
    return {"term": records.leader.term, **msgspec.to_builtins(records.leader.record)}


def summary(records: ClusterRecords, members: list[MemberStatus], problems: list[str]) -> Table:
    """The lines above the lists."""
    answering = sum(not member.problem for member in members)
    versions = ", ".join(sorted({member.version for member in members if member.version}))
    leader = records.leader
    leads = f"{leader.record.candidate_id} (term {leader.term})" if leader else "none"
    rows = [
        ("state", "ready" if not problems else "; ".join(problems)),
        (
            "etcd",
            f"{answering} of {len(members)} members answer{f', version {versions}' if versions else ''}",
        ),
        ("leader", leads),
        ("candidates", str(len(records.candidates))),
        ("gateways", ", ".join(records.gateways()) or "none"),
    ]
    return Table(columns=columns("cluster", ""), rows=rows)


@app.command("status")
def status_command(
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """Show the cluster at a glance. Exits with 10 when something is wrong."""
    view = show(status_view, etcd, config, output, watch)
    problems = view.data["problems"]
    if isinstance(problems, list) and problems:
        raise Unhealthy(what="The cluster", cause="; ".join(problems))
