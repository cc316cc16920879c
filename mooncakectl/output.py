"""What commands print: a table for people, JSON or YAML for programs, from one description of the result.

JSON and YAML carry a `schema` ("mooncake.nodes/1"), have their units in key names, and only ever gain keys
within a schema version. A table is drawn on a terminal; piped, it is plain aligned text, never cut off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TextIO

import msgspec
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text


class Format(StrEnum):
    """Values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Column(msgspec.Struct, frozen=True):
    """One column of a table."""

    title: str
    right: bool = False  # numbers are set to the right


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Cells as people read them."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    empty: str = "none"  # printed in place of a table without rows


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command, in both forms."""

    schema: str
    data: Mapping[str, object]  # plain values only
    tables: Sequence[Table]


def columns(*titles: str) -> list[Column]:
    """Columns by title; a title that starts with `>` is set to the right."""
    return [Column(title.lstrip(">"), title.startswith(">")) for title in titles]


def to_json(view: View, indent: int | None = 2) -> str:
    """The view as JSON text without a final newline."""
    return json.dumps({"schema": view.schema, **msgspec.to_builtins(view.data)}, indent=indent)


def to_yaml(view: View) -> str:
    """The view as one YAML document."""
    body = {"schema": view.schema, **msgspec.to_builtins(view.data)}
    return str(yaml.safe_dump(body, sort_keys=False, allow_unicode=True, explicit_start=True)).rstrip("\n")


def to_plain(tables: Sequence[Table]) -> str:
    """The tables as aligned text, for pipes and files."""
    return "\n\n".join(_plain(table) for table in tables)


def _plain(table: Table) -> str:
    head = [f"{table.title}:"] if table.title else []
    if not table.rows:
        return "\n".join([*head, table.empty])
    lines = [[column.title.upper().replace(" ", "_") for column in table.columns], *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    for line in lines:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ]
        head.append("  ".join(cells).rstrip())
    return "\n".join(head)


def to_rich(tables: Sequence[Table]) -> RenderableType:
    """The tables as rich draws them on a terminal."""
    return Group(*(_rich(table) for table in tables))


def _rich(table: Table) -> RenderableType:
    if not table.rows:
        return Text(f"{table.title}: {table.empty}" if table.title else table.empty, style="dim")
    title = Text(table.title, style="bold") if table.title else None
    drawn = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in table.columns:
        drawn.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return drawn


_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "unreachable": "red",
    "stopped": "red",
}


def print_view(view: View, form: Format, stream: TextIO | None = None) -> None:
    """Print `view` on `stream` (standard output)."""
    out = stream if stream is not None else sys.stdout
    if form is Format.JSON:
        print(to_json(view), file=out)
    elif form is Format.YAML:
        print(to_yaml(view), file=out)
    elif out.isatty():
        console(out).print(to_rich(view.tables))
    else:
        print(to_plain(view.tables), file=out)


def console(stream: TextIO) -> Console:
    """A console on `stream`; rich itself heeds NO_COLOR."""
    return Console(file=stream, highlight=False, soft_wrap=False)


# --- values as people read them --------------------------------------------------------------------------


def show_bytes(count: int | float | None) -> str:
    """E.g. `1.5 GiB`."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def show_count(count: int | float | None) -> str:
    """E.g. `12,345`."""
    return "-" if count is None else f"{count:,.0f}"


def show_share(part: float | None, whole: float | None) -> str:
    """E.g. `97 %`, rounded down, so that 100 % is all of it; a dash where there is nothing to compare."""
    if part is None or not whole:
        return "-"
    return f"{100 * part // whole:.0f} %"


def show_age(seconds: float | None) -> str:
    """How long ago, e.g. `42 s`, `5 min`, `3 h`, `12 d`."""
    if seconds is None:
        return "-"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) // unit:.0f} {name}"
    return f"{seconds // 86400:.0f} d"


def show_ms(milliseconds: float | None) -> str:
    """E.g. `812 ms`, `3.42 s`."""
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"
