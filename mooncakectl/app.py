"""The command line put together: one typer app per noun, and the commands without a noun."""

from __future__ import annotations

from typing import Annotated

import typer

from mooncakectl.commands import bench, block, chat, instance, local, node, simulate, status, top, version

app = typer.Typer(
    no_args_is_help=True,
    help="""The command line of mooncaked: block pools and a cache-aware conductor for language model serving.

A command finds its cluster by --etcd or MOONCAKE_ETCD, by --config or MOONCAKE_CONFIG, by the local cluster
that `up` started, and else at 127.0.0.1:2379.""",
    epilog="Exit codes: 0 ok, 1 unexpected, 2 usage, 3 configuration, 4 not found, 5 unreachable, 6 not now, "
    "7 refused, 8 partly done, 9 permission, 10 unhealthy, 130 interrupted.",
)


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from. Works after a command too.")
    ] = False,
) -> None:
    """Options for every command; `mooncakectl.__main__.prepare` takes --debug out before typer sees it."""


for commands in (local, status, top, chat, version):
    app.registered_commands.extend(commands.app.registered_commands)
app.add_typer(node.app, name="node")
app.add_typer(instance.app, name="instance")
app.add_typer(block.app, name="block")
app.add_typer(simulate.app, name="simulate")
app.add_typer(bench.app, name="bench")
