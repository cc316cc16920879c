"""What commands print: for people on a terminal, for people in a pipe, for programs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest
import yaml

from mooncakectl.output import (
    Format,
    Table,
    View,
    columns,
    print_view,
    show_age,
    show_bytes,
    show_count,
    show_ms,
    show_share,
)
from mooncakectl.params import repeat
from mooncaked.errors import DeadlineExceeded, NotFound

LONG = "x" * 300
VIEW = View(
    schema="mooncake.things/1",
    data={"things": [{"name": "one", "size_bytes": 1}, {"name": LONG, "size_bytes": 2048}]},
    tables=[Table(columns=columns("name", ">size of it"), rows=[("one", "1 B"), (LONG, "2.0 KiB")])],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(form: Format, stream: io.StringIO | None = None, view: View = VIEW) -> str:
    out = stream or io.StringIO()
    print_view(view, form, out)
    return out.getvalue()


def test_json_and_yaml_hold_the_same_and_name_their_schema() -> None:
    as_json = json.loads(printed(Format.JSON))
    assert as_json == {"schema": "mooncake.things/1", **VIEW.data}
    assert yaml.safe_load(printed(Format.YAML)) == as_json


def test_a_pipe_gets_plain_aligned_text_that_is_never_cut() -> None:
    lines = printed(Format.TABLE).splitlines()
    assert [line[:4] for line in lines] == ["NAME", "one ", "xxxx"]
    assert lines[0].split() == ["NAME", "SIZE_OF_IT"]
    assert lines[2] == f"{LONG}     2.0 KiB"
    assert {len(line) for line in lines} == {312}
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_colours_unless_it_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    view = View(schema="s/1", data={}, tables=[Table(columns=columns("state"), rows=[("ready",)])])
    assert "\x1b[32mready" in printed(Format.TABLE, Terminal(), view)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(Format.TABLE, Terminal(), view)


def test_markup_in_a_value_is_shown_as_it_is() -> None:
    view = View(schema="s/1", data={}, tables=[Table(columns=columns("name"), rows=[("[red]x[/red]",)])])
    assert "[red]x[/red]" in printed(Format.TABLE, Terminal(), view)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_an_empty_table_says_so(stream: io.StringIO) -> None:
    table = Table(title="Nodes", columns=columns("node"), rows=[], empty="no node is registered")
    text = printed(Format.TABLE, stream, View(schema="s/1", data={}, tables=[table]))
    assert "Nodes:" in text
    assert "no node is registered" in text


def test_values_read_well() -> None:
    assert [show_bytes(n) for n in (None, 0, 1023, 1536, 5 << 30, 3 << 40)] == [
        "-",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3.0 TiB",
    ]
    assert [show_count(n) for n in (None, 0, 12345)] == ["-", "0", "12,345"]
    assert [show_share(a, b) for a, b in ((1, 0), (None, 5), (999, 1000))] == ["-", "-", "99 %"]
    assert [show_age(s) for s in (None, -1, 42, 300, 7300, 200000)] == [
        "-",
        "0 s",
        "42 s",
        "5 min",
        "2 h",
        "2 d",
    ]
    assert [show_ms(ms) for ms in (None, 812.4, 3420)] == ["-", "812 ms", "3.42 s"]


def times_out_once() -> Callable[[], View]:
    """A reader whose second attempt fails."""
    results = iter([VIEW, DeadlineExceeded(operation="reading", limit_ms=1), VIEW])

    def read() -> View:
        result = next(results)
        if isinstance(result, View):
            return result
        raise result

    return read


def test_a_repeated_view_outlives_what_may_pass(capsys: pytest.CaptureFixture[str]) -> None:
    repeat(times_out_once(), Format.JSON, 0.01, times=3)
    out, err = capsys.readouterr()
    assert [json.loads(line)["schema"] for line in out.splitlines()] == ["mooncake.things/1"] * 2
    assert err == "error: reading did not finish within 1 ms.\n"


def test_a_view_that_is_redrawn_shows_what_may_pass_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    repeat(times_out_once(), Format.TABLE, 0.01, times=3)
    assert "reading did not finish within 1 ms." in terminal.getvalue()


def test_an_error_that_stays_ends_a_repeated_view() -> None:
    results = iter([VIEW])

    def read() -> View:
        for view in results:
            return view
        raise NotFound(kind="Node", name="node-1", remedy="")

    with pytest.raises(NotFound):
        repeat(read, Format.YAML, 0.01, times=3)
