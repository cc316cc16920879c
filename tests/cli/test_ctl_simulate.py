"""`mooncakectl simulate`: without a cluster."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mooncakectl.__main__ import run
from mooncakectl.commands.simulate import parse_capacities, progress_bar
from mooncaked.errors import InvalidRequest

TRACE = [[1, 2], [8, 9], [1, 2], [6, 7], [1, 2]]  # two blocks: LRU finds nothing, Belady four of ten


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = (
        json.dumps({"timestamp": 1000 * i, "input_length": 1024, "output_length": 1, "hash_ids": chain})
        for i, chain in enumerate(TRACE)
    )
    path.write_text("\n".join(lines))
    return path


def evict(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run(["simulate", "evict", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_trace_as_a_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = evict(capsys, trace, "--capacity", "2,6", "--policy", "sieve")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("5 requests, 10 blocks, 6 distinct:")
    assert [line.split() for line in lines[1:]] == [
        ["CAPACITY", "POLICY", "HIT_RATE", "TIMES_LRU"],
        ["2", "lru", "0.0000", "-"],
        ["2", "sieve", "0.0000", "-"],
        ["2", "belady", "0.4000", "-"],
        ["6", "lru", "0.4000", "1.000"],
        ["6", "sieve", "0.4000", "1.000"],
        ["6", "belady", "0.4000", "1.000"],
    ]


def test_for_programs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = evict(capsys, trace, "-c", "6", "-p", "lru", "-o", "json")
    body = json.loads(out)
    assert body["schema"] == "mooncake.simulate.evict/1"
    assert (body["requests"], body["blocks"], body["distinct_blocks"]) == (5, 10, 6)
    assert body["results"][0] == {
        "capacity_blocks": 6,
        "policy": "lru",
        "hit_rate": 0.4,
        "times_lru": 1.0,
    }
    _, out, _ = evict(capsys, trace, "-c", "2", "-p", "lru", "-o", "csv")
    assert out == "capacity_blocks,policy,hit_rate,times_lru\n2,lru,0.0,\n2,belady,0.4,\n"


def test_a_workload_and_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--workload", "cyclic", "--requests", "300", "--seed", "7", "-c", "1k", "-o", "csv")
    code, out, _ = evict(capsys, *arguments)
    assert code == 0
    names = {line.split(",")[1] for line in out.splitlines()[1:]}
    assert names == {"lru", "lfu", "length-aware", "s3fifo", "sieve", "prefix-aware", "belady"}
    assert evict(capsys, *arguments)[1] == out


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["nowhere.jsonl"], 4, "Trace nowhere.jsonl does not exist"),
        ([], 2, "give either a TRACE or a --workload"),
        (["{trace}", "--workload", "flips"], 2, "give either"),
        (["--workload", "x"], 2, "no workload 'x'"),
        (["{trace}", "--policy", "lru,mru"], 2, "no eviction policy 'mru'"),
        (["{trace}", "--capacity", "1k,0"], 2, "'0' is not a number of blocks"),
        (["{trace}", "--capacity", "k"], 2, "'k' is not a number of blocks"),
        (["{trace}", "--capacity", "-5"], 2, "not a number of blocks"),
        (["{trace}", "--capacity", "1e3"], 2, "not a number of blocks"),
        (["{trace}", "--capacity", "999999999999999m"], 2, "not a number of blocks"),
        (["{trace}", "--capacity", ""], 2, "'' is not a number of blocks"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], code: int, problem: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    got, out, err = evict(capsys, *(argument.format(trace=trace) for argument in arguments))
    assert (got, out) == (code, "")
    assert problem in err


def test_a_malformed_line_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text().replace("[6, 7]", "[6, x]"))
    code, _, err = evict(capsys, trace)
    assert code == 2
    assert "trace.jsonl, line 4: " in err


def test_capacities() -> None:
    assert parse_capacities("500, 3k,1M") == [500, 3000, 1_000_000]
    with pytest.raises(InvalidRequest, match="'3 k'"):
        parse_capacities("3 k")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with progress_bar(2, stream) as report:
            report(1)
    assert "simulating" in terminal.getvalue()
    assert pipe.getvalue() == ""
