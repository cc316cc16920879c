"""`mooncakectl bench gpu`: the whole command on the stand-in device, and what it makes of a wrong byte."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import typer

from mooncakectl import measuring
from mooncakectl.commands import bench_gpu
from mooncaked.bench import gpu, gpu_checks
from mooncaked.errors import GpuUnavailable, MooncakeError, Unhealthy
from mooncaked.pools import gpu_device

SMALL = ("--device", "cpu", "--size", "1MiB", "--block", "64KiB")


def ctl(*arguments: str) -> None:
    typer.main.get_command(bench_gpu.app).main([*arguments], standalone_mode=False)


def measured(monkeypatch: pytest.MonkeyPatch, output: bytes, code: int) -> None:
    """The measuring process prints `output`."""

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, code, stdout=output)

    monkeypatch.setattr(measuring.subprocess, "run", run)


def test_the_whole_command(capfd: pytest.CaptureFixture[str]) -> None:
    ctl(*SMALL, "-o", "json")
    report = json.loads(capfd.readouterr().out)
    assert report["schema"] == "mooncake.bench.gpu/1"
    assert [check["passed"] for check in report["checks"]] == [True, True, True]
    rows = [(speed["host_memory"], speed["direction"]) for speed in report["speeds"]]
    assert rows == [("pageable", "in"), ("pageable", "out"), ("locked", "in"), ("locked", "out")]
    assert all(speed["ratio"] > 0 and speed["block_p50_us"] > 0 for speed in report["speeds"])
    assert (report["size_bytes"], report["block_bytes"], report["locked_bytes"]) == (
        1 << 20,
        1 << 16,
        1 << 20,
    )
    text = gpu.as_text(msgspec.convert(report, gpu.Report))
    assert "ok    two processes: 8 pieces" in text
    assert "copy out locked" in text
    assert "dma-buf: the memory is the host's" in text


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy to or from the device loses a bit of its last byte."""

    def spoil(into: Any, source: Any) -> None:
        copy(into, source)
        into[-1] ^= 1

    copy: Callable[[Any, Any], None] = gpu_device.host_copy
    monkeypatch.setattr(gpu_device, "host_copy", spoil)


def test_a_wrong_byte_is_found_by_every_check_and_exits_with_10(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(monkeypatch)
    assert gpu.main([*SMALL, "--json"]) == 10
    output = capsys.readouterr().out
    report = json.loads(output)
    assert [check["passed"] for check in report["checks"]] == [False, False, False]
    assert "bytes at" in report["checks"][0]["detail"]
    measured(monkeypatch, output.encode(), 10)
    with pytest.raises(Unhealthy, match="odd places"):
        ctl(*SMALL)
    assert "WRONG" in capsys.readouterr().out


def test_a_device_that_cannot_be_used_is_one_line_and_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--device", "cuda:99", "--json"]) == 3
    measured(monkeypatch, capsys.readouterr().out.encode(), 3)
    with pytest.raises(GpuUnavailable, match="cuda:99 cannot be used") as caught:
        ctl("--device", "cuda:99")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1GB"], "write for example 1GiB"),
        (["--size", "4KiB"], "blocks of 1048576 bytes do not fit"),
    ],
)
def test_senseless_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_another_process_that_fails_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks.sys, "executable", "/bin/false")
    pool = gpu.GpuPool("cpu", 1 << 20, 1)
    checks = gpu_checks.run_checks(pool, memoryview(bytearray(1 << 20)), 1)
    assert [check.passed for check in checks] == [True, True, False]
    pool.close()


def test_a_measuring_process_that_crashes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, b"", -11)
    with pytest.raises(MooncakeError, match="ended with -11"):
        bench_gpu.run_bench("cpu", "1MiB", "64KiB")
