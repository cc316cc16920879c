"""`mooncakectl node pool`: the memory of a node, and its size while the node runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncakectl.complete import node_ids
from mooncakectl.output import Format, Table, View, columns, show_bytes, show_share
from mooncakectl.params import ConfigOption, EtcdOption, OutputOption, WatchOption, show
from mooncakectl.records import read_records
from mooncakectl.target import Target, open_etcd
from mooncakectl.web import get_json, open_web, post_json
from mooncaked.errors import ConfigError, InvalidRequest, PartlyDone
from mooncaked.units import parse_size

app = typer.Typer(no_args_is_help=True, help="A node's memory: its regions, and its size while it runs.")

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", autocompletion=node_ids, help="Id of the node.")]
SizeArgument = Annotated[str, typer.Argument(metavar="SIZE", help="The new size, for example 8GiB.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when it is done, not when it has begun.")]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="MOONCAKE_TOKEN_FILE",
        metavar="FILE",
        help="The secret of listen.token_file, where the nodes have one.",
    ),
]
_POLL_S = 0.2


async def _address(target: Target, node_id: str) -> str:
    async with open_etcd(target) as etcd:
        return (await read_records(etcd, target.etcd.prefix)).node(node_id).http_address


def pool_tables(pool: dict[str, Any]) -> list[Table]:
    """The answer of /v1/pool for people."""
    regions = [
        [
            str(region["region"]),
            region["state"],
            show_bytes(region["size_bytes"]),
            show_share(region["used_bytes"], region["size_bytes"]),
            show_share(region["taken_bytes"], region["size_bytes"]),
            region["huge_pages"],
            ",".join(map(str, region["numa_nodes"])) or "any",
            pool["kept_by"] if region["kept"] else "no",
        ]
        for region in pool["regions"]
    ]
    titles = columns(">region", "state", ">size", ">used", ">taken", "huge pages", "numa", "kept")
    lines = [
        ("size", show_bytes(pool["size_bytes"])),
        ("configured", show_bytes(pool["configured_bytes"])),
        ("kept over a restart by", pool["kept_by"] or "nothing"),
        ("last start was cold because", pool["cold_because"] or "-"),
        ("last change of size", _change(pool["resize"])),
    ]
    return [Table(columns=columns("what", "value"), rows=lines), Table(columns=titles, rows=regions)]


def _change(resize: dict[str, Any] | None) -> str:
    if resize is None:
        return "-"
    text = f"to {show_bytes(resize['size_bytes'])}: {resize['state']}"
    return f"{text}: {resize['problem']}" if resize["problem"] else text


async def pool_view(target: Target, node_id: str) -> View:
    """The regions of one node."""
    address = await _address(target, node_id)
    async with open_web() as web:
        pool = await get_json(web, f"http://{address}/v1/pool", node_id)
    return View(schema="mooncake.pool/1", data={"pool": pool}, tables=pool_tables(pool))


async def resize_view(target: Target, node_id: str, size: int, token: str | None, wait: bool) -> View:
    """Begin to change the size of a node's pool; with `wait`, until that has ended."""
    address = await _address(target, node_id)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with open_web() as web:
        answer = await post_json(
            web, f"http://{address}/v1/pool/resize", node_id, {"size_bytes": size}, headers
        )
        resize: dict[str, Any] = {"state": "running", "problem": ""}
        while wait and resize["state"] == "running":
            await asyncio.sleep(_POLL_S)
            resize = (await get_json(web, f"http://{address}/v1/pool", node_id))["resize"]
    if resize["state"] == "failed":
        raise PartlyDone(done=0, total=1, detail=resize["problem"])
    lines = [
        ("node", node_id),
        ("from", show_bytes(answer["from_bytes"])),
        ("to", show_bytes(answer["to_bytes"])),
        ("regions added", ", ".join(map(show_bytes, answer["adds_bytes"])) or "none"),
        ("regions retired", ", ".join(map(str, answer["retires"])) or "none"),
        ("state", resize["state"]),
        ("note", answer["note"]),
    ]
    data = {"node_id": node_id, **answer, "state": resize["state"]}
    table = Table(columns=columns("what", "value"), rows=lines)
    return View(schema="mooncake.pool-resize/1", data={"resize": data}, tables=[table])


def read_token(path: Path | None) -> str | None:
    """The secret in a file; raises `ConfigError` when it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = "Name a file that you can read"
        problem = f"cannot be read ({error})"
        raise ConfigError(file=path, key="--token-file", problem=problem, remedy=remedy) from error


def parse_size_argument(text: str) -> int:
    """Bytes; raises `InvalidRequest`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidRequest(problem=f"SIZE: {error}. Write for example 8GiB.") from error


@app.command("show")
def show_command(
    node: NodeArgument,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
    watch: WatchOption = None,
) -> None:
    """Show the regions of a node's pool: size, use, huge pages, NUMA nodes, and what keeps them."""
    show(lambda target: pool_view(target, node), etcd, config, output, watch)


@app.command("resize")
def resize_command(
    node: NodeArgument,
    size: SizeArgument,
    wait: WaitOption = False,
    token_file: TokenOption = None,
    etcd: EtcdOption = None,
    config: ConfigOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the size of a node's pool while it runs.

    It grows by new regions, whose memory is taken in the background. It shrinks by whole regions, the newest
    first, whose blocks are evicted; where that does not make the difference, a smaller region takes the place
    of one. The new size lasts until the daemon ends; set dram.size to make it last."""
    wanted, token = parse_size_argument(size), read_token(token_file)
    show(lambda target: resize_view(target, node, wanted, token, wait), etcd, config, output)
