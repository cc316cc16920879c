"""The log on standard error: one line an event, `message key=value ...` as text or one JSON object.

A request's id is bound with `request_id("...")` and then stands on every line of that task and its children.
Under systemd, whose journal keeps the time and reads the priority, text lines carry `<priority>` instead of
a time.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

_request: ContextVar[str] = ContextVar("request", default="")
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_QUIET = ("aiohttp.access", "grpc", "asyncio")  # libraries whose chatter below WARNING helps nobody


@contextmanager
def request_id(value: str) -> Iterator[None]:
    """Name the request that the lines logged inside belong to."""
    token = _request.set(value)
    try:
        yield
    finally:
        _request.reset(token)


def current_request_id() -> str:
    """The id bound by `request_id`, or an empty text."""
    return _request.get()


def value(text: str) -> str:
    """`text` as a value of key=value: quoted where it is empty, or holds spaces, quotes or the like."""
    plain = text and text.isprintable() and not any(c in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """2026-11-30T12:00:00.000Z INFO mooncaked.daemon: message key=value request=id"""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        if self._journal:
            head = f"<{_PRIORITIES.get(record.levelno, 6)}>"
        else:
            head = f"{_time(record)} {record.levelname} "
        line = f"{head}{record.name}: {_one_line(record.getMessage())}"
        if request := _request.get():
            line += f" request={value(request)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "message": ..., "request": ..., "exception": ...}"""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := _request.get():
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str, style: str, environment: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Point the root logger at `stream` (standard error); may be called again to change level or style."""
    handler = logging.StreamHandler(stream or sys.stderr)
    journal = "JOURNAL_STREAM" in environment and stream is None
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(journal=journal))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def _one_line(text: str) -> str:
    """A message that cannot pass for several lines, whatever a peer put into it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
