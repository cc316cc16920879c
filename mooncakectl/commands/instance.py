"""`mooncakectl instance`: the inference engines."""

from __future__ import annotations

import re
import sys
import time
from typing import Annotated, Any

import msgspec
import typer

from mooncakectl.complete import instance_ids, node_ids
from mooncakectl.output import Format, Table, View, columns, show_age, show_bytes, show_count
from mooncakectl.params import (
    ConfigOption,
    EtcdOption,
    OutputOption,
    WatchOption,
    YesOption,
    confirm,
    run_async,
    show,
)
from mooncakectl.records import engine_health, read_records
from mooncakectl.target import Target, open_etcd, resolve_target
from mooncakectl.web import open_web
from mooncaked.cluster.keys import instance_key
from mooncaked.cluster.kv import Delete, Put, absent, unchanged_since
from mooncaked.cluster.records import encode
from mooncaked.errors import InvalidRequest, Refused
from mooncaked.keys import HASH_NAME, check_namespace
from mooncaked.types import InstanceRecord, Role

app = typer.Typer(no_args_is_help=True, help="The instances: inference engine processes.")

InstanceArgument = Annotated[
    str, typer.Argument(metavar="INSTANCE", autocompletion=instance_ids, help="Id of the instance.")
]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_URL = re.compile(r"https?://[^\s/]+(/.*)?")


def describe(instance: InstanceRecord, healthy: bool | None, now_s: float) -> dict[str, Any]:
    """An instance for programs: its record, and whether it answers."""
    uptime = round(max(0.0, now_s - instance.started_at_s), 1)
    return {**msgspec.to_builtins(instance), "uptime_s": uptime, "healthy": healthy}


def instance_table(instances: list[dict[str, Any]], title: str = "") -> Table:
    """Described instances for people."""
    rows = [
        [
            instance["instance_id"],
            instance["role"],
            "ready" if instance["healthy"] else "unreachable",
            instance["node_id"] or "-",
            instance["model"],
            instance["engine"],
            instance["url"],
            show_count(instance["context_tokens"]),
            "static" if instance["static"] else show_age(instance["uptime_s"]),
        ]
        for instance in instances
    ]
    titles = columns("instance", "role", "state", "node", "model", "engine", "url", ">context", ">up for")
    return Table(title=title, columns=titles, rows=rows, empty="no instance is registered")


async def list_view(target: Target) -> View:
    """All instances."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        healthy = await engine_health(web, records.instances)
    instances = [describe(i, healthy[i.instance_id], time.time()) for i in records.instances]
    data = {"instances": instances}
    return View(schema="mooncake.instances/1", data=data, tables=[instance_table(instances)])


async def show_view(target: Target, instance_id: str) -> View:
    """One instance in full."""
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        record = records.instance(instance_id)
        healthy = (await engine_health(web, [record]))[instance_id]
    instance = describe(record, healthy, time.time())
    lines = [
        ("instance", instance_id),
        ("state", "ready" if healthy else "unreachable"),
        ("role", record.role.value),
        ("model", record.model),
        ("engine", record.engine),
        ("url", record.url),
        ("node", record.node_id or "none"),
        ("pid", "-" if record.static else str(record.pid)),
        ("registered", "by an operator" if record.static else "by itself"),
        ("namespace", record.namespace),
        ("block keys", f"{record.hash_name}, {record.block_tokens} tokens each"),
        ("KV per token", show_bytes(record.kv_bytes_per_token)),
        ("context", f"{show_count(record.context_tokens)} tokens"),
        ("KV room", f"{show_count(record.kv_capacity_tokens)} tokens"),
        ("largest batch", show_count(record.batch_max)),
        ("up for", "-" if record.static else show_age(instance["uptime_s"])),
    ]
    table = Table(columns=columns("what", "value"), rows=lines)
    return View(schema="mooncake.instance/1", data={"instance": instance}, tables=[table])


@app.command("list")
def list_command(
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """List the instances and whether they answer."""
    show(list_view, etcd, config, output, watch)


@app.command("show")
def show_command(
    instance: InstanceArgument,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """Show one instance in full."""
    show(lambda target: show_view(target, instance), etcd, config, output, watch)


# --- changes ---------------------------------------------------------------------------------------------


def check_record(record: InstanceRecord) -> InstanceRecord:
    """Return `record`; raises `InvalidRequest` (or `InvalidKey`) for what no instance can be."""
    if not _NAME.fullmatch(record.instance_id):
        problem = f"{record.instance_id!r} is no usable id: letters, digits, dots, dashes, up to 64."
        raise InvalidRequest(problem=problem)
    if not _URL.fullmatch(record.url):
        raise InvalidRequest(problem=f"--url {record.url!r} is no base URL, e.g. http://10.0.0.7:8000")
    check_namespace(record.namespace)
    return record


async def add(target: Target, record: InstanceRecord) -> None:
    """Register `record` without a lease; raises `Refused` when its id is taken."""
    key = instance_key(target.etcd.prefix, record.instance_id)
    async with open_etcd(target) as etcd:
        result = await etcd.txn([absent(key)], [Put(key, encode(record))])
    if not result.succeeded:
        problem = f"an instance {record.instance_id} is registered already"
        raise Refused(problem=problem, remedy="Choose another id, or remove that one first.")


async def remove(target: Target, instance_id: str) -> None:
    """Remove a static record; raises `NotFound`, or `Refused` for an instance that registered itself."""
    key = instance_key(target.etcd.prefix, instance_id)
    async with open_etcd(target) as etcd:
        record = (await read_records(etcd, target.etcd.prefix)).instance(instance_id)
        stored = await etcd.get(key)
        if not record.static:
            problem = f"instance {instance_id} registered itself and would do so again"
            raise Refused(problem=problem, remedy="Stop the engine; its record goes with it.")
        if stored is not None:
            await etcd.txn([unchanged_since(key, stored.mod_revision)], [Delete(key)])


@app.command("add")
def add_command(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="Id to give it.")],
    url: Annotated[str, typer.Option("--url", help="Base of its OpenAI API, e.g. http://10.0.0.7:8000")],
    role: Annotated[Role, typer.Option("--role", help="What it does.")],
    model: Annotated[str, typer.Option("--model", help="Name that requests use.")],
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang, ...")] = "openai",
    node: Annotated[
        str | None,
        typer.Option("--node", autocompletion=node_ids, help="Node whose store it uses. Default: none."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Of its blocks. Default: the model's name.")
    ] = None,
    hash_name: Annotated[str, typer.Option("--hash", help="How block keys are made.")] = HASH_NAME,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens in a block.")] = 32,
    kv_bytes: Annotated[int, typer.Option("--kv-bytes-per-token", min=0, help="KV size.")] = 0,
    context: Annotated[int, typer.Option("--context-tokens", min=1, help="Longest request.")] = 8192,
    kv_capacity: Annotated[
        int | None, typer.Option("--kv-capacity-tokens", min=1, help="KV room. Default: batch * context.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch-max", min=1, help="Requests at once.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the record and change nothing.")] = False,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
) -> None:
    """Register an engine that cannot register itself. It stays until it is removed."""
    record = check_record(
        InstanceRecord(
            instance_id=instance,
            url=url.rstrip("/"),
            role=role,
            model=model,
            engine=engine,
            node_id=node,
            namespace=namespace or model,
            hash_name=hash_name,
            block_tokens=block_tokens,
            kv_bytes_per_token=kv_bytes,
            context_tokens=context,
            kv_capacity_tokens=kv_capacity or batch * context,
            batch_max=batch,
            pid=0,
            started_at_s=time.time(),
            static=True,
        )
    )
    if dry_run:
        print(msgspec.json.format(encode(record), indent=2).decode())
        return
    run_async(add(resolve_target(etcd, config), record))
    print(f"Instance {instance} is registered.", file=sys.stderr)


@app.command("remove")
def remove_command(
    instance: InstanceArgument,
    yes: YesOption = False,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
) -> None:
    """Remove an instance that was added by hand."""
    confirm(f"Remove instance {instance}? Requests no longer go to it.", yes)
    run_async(remove(resolve_target(etcd, config), instance))
    print(f"Instance {instance} is removed.", file=sys.stderr)
