"""`mooncakectl up`, `down` and `setup`: a whole cluster on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from mooncakectl.local.cluster import LocalCluster, plural
from mooncakectl.local.options import Asked, resolve
from mooncakectl.local.plan import ProcessPlan, gateway_urls, plan
from mooncakectl.local.progress import Progress, seconds
from mooncakectl.local.setup import set_up_installation
from mooncakectl.local.state import (
    ClusterState,
    default_directory,
    locked,
    read_state,
    socket_directory,
)
from mooncakectl.local.tools import run_command
from mooncakectl.params import DirectoryOption
from mooncaked.units import format_size

app = typer.Typer()


@app.command("up")
def up_command(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR_OR_GGUF", help="Model to serve. Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes (3).")] = None,
    prefill: Annotated[int | None, typer.Option("--prefill", help="Prefill instances (2).")] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="Decode instances (1).")] = None,
    pool: Annotated[
        str | None,
        typer.Option("--pool", metavar="SIZE", help="Each node's pool (1GiB, less if memory is short)."),
    ] = None,
    base_port: Annotated[int | None, typer.Option("--base-port", help="First of the ports (17800).")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads of each engine (all cores).")
    ] = None,
    directory: DirectoryOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, start nothing.")] = False,
) -> None:
    """Start a whole cluster on this machine, or whatever of it does not run.

    An etcd, nodes with a pool and a conductor candidate each, prefill and decode instances. The processes
    stay when this command ends; `mooncakectl down` stops them."""
    where, progress = (directory or default_directory()).absolute(), Progress()
    asked = Asked(
        model=model,
        nodes=nodes,
        prefill=prefill,
        decode=decode,
        pool=pool,
        base_port=base_port,
        threads=threads,
    )
    with locked(where):
        options = resolve(asked, read_state(where), progress)
        if dry_run:
            print_plan(plan(options, where, socket_directory(where)))
            return
        progress.note(
            f"Cluster of {plural(options.nodes, 'node')} ({format_size(options.pool_bytes)} each), "
            f"{options.prefill} prefill and {plural(options.decode, 'decode instance')}:"
        )
        state = LocalCluster(where, progress).up(options)
    print(next_steps(state, where, seconds(progress.total_s())))


def print_plan(processes: list[ProcessPlan]) -> None:
    """The command line of every process."""
    for process in processes:
        print(f"{process.name}: {shlex.join(process.argv)}")


def next_steps(state: ClusterState, directory: Path, took: str) -> str:
    """What to tell when the cluster is ready: where it is, and what to try."""
    me = shlex.quote(_program())
    elsewhere = "" if directory == default_directory().absolute() else f" --dir {shlex.quote(str(directory))}"
    etcd = f" --etcd {state.etcd}" if elsewhere else ""
    return f"""
Ready after {took}. It serves {state.options.model_name}.

  OpenAI API   {gateway_urls(state.options)[0]}/v1   (every node has one)
  etcd         {state.etcd}, prefix {state.prefix}
  logs         {directory / "logs"}

Try:
  {me} status{etcd}
  {me} chat{etcd} "What is a cache?"
  {me} top{etcd}
  {me} down{elsewhere}"""


def _program() -> str:
    """How the user called this program, as short as it goes."""
    called = Path(sys.argv[0]).absolute()
    here = Path.cwd()
    if called.name == "__main__.py":
        return "mooncakectl"
    return str(called.relative_to(here)) if called.is_relative_to(here) else str(called)


@app.command("down")
def down_command(
    purge: Annotated[bool, typer.Option("--purge", help="Also remove the cluster's state and logs.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait before killing.")
    ] = 15.0,
    directory: DirectoryOption = None,
) -> None:
    """Stop the cluster that `up` started."""
    where, progress = (directory or default_directory()).absolute(), Progress()
    with locked(where):
        cluster = LocalCluster(where, progress)
        count = cluster.down(timeout)
        if purge:
            cluster.purge()
    print(f"Stopped {count} processes." if count else "The local cluster does not run.")


@app.command("setup")
def setup_command() -> None:
    """Install what `up` needs beside this package: torch (without a GPU, a CPU build), the default model."""
    set_up_installation(run_command, Progress())
    print("Everything is there. Next: mooncakectl up")
