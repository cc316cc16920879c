"""`mooncakectl bench`: how fast this machine's parts are through our code, beside the plain thing."""

from __future__ import annotations

import typer

from mooncakectl.commands import bench_gpu, bench_ssd, bench_store

app = typer.Typer(no_args_is_help=True, help="Measure the parts of a node on this machine.")
app.registered_commands.extend(bench_gpu.app.registered_commands)
app.registered_commands.extend(bench_ssd.app.registered_commands)
app.registered_commands.extend(bench_store.app.registered_commands)
