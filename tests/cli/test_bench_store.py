"""`mooncakectl bench store`: against a node that runs, and with one of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from mooncakectl.commands import bench_store
from mooncaked.client import Client
from mooncaked.errors import InvalidRequest, Unreachable
from tests.node.running import node_thread

FEW = ("--sizes", "4KiB,70KiB", "--batch", "4", "--rounds", "1")


def ctl(*arguments: str) -> None:
    typer.main.get_command(bench_store.app).main([*arguments], standalone_mode=False)


def test_a_node_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with node_thread(tmp_path / "c.sock", size=8 << 20) as node:
        ctl("--socket", str(node.socket), *FEW, "-o", "json")
        with Client(node.socket, "bench/store") as client:
            client.put("other", b"1")
        assert node.store.stats().blocks == 1, "it leaves nothing behind"
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "mooncake.bench.store/1"
    assert report["pool_bytes"] == 8 << 20
    rows = {(row["operation"], row["size"], row["batch"]) for row in report["rows"]}
    assert {("exists", 0, 1), ("exists", 0, 4), ("exists (miss)", 0, 1), ("view", 0, 1)} < rows
    assert {("put", 4096, 1), ("get_into", 4096, 4), ("put", 71_680, 4), ("get_into", 71_680, 1)} < rows
    assert all(row["p50_us"] > 0 and row["per_s"] > 0 for row in report["rows"])
    assert all(row["ratio"] > 0 for row in report["rows"] if row["size"])


def test_a_node_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ctl("--start", "64MiB", "--sizes", "4KiB", "--batch", "2", "--rounds", "1")
    out = capsys.readouterr().out
    assert "64.0 MiB" in out
    assert "get_into" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--socket", "/x", "--start", "1GiB"), "not both"),
        (("--socket", "/x", "--sizes", "4 apples"), "--sizes"),
        (("--dir", "/nonexistent"), "no local cluster"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        ctl(*arguments)


def test_sizes_beyond_the_pool_are_refused(tmp_path: Path) -> None:
    with node_thread(tmp_path / "c.sock", size=1 << 20) as node, pytest.raises(InvalidRequest, match="1 to"):
        ctl("--socket", str(node.socket), "--sizes", "1MiB")


def test_no_node_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        ctl("--socket", str(tmp_path / "none.sock"))
