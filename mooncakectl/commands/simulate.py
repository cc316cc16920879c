"""`mooncakectl simulate`: experiments without a cluster."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mooncakectl.output import Format, Table, View, columns, console, print_view, show_count
from mooncaked.errors import InvalidRequest
from mooncaked.eviction import POLICIES, make_policy
from mooncaked.sim.belady import count_best_hits
from mooncaked.sim.evict import Report, count_hits
from mooncaked.sim.traces import Request, read_trace
from mooncaked.sim.workloads import WORKLOADS, make_workload

app = typer.Typer(no_args_is_help=True, help="Experiments without a cluster.")

CAPACITY_MAX = 100_000_000  # blocks
_MULTIPLES = {"k": 1_000, "m": 1_000_000}


class SimFormat(StrEnum):
    """Values of `-o`."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    CSV = "csv"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one capacity."""

    capacity_blocks: int
    policy: str  # or `belady`
    hit_rate: float  # leading blocks that were there / blocks
    times_lru: float | None  # None where LRU has no hits


@app.callback()
def simulate() -> None:
    """Experiments without a cluster."""


def parse_capacities(text: str) -> list[int]:
    """Blocks, from text such as `500,3k,1m`. Raises `InvalidRequest`."""
    return [_parse_capacity(part.strip()) for part in text.split(",")]


def _parse_capacity(text: str) -> int:
    multiple = _MULTIPLES.get(text[-1:].lower(), 1)
    digits = text if multiple == 1 else text[:-1]
    if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits[:12]) * multiple <= CAPACITY_MAX:
        problem = (
            f"--capacity: {text!r} is not a number of blocks from 1 to {CAPACITY_MAX}, such as 500, 3k or 1m"
        )
        raise InvalidRequest(problem=problem)
    return int(digits) * multiple


def parse_policies(text: str) -> list[str]:
    """Names of policies, from text such as `lru,lfu` or `all`. Raises `InvalidRequest`."""
    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        make_policy(name)
    return names


def run_policies(
    requests: Sequence[Request], capacities: Sequence[int], policies: Sequence[str], seed: int, report: Report
) -> list[Result]:
    """The hit rates of LRU, of `policies` and of Belady's choice at each capacity."""
    blocks = sum(len(request.chain) for request in requests)
    results: list[Result] = []
    for capacity in capacities:
        hits = {"lru": count_hits(make_policy("lru", seed), requests, capacity, report)}
        for name in policies:
            if name not in hits:
                hits[name] = count_hits(make_policy(name, seed), requests, capacity, report)
        hits["belady"] = count_best_hits(requests, capacity, report)
        results += [
            Result(
                capacity_blocks=capacity,
                policy=name,
                hit_rate=count / blocks if blocks else 0.0,
                times_lru=count / hits["lru"] if hits["lru"] else None,
            )
            for name, count in hits.items()
            if name in policies or name in ("lru", "belady")
        ]
    return results


def evict_view(source: str, requests: Sequence[Request], results: Sequence[Result]) -> View:
    """The results, and of what they are."""
    blocks = sum(len(request.chain) for request in requests)
    distinct = len({block for request in requests for block in request.chain})
    rows = [
        [
            show_count(r.capacity_blocks),
            r.policy,
            f"{r.hit_rate:.4f}",
            "-" if r.times_lru is None else f"{r.times_lru:.3f}",
        ]
        for r in results
    ]
    what = f"{show_count(blocks)} blocks, {show_count(distinct)} distinct"
    title = f"{source}, {show_count(len(requests))} requests, {what}"
    table = Table(columns=columns(">capacity", "policy", ">hit rate", ">times LRU"), rows=rows, title=title)
    data = {
        "source": source,
        "requests": len(requests),
        "blocks": blocks,
        "distinct_blocks": distinct,
        "results": results,
    }
    return View(schema="mooncake.simulate.evict/1", data=data, tables=[table])


def print_csv(results: Sequence[Result], stream: TextIO) -> None:
    """One line per result, after a line of names; an empty field where there is no value."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(Result.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(result) for result in results)


@contextmanager
def progress_bar(total: int, stream: TextIO) -> Iterator[Report]:
    """A way to report progress, which is shown if `stream` is a terminal."""
    bar = Progress(
        TextColumn("simulating"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console(stream),
        transient=True,
        disable=not stream.isatty(),
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def load(trace: Path | None, workload: str | None, seed: int, count: int) -> tuple[str, list[Request]]:
    """The requests to replay, and where they are from. Raises as `read_trace` and `make_workload` do."""
    if (trace is None) == (workload is None):
        raise InvalidRequest(problem="give either a TRACE or a --workload")
    if trace is not None:
        return str(trace), read_trace(trace)
    name = workload or ""
    return f"{name} (seed {seed})", make_workload(name, seed, count)


@app.command("evict")
def evict_command(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="JSON lines with `timestamp` and `hash_ids`.")
    ] = None,
    capacity: Annotated[
        str, typer.Option("--capacity", "-c", metavar="N,...", help="Blocks of the pool, e.g. 500,3k,1m.")
    ] = "1k,3k,10k,30k",
    policy: Annotated[
        str, typer.Option("--policy", "-p", metavar="NAME,...", help=f"all, or of {', '.join(POLICIES)}.")
    ] = "all",
    workload: Annotated[
        str | None,
        typer.Option("--workload", metavar="NAME", help=f"Instead of TRACE: one of {', '.join(WORKLOADS)}."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of the workload.")] = 8000,
    seed: Annotated[int, typer.Option("--seed", help="Of the workload and of the policies.")] = 0,
    output: Annotated[SimFormat, typer.Option("--output", "-o", help="How to print it.")] = SimFormat.TABLE,
) -> None:
    """Compare eviction policies: hit rates per block of one pool that starts empty, beside those of LRU and
    of Belady's choice, which knows the future."""
    capacities, policies = parse_capacities(capacity), parse_policies(policy)
    source, made = load(trace, workload, seed, requests)
    runs = len(capacities) * (1 + len({"lru", *policies}))
    with progress_bar(runs * len(made), sys.stderr) as report:
        results = run_policies(made, capacities, policies, seed, report)
    if output is SimFormat.CSV:
        print_csv(results, sys.stdout)
    else:
        print_view(evict_view(source, made, results), Format(output.value))
