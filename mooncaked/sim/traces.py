"""Requests to replay: Mooncake's trace format.

A trace is a file of JSON lines, one request each: `timestamp` (ms since the start), `hash_ids` (one number
per block of the prompt, where equal numbers mean equal prompts up to there), and `input_length` and
`output_length` (tokens), which matter to nobody here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from mooncaked.errors import InvalidRequest, NotFound

_DISTINCT_MAX = 50_000_000  # blocks; more do not fit into memory


class Request(msgspec.Struct, frozen=True):
    """One prompt."""

    at_s: float  # since the start of the trace
    chain: tuple[int, ...]  # its blocks, root first


class _Line(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace, in its order. Raises `NotFound`, or `InvalidRequest` with the number of a line
    that is not as it should be."""
    try:
        with path.open("rb") as lines:
            requests = parse_trace(lines, str(path))
    except FileNotFoundError:
        remedy = "Name a file of JSON lines, or use --workload."
        raise NotFound(kind="Trace", name=path, remedy=remedy) from None
    except OSError as error:
        raise InvalidRequest(problem=f"{path} cannot be read: {error.strerror}") from error
    if not requests:
        raise InvalidRequest(problem=f"{path} has no requests")
    return requests


def parse_trace(lines: Iterable[bytes], name: str) -> list[Request]:
    """The requests in `lines`. Raises `InvalidRequest` with `name` and the number of the first bad line."""
    decoder = msgspec.json.Decoder(_Line)
    parents: dict[int, int | None] = {}
    requests: list[Request] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
            _check_chain(line.hash_ids, parents)
        except (msgspec.MsgspecError, UnicodeDecodeError, _BadChain) as error:
            raise InvalidRequest(problem=f"{name}, line {number}: {error}") from None
        requests.append(Request(line.timestamp / 1000, tuple(line.hash_ids)))
    return requests


class _BadChain(Exception):
    """The blocks of a line are no prefix chain."""


def _check_chain(chain: list[int], parents: dict[int, int | None]) -> None:
    """Enter a chain's blocks into `parents`, where each block must follow the same block every time."""
    parent: int | None = None
    for block in chain:
        known = parents.setdefault(block, parent)
        if known != parent:
            where = "at the start" if parent is None else f"after {parent}"
            before = "at the start" if known is None else f"after {known}"
            raise _BadChain(f"block {block} stands {where} here, and {before} elsewhere")
        parent = block
    if len(parents) > _DISTINCT_MAX:
        raise _BadChain(f"more than {_DISTINCT_MAX} distinct blocks")
