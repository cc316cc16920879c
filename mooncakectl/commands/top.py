"""`mooncakectl top`: the cluster live."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import typer

from mooncakectl.commands import instance, node
from mooncakectl.output import Format, Table, View, columns, show_bytes, show_count, show_ms, show_share
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, repeat, run_async
from mooncakectl.records import (
    Answer,
    ClusterRecords,
    conductor_answer,
    engine_health,
    node_answers,
    read_records,
)
from mooncakectl.target import Target, open_etcd, resolve_target
from mooncakectl.web import open_web

app = typer.Typer()


async def top_view(target: Target) -> View:
    """Nodes, instances and the leader, with their load."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        said, healthy, conductor = await asyncio.gather(
            node_answers(web, records.nodes),
            engine_health(web, records.instances),
            conductor_answer(web, records),
        )
    now = time.time()
    nodes = [node.describe(n, said[n.node_id], now) for n in records.nodes]
    loads = instance_loads(conductor)
    instances = [
        {**instance.describe(i, healthy[i.instance_id], now), "load": loads.get(i.instance_id)}
        for i in records.instances
    ]
    totals = sum_up(nodes)
    data = {
        "time_s": round(now, 3),
        "leader": records.leader.record.candidate_id if records.leader else None,
        "term": records.leader.term if records.leader else None,
        "totals": totals,
        "nodes": nodes,
        "instances": instances,
    }
    tables = [head_table(records, totals), node.node_table(nodes), load_table(instances)]
    return View(schema="mooncake.top/1", data=data, tables=tables)


def sum_up(nodes: list[dict[str, Any]]) -> dict[str, int]:
    """The figures of all nodes that answer, added up."""
    keys = ("used_bytes", "blocks", "hits", "misses")
    totals = {key: sum(n[key] or 0 for n in nodes) for key in keys}
    return {"capacity_bytes": sum(n["capacity_bytes"].get("dram", 0) for n in nodes), **totals}


def instance_loads(conductor: Answer) -> dict[str, dict[str, Any]]:
    """What the leader has reserved on each instance, by its id."""
    listed = (conductor or {}).get("instances")
    loads = [load for load in listed if isinstance(load, dict)] if isinstance(listed, list) else []
    return {str(load.get("instance_id")): load for load in loads}


def head_table(records: ClusterRecords, totals: dict[str, int]) -> Table:
    """One line about the whole."""
    leader = records.leader
    asked = totals["hits"] + totals["misses"]
    row = [
        f"{leader.record.candidate_id} (term {leader.term})" if leader else "none",
        str(len(records.nodes)),
        str(len(records.instances)),
        f"{show_bytes(totals['used_bytes'])} of {show_bytes(totals['capacity_bytes'])}",
        show_count(totals["blocks"]),
        show_share(totals["hits"], asked),
        time.strftime("%H:%M:%S"),
    ]
    titles = columns("leader", ">nodes", ">instances", ">pools", ">blocks", ">hits", ">at")
    return Table(columns=titles, rows=[row])


def load_table(instances: list[dict[str, Any]]) -> Table:
    """Instances with what runs on them."""
    rows = []
    for item in instances:
        load = item["load"] or {}
        rows.append(
            [
                item["instance_id"],
                item["role"],
                "ready" if item["healthy"] else "unreachable",
                item["node_id"] or "-",
                show_count(load.get("queued")),
                show_ms(load.get("queue_ms")),
                show_count(load.get("running")),
                show_count(load.get("kv_tokens")),
                show_share(load.get("kv_tokens"), load.get("kv_capacity_tokens")),
            ]
        )
    figures = (">queued", ">wait", ">running", ">KV tokens", ">of room")
    titles = columns("instance", "role", "state", "node", *figures)
    return Table(columns=titles, rows=rows, empty="no instance is registered")


@app.command("top")
def top_command(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, help="Seconds between updates.")
    ] = 2.0,
    times: Annotated[
        int | None, typer.Option("--times", "-n", min=1, help="Updates. Default: no end.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Same as -n 1.")] = False,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Watch the cluster live; Ctrl-C ends it."""
    target = resolve_target(etcd, config)
    repeat(lambda: run_async(top_view(target)), output, interval, 1 if once else times, clear=not once)
