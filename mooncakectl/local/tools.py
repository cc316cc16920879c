"""Running pip and its like during set-up. Standard library only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncaked.errors import SetupFailed

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
_LINES_SHOWN = 12


def run_command(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end without input; output is captured, and a program that is not there returns 127."""
    try:
        return subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return subprocess.CompletedProcess(list(argv), 127, "", str(error))


def check_command(run: Runner, argv: Sequence[str], step: str, remedy: str) -> str:
    """Run and return the standard output; raises `SetupFailed` with the last lines that it said."""
    result = run(argv)
    if result.returncode:
        said = "\n".join((result.stderr.strip() or result.stdout.strip()).splitlines()[-_LINES_SHOWN:])
        cause = f"`{' '.join(argv)}` exited with {result.returncode}:\n{said}\n"
        raise SetupFailed(step=step, cause=cause, remedy=remedy)
    return result.stdout


def pip(python: Path) -> list[str]:
    """The start of a pip command for the environment of `python`."""
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def pip_install(python: Path) -> list[str]:
    """The start of a pip command that installs. Python compiles what it imports when it first does; compiling
    all of torch at once would take as long as everything else together."""
    return [*pip(python), "install", "--no-compile"]


def has_module(run: Runner, python: Path, name: str) -> bool:
    """Whether `python` would find the module `name`, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return run([str(python), "-c", code]).returncode == 0


def cache_root() -> Path:
    """Where downloads that outlive a checkout are kept: $MOONCAKE_CACHE, else ~/.cache/mooncake."""
    return Path(os.environ.get("MOONCAKE_CACHE") or Path.home() / ".cache" / "mooncake")
