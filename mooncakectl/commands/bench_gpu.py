"""`mooncakectl bench gpu`: whether a GPU pool keeps every byte here, and how fast its copies are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mooncakectl.measuring import measure
from mooncakectl.output import Format, Table, View, columns, print_view, show_bytes
from mooncakectl.params import OutputOption
from mooncaked.errors import Unhealthy

app = typer.Typer()


def run_bench(device: str, size: str, block: str) -> dict[str, Any]:
    """The report of `mooncaked.bench.gpu`: torch and CUDA stay out of this process."""
    return measure("mooncaked.bench.gpu", ["--device", device, "--size", size, "--block", block])


def bench_view(report: dict[str, Any]) -> View:
    """The report in both forms."""
    about = [
        ("device", report["device"]),
        ("pool", f"{show_bytes(report['size_bytes'])} in blocks of {show_bytes(report['block_bytes'])}"),
        ("page-locking", report["lock_failure"] or f"{report['lock_s_per_gib']:.3f} s per GiB"),
        ("dma-buf", report["dmabuf"]),
        ("load average", f"{report['load_average']:.1f}"),
    ]
    checks = [("ok" if c["passed"] else "WRONG", c["name"], c["detail"]) for c in report["checks"]]
    speeds = [
        (
            s["direction"],
            s["host_memory"],
            f"{s['bytes_per_s'] / 1e9:.2f}",
            f"{s['plain_bytes_per_s'] / 1e9:.2f}",
            f"{s['ratio']:.2f}",
            f"{s['block_p50_us']:.0f}",
        )
        for s in report["speeds"]
    ]
    titles = columns("copy", "host memory", ">GB/s", ">copy_ GB/s", ">ratio", ">block p50 us")
    tables = [
        Table(columns=columns("what", "value"), rows=about),
        Table(columns=columns("check", "of", "detail"), rows=checks),
        Table(columns=titles, rows=speeds),
    ]
    return View(schema="mooncake.bench.gpu/1", data=report, tables=tables)


@app.command("gpu")
def gpu_command(
    device: Annotated[
        str, typer.Option("--device", help='"cuda:N", or "cpu": the same code with host memory.')
    ] = "cuda:0",
    size: Annotated[str, typer.Option("--size", help="Of the pool on the device.")] = "1GiB",
    block: Annotated[str, typer.Option("--block", help="Bytes of one copy.")] = "1MiB",
    output: OutputOption = Format.TABLE,
) -> None:
    """Check a GPU pool and measure its copies beside torch's copy_. Exits with 10 when a byte was wrong."""
    report = run_bench(device, size, block)
    print_view(bench_view(report), output)
    wrong = [check["name"] for check in report["checks"] if not check["passed"]]
    if wrong:
        raise Unhealthy(what=f"The pool on {device}", cause=f"wrong: {', '.join(wrong)}")
