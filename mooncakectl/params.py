"""The options that many commands share, declared once, and how a command shows its result."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from mooncakectl.output import Format, View, console, print_view, to_json, to_rich
from mooncakectl.target import Target, resolve_target
from mooncaked.errors import MooncakeError, Refused

T = TypeVar("T")
_WATCH_MIN_S = 0.2

EtcdOption = Annotated[
    str | None,
    typer.Option("--etcd", envvar="MOONCAKE_ETCD", metavar="HOST:PORT,...", help="etcd of the cluster."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        envvar="MOONCAKE_CONFIG",
        metavar="FILE",
        help="A mooncaked.toml, for etcd's endpoints, prefix, certificates and password.",
    ),
]
OutputOption = Annotated[Format, typer.Option("--output", "-o", help="How to print the result.")]
WatchOption = Annotated[
    float | None,
    typer.Option("--watch", "-w", metavar="[=SECONDS]", help="Print again every so often (2 s)."),
]
DirectoryOption = Annotated[
    Path | None,
    typer.Option("--dir", envvar="MOONCAKE_LOCAL", metavar="DIR", help="Where the local cluster's state is."),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def run_async(work: Awaitable[T]) -> T:
    """Run `work` on a loop of its own."""

    async def main() -> T:
        return await work

    return asyncio.run(main())


def show(
    read: Callable[[Target], Awaitable[View]],
    etcd: str | None,
    config: Path | None,
    form: Format,
    watch: float | None = None,
) -> View:
    """Read a view of the cluster that the options name, print it, and return it; with `watch`, for ever."""
    target = resolve_target(etcd, config)
    if watch is None:
        view = run_async(read(target))
        print_view(view, form)
        return view
    return repeat(lambda: run_async(read(target)), form, max(_WATCH_MIN_S, watch))


def repeat(
    read: Callable[[], View], form: Format, interval_s: float, times: int | None = None, clear: bool = False
) -> View:
    """Print the view every `interval_s` seconds, `times` times or until Ctrl-C: in place on a terminal, one
    after the other (JSON: one line each) elsewhere. What may pass (`retryable`) ends only the first time."""
    if form is Format.TABLE and sys.stdout.isatty():
        return _redraw(read, interval_s, times, clear)
    view = read()
    _print_one(view, form)
    while times is None or times > 1:
        time.sleep(interval_s)
        try:
            view = read()
        except MooncakeError as error:
            _pass_or_raise(error)
            print(f"error: {error}", file=sys.stderr)
        else:
            _print_one(view, form)
        times = None if times is None else times - 1
    return view


def _print_one(view: View, form: Format) -> None:
    if form is Format.JSON:
        print(to_json(view, indent=None))
    else:
        print_view(view, form)
    sys.stdout.flush()


def _pass_or_raise(error: MooncakeError) -> None:
    if not error.retryable:
        raise error


def _redraw(read: Callable[[], View], interval_s: float, times: int | None, clear: bool) -> View:
    view = read()
    screen = Live(to_rich(view.tables), console=console(sys.stdout), auto_refresh=False, screen=clear)
    with screen, contextlib.suppress(KeyboardInterrupt):
        while times is None or times > 1:
            time.sleep(interval_s)
            try:
                view = read()
                screen.update(to_rich(view.tables), refresh=True)
            except MooncakeError as error:
                _pass_or_raise(error)
                screen.update(Group(to_rich(view.tables), Text(str(error), style="red")), refresh=True)
            times = None if times is None else times - 1
    return view


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal; raises `Refused` when the answer is no, or when nobody is there to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refused(
            problem="this needs a confirmation, and there is no terminal to ask on", remedy="Add --yes."
        )
    if not typer.confirm(question, err=True):
        raise Refused(problem="not confirmed", remedy="Nothing was changed.")
