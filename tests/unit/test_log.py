"""The log: one line an event, whatever is in it, as text or JSON, with the request's id."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from mooncaked.log import TextFormatter, current_request_id, request_id, set_up, value


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_text_has_time_level_name_and_message() -> None:
    stream = io.StringIO()
    set_up("info", "text", {}, stream)
    logging.getLogger("mooncaked.x").info("peer connected peer=%s version=%d", "n2", 1)
    logging.getLogger("mooncaked.x").debug("not this")
    time, rest = stream.getvalue().split(" ", 1)
    assert time.endswith("Z")
    assert rest == "INFO mooncaked.x: peer connected peer=n2 version=1\n"


def test_under_systemd_the_priority_stands_for_level_and_time() -> None:
    record = logging.LogRecord("mooncaked.x", logging.WARNING, "f", 1, "low on memory", (), None)
    assert TextFormatter(journal=True).format(record) == "<4>mooncaked.x: low on memory"


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    set_up("info", "json", {}, stream)
    with request_id("req-1"):
        logging.getLogger("a").warning('said "%s"\nand more', "hé")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("a").exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["logger"], first["request"]) == ("warning", "a", "req-1")
    assert first["message"] == 'said "hé"\nand more'
    assert "ValueError: boom" in second["exception"]
    assert "request" not in second


def test_a_value_from_outside_cannot_forge_a_line() -> None:
    stream = io.StringIO()
    set_up("info", "text", {}, stream)
    logging.getLogger("a").info("hello name=%s", "x\n2026-01-01T00:00:00.000Z ERROR a: forged\x1b[31m")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"), [("n1", "n1"), ("a b", '"a b"'), ("", '""'), ("k=v", '"k=v"'), ("a\nb", '"a\\nb"')]
)
def test_values_are_quoted_where_they_must_be(text: str, shown: str) -> None:
    assert value(text) == shown


async def test_the_request_id_follows_the_task_and_no_other() -> None:
    seen: dict[str, str] = {}

    async def child(name: str) -> None:
        await asyncio.sleep(0)
        seen[name] = current_request_id()

    async def serve(name: str) -> None:
        with request_id(name):
            await asyncio.gather(child(name), child(name + "'"))

    await asyncio.gather(serve("r1"), serve("r2"))
    assert seen == {"r1": "r1", "r1'": "r1", "r2": "r2", "r2'": "r2"}
    assert current_request_id() == ""


def test_the_level_can_change_while_running() -> None:
    stream = io.StringIO()
    set_up("error", "text", {}, stream)
    logging.getLogger("a").info("one")
    set_up("debug", "text", {}, stream)
    logging.getLogger("a").debug("two")
    logging.getLogger("grpc").info("three")
    assert [line.rsplit(": ", 1)[1] for line in stream.getvalue().splitlines()] == ["two"]
