"""`mooncakectl block`: where blocks are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mooncakectl.output import Format, Table, View, columns, show_bytes
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, WatchOption, show
from mooncakectl.records import known, read_records
from mooncakectl.target import Target, open_etcd
from mooncakectl.web import open_web, post_json
from mooncaked.errors import NotFound
from mooncaked.keys import parse_key, show_key

app = typer.Typer(no_args_is_help=True, help="The blocks: pieces of KV cache under their keys.")


async def locate_view(target: Target, keys: list[str], namespace: str | None) -> View:
    """Where the leader's index knows `keys`, in one namespace or in those of all instances."""
    shown = [show_key(parse_key(key)) for key in keys]
    async with open_etcd(target) as etcd, open_web() as web:
        records = await read_records(etcd, target.etcd.prefix)
        url = f"{records.require_leader().record.gateway_url.rstrip('/')}/v1/locate"
        names = [namespace] if namespace else sorted({i.namespace for i in records.instances})
        replicas: list[dict[str, Any]] = []
        for name in names:
            found = await post_json(web, url, "the leader", {"namespace": name, "keys": shown})
            replicas += [
                {
                    "namespace": name,
                    "key": key,
                    "node_id": r["node_id"],
                    "tier": r["tier"],
                    "size_bytes": r["size"],
                }
                for key in shown
                for r in found.get(key, [])
            ]
    if not replicas:
        remedy = known("Namespaces that were searched", names)
        raise NotFound(kind="Block", name=", ".join(shown), remedy=remedy)
    rows = [
        [r["key"], r["node_id"], r["tier"], show_bytes(r["size_bytes"]), r["namespace"]] for r in replicas
    ]
    titles = columns("key", "node", "tier", ">size", "namespace")
    table = Table(columns=titles, rows=rows)
    return View(schema="mooncake.replicas/1", data={"replicas": replicas}, tables=[table])


@app.command("locate")
def locate_command(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Text, or 0x and hexadecimal digits.")],
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Default: those of all instances.")
    ] = None,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """Show which nodes hold a block. Exits with 4 when none does."""
    show(lambda target: locate_view(target, keys, namespace), etcd, config, output, watch)
