"""`mooncaked` on the command line, without a cluster: what it prints, and its exit codes."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncaked.__main__ import main
from mooncaked.config import load_config
from mooncaked.config_text import sample
from mooncaked.errors import AddressInUse, DeadlineExceeded


def mooncaked(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncaked", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mooncaked.toml"
    path.write_text('[dram]\nsize = "1GiB"\n')
    return path


def test_check_config_accepts_and_says_so(file: Path) -> None:
    done = mooncaked("--check-config", "--config", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file} is good\n", "")


def test_print_config_is_what_is_in_force(file: Path, tmp_path: Path) -> None:
    done = mooncaked(
        "--print-config", "--config", str(file), "--set", "log.level=debug", MOONCAKED_NODE_LABELS="zone=a"
    )
    assert done.returncode == 0
    (tmp_path / "printed.toml").write_text(done.stdout)
    config = load_config(tmp_path / "printed.toml")
    assert (config.dram.size, config.log.level, config.node.labels) == (1 << 30, "debug", {"zone": "a"})


def test_sample_config_needs_no_file_and_no_good_environment() -> None:
    done = mooncaked("--sample-config", MOONCAKED_DRAM_SIZE="bad")
    assert (done.returncode, done.stdout) == (0, sample())


def test_version() -> None:
    done = mooncaked("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("mooncaked 0.")


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        ("[dram]\nsiez = '1GiB'", [], "{file}: dram.siez: there is no such key. Did you mean the key size?"),
        ("[dram]\nsize = 1", [], "{file}: dram.size: 1 has no unit. Write a size in quotes"),
        ("[dram]\nsize = '4GB'", [], "{file}: dram.size: 'GB' in '4GB' is no unit of a size."),
        ("[dram", [], "{file}: line 1 (end of the file): no valid TOML:"),
        ("[xyzzy]", [], "{file}: xyzzy: there is no such section."),
        ("", ["--set", "dram.size"], "--set: dram.size: it gives no value."),
        ("", ["--set", "dram.sise=1GiB"], "--set: dram.sise: there is no such key. Did you mean"),
    ],
)
@pytest.mark.parametrize("action", [["--check-config"], ["--print-config"], [], ["--role", "conductor"]])
def test_a_bad_configuration_is_one_line_and_exit_3(
    file: Path,
    text: str,
    arguments: list[str],
    line: str,
    action: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program of its own
    file.write_text(text)
    assert main([*action, "--config", str(file), *arguments]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("mooncaked: " + line.format(file=file))


def test_a_bad_configuration_ends_the_process_with_that_code(file: Path) -> None:
    file.write_text("[dram]\nsize = 1")
    done = mooncaked("--config", str(file))
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr


def test_a_bad_environment_is_exit_3() -> None:
    done = mooncaked("--check-config", MOONCAKED_DRAM_SISE="1GiB")
    assert done.returncode == 3
    assert "MOONCAKED_DRAM_SISE" in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--nonsense"], ["--role", "queen"], ["--check-config", "--print-config"]]
)
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: mooncaked" in capsys.readouterr().err


@pytest.fixture
def node_that_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Makes the node's life end at once with an error, and leaves the log to the test."""

    def fail(error: Exception) -> None:
        async def life(_launch: object) -> None:
            raise error

        monkeypatch.setattr("mooncaked.daemon.run_node", life)
        monkeypatch.setattr("mooncaked.log.set_up", lambda *_: None)

    return fail


def test_an_unexpected_error_is_exit_1_with_its_traceback_in_the_log(
    file: Path, node_that_fails: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    known = DeadlineExceeded(operation="x", limit_ms=1)
    node_that_fails(ExceptionGroup("tasks", [ZeroDivisionError("by zero"), known]))
    assert main(["--config", str(file)]) == 1
    assert "unexpected ExceptionGroup" in caplog.text
    assert "ZeroDivisionError: by zero" in caplog.text


def test_an_error_of_a_task_has_its_own_exit_code(
    file: Path, node_that_fails: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    inner = ExceptionGroup("inner", [AddressInUse(address="h:1", key="listen.peer")])
    node_that_fails(ExceptionGroup("outer", [inner]))
    assert main(["--config", str(file)]) == 3
    assert "Cannot listen on h:1" in caplog.text
    assert "Traceback" not in caplog.text
