"""`mooncakectl bench store`: how fast engines on a node store and read, beside plain copies."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from mooncakectl.local.plan import socket_path
from mooncakectl.local.state import default_directory, read_state
from mooncakectl.output import Format, Table, View, columns, print_view, show_bytes
from mooncakectl.params import DirectoryOption, OutputOption
from mooncaked.bench.store import Report, Row, bench
from mooncaked.client import Client
from mooncaked.errors import InvalidRequest, MooncakeError, Unreachable
from mooncaked.units import parse_size

app = typer.Typer()

_START_S = 60.0
_STEP_S = 0.05
_CONFIG = """
[node]
state_dir = "{folder}/state"
[listen]
client_socket = "{folder}/c.sock"
peer = "127.0.0.1:0"
http = "127.0.0.1:0"
[dram]
size = "{size}"
warm_restart = "off"
[etcd]
endpoints = ["127.0.0.1:1"]
[conductor]
enabled = false
"""


@app.command("store")
def store_command(
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket", help="The node's client socket. Without it: the local cluster's first node."
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--start", metavar="SIZE", help="Start a node of this size for the measurement, alone."),
    ] = None,
    sizes: Annotated[str, typer.Option("--sizes", help="Of values, with commas.")] = "4KiB,64KiB,1MiB,16MiB",
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Keys in one call of those with several.")
    ] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often all is repeated.")] = 3,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="With the node's secret, if it asks for one.")
    ] = None,
    directory: DirectoryOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Measure what engines on a node get: questions, views, reads and writes of several sizes.

    Each call is followed by a plain copy of the same size in the same process; the ratio compares the two.
    What is stored for that is removed. On a node that serves, its oldest blocks may be evicted for it."""
    if socket is not None and start is not None:
        raise InvalidRequest(problem="give --socket or --start, not both")
    wanted = parse_sizes(sizes)
    token = None if token_file is None else token_file.read_text().strip()
    with contextlib.ExitStack() as stack:
        path = socket or (stack.enter_context(lone_node(start)) if start else local_socket(directory))
        report = bench(path, wanted, batch, rounds, token)
    print_view(bench_view(report), output)


def parse_sizes(text: str) -> list[int]:
    """`4KiB,1MiB` as bytes; raises `InvalidRequest`."""
    try:
        return [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidRequest(problem=f"--sizes: {error}; write for example 4KiB,1MiB") from error


def local_socket(directory: Path | None) -> Path:
    """The client socket of the local cluster's first node; raises `InvalidRequest` when there is none."""
    state = read_state(directory or default_directory())
    if state is None:
        problem = "there is no local cluster; name a node's client socket with --socket, or use --start 1GiB"
        raise InvalidRequest(problem=problem)
    return socket_path(Path(state.socket_dir), "node-1")


@contextlib.contextmanager
def lone_node(size: str) -> Iterator[Path]:
    """A node of its own that knows of no others; the path of its client socket. Raises `MooncakeError` when
    it does not come up."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        config, log = Path(folder, "mooncaked.toml"), Path(folder, "log")
        config.write_text(_CONFIG.format(folder=folder, size=size))
        with log.open("wb") as out:
            command = [sys.executable, "-m", "mooncaked", "--config", str(config)]
            node = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            _wait_ready(node, Path(folder, "c.sock"), log)
            yield Path(folder, "c.sock")
        finally:
            node.terminate()
            node.wait()


def _wait_ready(node: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    """Return when it serves and its memory is in place."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end and node.poll() is None:
        if path.exists() and "phase=ready" in log.read_text():
            with contextlib.suppress(Unreachable), Client(path) as client:
                client.hello()
                return
        time.sleep(_STEP_S)
    lines = log.read_text().strip().splitlines() or ["it printed nothing"]
    raise MooncakeError(detail=f"the node for the measurement did not come up: {lines[-1]}")


def bench_view(report: Report) -> View:
    """The report in both forms."""
    titles = columns(
        "operation", ">size", ">batch", ">keys/s", ">GB/s", ">p50 us", ">p99 us", ">copy p50 us", ">ratio",
        ">client CPU s/GB", ">node CPU s/GB",
    )  # fmt: skip
    about = [
        ("node", report.node_id),
        ("pool", show_bytes(report.pool_bytes)),
        ("load average", f"{report.load_average:.1f}"),
    ]
    tables = [
        Table(columns=columns("what", "value"), rows=about),
        Table(columns=titles, rows=[_cells(row) for row in report.rows]),
    ]
    data = msgspec.to_builtins(report)
    return View(schema="mooncake.bench.store/1", data=data, tables=tables)


def _cells(row: Row) -> tuple[str, ...]:
    moved = bool(row.size)
    return (
        row.operation,
        show_bytes(row.size) if moved else "",
        str(row.batch),
        f"{row.per_s:,.0f}",
        f"{row.bytes_per_s / 1e9:.2f}" if moved else "",
        f"{row.p50_us:,.1f}",
        f"{row.p99_us:,.1f}",
        f"{row.copy_p50_us:,.1f}" if moved else "",
        f"{row.ratio:.2f}" if moved else "",
        f"{row.client_cpu_s_per_gb:.3f}" if moved else "",
        f"{row.daemon_cpu_s_per_gb:.3f}" if moved else "",
    )
