"""`mooncakectl bench ssd`, with very little on the disk of the tests."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer

from mooncakectl.commands import bench_ssd
from mooncaked.bench.ssd_contenders import depths
from mooncaked.errors import InvalidRequest, Unhealthy


def ctl(directory: Path, *arguments: str) -> None:
    command = ["--dir", str(directory), *arguments]
    typer.main.get_command(bench_ssd.app).main(command, standalone_mode=False)


def test_the_pool_alone_and_blocks_found_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    few = ("--size", "4MiB", "--block", "64KiB", "--rounds", "2", "--adopt", "500", "--no-fio")
    ctl(tmp_path, *few, "-o", "json")
    report = json.loads(capfd.readouterr().out)
    assert report["schema"] == "mooncake.bench.ssd/1"
    assert [(speed["kind"], speed["what"]) for speed in report["speeds"]] == [
        ("write", "pool"),
        ("read", "pool"),
    ]
    assert all(speed["gb_per_s"] > 0 and speed["ratio"] is None for speed in report["speeds"])
    assert report["adoption"]["blocks"] == 500
    assert report["adoption"]["open_s"] > 0
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_beside_fio(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ctl(tmp_path, "--size", "2MiB", "--block", "1MiB", "--rounds", "1")
    out = capfd.readouterr().out
    assert "fio, queue of 1 " in out
    assert "fio, queue of 32 " in out
    assert "POOL_TO_FIO" in out


@pytest.mark.parametrize(
    ("directory", "arguments", "error"),
    [
        ("here", ("--block", "4 apples"), InvalidRequest),
        ("here", ("--size", "1KiB", "--block", "1MiB"), InvalidRequest),
        ("missing", (), Unhealthy),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, directory: str, arguments: tuple[str, ...], error: type[Exception]
) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(error):
        ctl(tmp_path / directory, *arguments)


def test_fio_gets_as_deep_a_queue_as_the_pool() -> None:
    assert depths(1 << 20, "write") == [1, 32]
    assert depths(1 << 20, "read") == [1, 20]
    assert depths(64 << 20, "write") == [1]
    assert depths(4096, "write") == [1, 256], "no more than disks take at a time"
