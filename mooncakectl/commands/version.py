"""`mooncakectl version`: of this program."""

from __future__ import annotations

import platform
from importlib.metadata import version

import typer

from mooncakectl.output import Format, Table, View, columns, print_view
from mooncakectl.params import OutputOption

app = typer.Typer()


def version_view() -> View:
    """Versions of the package and of Python."""
    mine, python = version("mooncaked"), platform.python_version()
    data = {"version": mine, "python": python}
    rows = [("mooncakectl", mine), ("Python", python)]
    table = Table(columns=columns("what", "version"), rows=rows)
    return View(schema="mooncake.version/1", data=data, tables=[table])


@app.command("version")
def version_command(output: OutputOption = Format.TABLE) -> None:
    """Show the version of this program. The nodes' versions are in `node list -o json`."""
    print_view(version_view(), output)
