"""`mooncakectl bench ssd`: how fast a disk is through the SSD pool, beside fio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mooncakectl.measuring import measure
from mooncakectl.output import Format, Table, View, columns, print_view, show_bytes, show_count
from mooncakectl.params import OutputOption

app = typer.Typer()


def bench_view(report: dict[str, Any]) -> View:
    """The report in both forms."""
    about = [
        ("directory", report["directory"]),
        ("O_DIRECT", "yes" if report["direct"] else "no: this file system has none"),
        ("blocks", f"{show_bytes(report['size_bytes'])} in blocks of {show_bytes(report['block_bytes'])}"),
        ("rounds", str(report["rounds"])),
        ("fio", report["fio"] or "not installed, or not wanted"),
        ("load average", f"{report['load']:.1f}"),
    ]
    speeds = [
        (
            speed["kind"],
            speed["what"],
            f"{speed['gb_per_s']:.3f}",
            f"{speed['cpu_s_per_gb']:.2f}",
            "-" if speed["ratio"] is None else f"{speed['ratio']:.2f}",
        )
        for speed in report["speeds"]
    ]
    titles = columns("kind", "by", ">GB/s", ">CPU s/GB", ">pool to fio")
    tables = [Table(columns=columns("what", "value"), rows=about)]
    tables += [Table(columns=titles, rows=speeds)] if speeds else []
    if (found := report["adoption"]) is not None:
        row = (
            show_count(found["blocks"]),
            show_bytes(found["block_bytes"]),
            show_count(found["segments"]),
            f"{found['open_s']:.2f}",
            f"{found['memory_bytes_per_block']:.0f}",
        )
        titles = columns(">blocks found again", ">of", ">segments", ">seconds", ">memory bytes/block")
        tables.append(Table(columns=titles, rows=[row]))
    return View(schema="mooncake.bench.ssd/1", data=report, tables=tables)


@app.command("ssd")
def ssd_command(
    directory: Annotated[
        Path, typer.Option("--dir", help="A directory on the disk; what is made there is removed again.")
    ],
    size: Annotated[str, typer.Option("--size", help="Written and read in each round.")] = "512MiB",
    block: Annotated[str, typer.Option("--block", help="Bytes of one block.")] = "1MiB",
    rounds: Annotated[
        int, typer.Option("--rounds", min=0, help="Ways there and back; 0: no reads and writes.")
    ] = 5,
    adopt: Annotated[
        int, typer.Option("--adopt", min=0, help="Also time how so many blocks are found after a restart.")
    ] = 0,
    fio: Annotated[
        bool, typer.Option("--fio/--no-fio", help="Measure fio too, where it is installed.")
    ] = True,
    output: OutputOption = Format.TABLE,
) -> None:
    """Write blocks to a disk, read them back and compare, in turns with fio."""
    arguments = ["--dir", str(directory.absolute()), "--size", size, "--block", block]
    arguments += ["--rounds", str(rounds), "--adopt", str(adopt), *([] if fio else ["--no-fio"])]
    print_view(bench_view(measure("mooncaked.bench.ssd", arguments)), output)
