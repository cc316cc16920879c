"""`mooncakectl node`: the machines that run mooncaked."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer

from mooncakectl.commands import node_pool
from mooncakectl.commands.node_disks import disk_tables, disks_of
from mooncakectl.commands.node_gpus import gpu_tables, gpus_of
from mooncakectl.complete import node_ids
from mooncakectl.output import Format, Table, View, columns, show_age, show_bytes, show_count, show_share
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, WatchOption, show
from mooncakectl.records import Answer, node_answers, read_records
from mooncakectl.target import Target, open_etcd
from mooncakectl.web import open_web
from mooncaked.types import NodeRecord

app = typer.Typer(no_args_is_help=True, help="The nodes: machines that run mooncaked, and their pools.")
app.add_typer(node_pool.app, name="pool")

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", autocompletion=node_ids, help="Id of the node.")]
_POOL_KEYS = ("used_bytes", "pinned_bytes", "blocks", "hits", "misses", "stored", "evicted")


def pool_stats(said: Answer) -> dict[str, Any]:
    """The pool's figures in what a node says of itself; None where it says nothing."""
    pool = (said or {}).get("pool")
    return {key: pool.get(key) if isinstance(pool, dict) else None for key in _POOL_KEYS}


def describe(node: NodeRecord, said: Answer, now_s: float) -> dict[str, Any]:
    """A node for programs: its record, and its own figures where it answers."""
    return {
        **msgspec.to_builtins(node),
        "uptime_s": round(max(0.0, now_s - node.started_at_s), 1),
        "answers": said is not None,
        "not_ready": said.get("not_ready", []) if said is not None else ["it does not answer"],
        **pool_stats(said),
        "disks": disks_of(said),
        "gpus": gpus_of(said),
    }


def node_table(nodes: list[dict[str, Any]], title: str = "") -> Table:
    """Described nodes for people."""
    rows = []
    for node in nodes:
        capacity, hits, misses = node["capacity_bytes"].get("dram"), node["hits"], node["misses"]
        asked = None if hits is None or misses is None else hits + misses
        rows.append(
            [
                node["node_id"],
                node["phase"] if node["answers"] else "unreachable",
                node["peer_address"],
                show_bytes(capacity),
                show_share(node["used_bytes"], capacity),
                show_count(node["blocks"]),
                show_share(hits, asked),
                show_age(node["uptime_s"]),
            ]
        )
    titles = columns("node", "phase", "address", ">pool", ">used", ">blocks", ">hits", ">up for")
    return Table(title=title, columns=titles, rows=rows, empty="no node is registered")


async def list_view(target: Target) -> View:
    """All nodes."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        said = await node_answers(web, records.nodes)
    nodes = [describe(node, said[node.node_id], time.time()) for node in records.nodes]
    return View(schema="mooncake.nodes/1", data={"nodes": nodes}, tables=[node_table(nodes)])


async def show_view(target: Target, node_id: str) -> View:
    """One node in full, with the instances on it."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        record = records.node(node_id)
        said = (await node_answers(web, [record]))[node_id]
    node = describe(record, said, time.time())
    instances = [i.instance_id for i in records.instances if i.node_id == node_id]
    lines = [
        ("node", node_id),
        ("phase", node["phase"]),
        ("not ready", "; ".join(node["not_ready"]) or "-"),
        ("host", f"{record.host}, pid {record.pid}"),
        ("version", record.version),
        ("up for", show_age(node["uptime_s"])),
        ("for peers", record.peer_address),
        ("for HTTP", record.http_address),
        ("for engines", record.client_socket),
        ("labels", ", ".join(f"{k}={v}" for k, v in record.labels.items()) or "none"),
        ("instances", ", ".join(instances) or "none"),
        *((f"pool {tier}", show_bytes(size)) for tier, size in record.capacity_bytes.items()),
        ("used", show_bytes(node["used_bytes"])),
        ("being read", show_bytes(node["pinned_bytes"])),
        ("blocks", show_count(node["blocks"])),
        ("hits", show_count(node["hits"])),
        ("misses", show_count(node["misses"])),
        ("stored", show_count(node["stored"])),
        ("evicted", show_count(node["evicted"])),
    ]
    table = Table(columns=columns("what", "value"), rows=lines)
    return View(
        schema="mooncake.node/1",
        data={"node": {**node, "instances": instances}},
        tables=[table, *disk_tables(said), *gpu_tables(said)],
    )


@app.command("list")
def list_command(
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """List the nodes with the use of their pools."""
    show(list_view, etcd, config, output, watch)


@app.command("show")
def show_command(
    node: NodeArgument,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """Show one node in full."""
    show(lambda target: show_view(target, node), etcd, config, output, watch)
