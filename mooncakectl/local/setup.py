"""Sets a checkout up (`python3 -m mooncakectl.local.setup`), or completes an installation (`... setup`).

It runs under the system's Python before any package is there, so it and what it imports use the standard
library only. Each part is skipped when it is there already, so that a second run takes no time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

from mooncakectl.local.model import ensure_model
from mooncakectl.local.progress import Progress
from mooncakectl.local.tools import Runner, check_command, pip, pip_install, run_command
from mooncakectl.local.torch_cpu import ensure_torch
from mooncaked.errors import MooncakeError, SetupFailed

PYTHON_MIN = (3, 11)
_EXTRAS = {"run": ["engine"], "test": ["engine", "dev"]}


def check_python(version: tuple[int, int], executable: str) -> None:
    """Raise `SetupFailed` when this Python is too old."""
    if version < PYTHON_MIN:
        cause = f"{executable} is Python {version[0]}.{version[1]}; 3.11 or newer is needed."
        remedy = "Install one and name it, e.g.: make run PYTHON=python3.11"
        raise SetupFailed(step="Python", cause=cause, remedy=remedy)


def ensure_venv(run: Runner, venv: Path, progress: Progress) -> Path:
    """Make the virtual environment unless it is there and works; returns its Python."""
    python = venv / "bin" / "python"
    if python.exists() and run([*pip(python), "--version"]).returncode == 0:
        return python
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        cause = f"{sys.executable} cannot make one: its venv module is not installed."
        raise SetupFailed(
            step="virtual environment", cause=cause, remedy="Install it: apt-get install python3-venv"
        )
    with progress.step(f"making the virtual environment {venv}"):
        argv = [sys.executable, "-m", "venv", "--clear", str(venv)]
        check_command(run, argv, "virtual environment", f"Remove {venv} and run it again.")
    return python


def ensure_packages(run: Runner, python: Path, root: Path, extras: list[str], progress: Progress) -> None:
    """Install the project at `root` for development with `extras`, unless a stamp says that it was done.

    The stamp holds what `pyproject.toml` said then, so a change of it installs again."""
    stamp = python.parent.parent / "mooncake-setup.json"
    state = {"project": _digest(root / "pyproject.toml"), "python": sys.version}
    known = _read_stamp(stamp)
    if {key: known.get(key) for key in state} != state:
        known = {}
    have = known.get("extras")
    installed = set(have) if isinstance(have, list) else set()
    wanted = installed | set(extras)
    if wanted == installed:
        return
    with progress.step("installing the project and its packages"):
        argv = [*pip_install(python), "--editable", f"{root}[{','.join(sorted(wanted))}]"]
        check_command(run, argv, "packages", "Check the network and run it again.")
    stamp.write_text(json.dumps({**state, "extras": sorted(wanted)}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_stamp(path: Path) -> dict[str, object]:
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def extras_for(purpose: str) -> list[str]:
    """The extras that `purpose` ("run" or "test") needs; with an etcd where the system has none."""
    return [*_EXTRAS[purpose], *([] if shutil.which("etcd") else ["local"])]


def set_up_checkout(run: Runner, root: Path, venv: Path, purpose: str, progress: Progress) -> None:
    """Everything between a fresh clone and a running cluster; raises `SetupFailed`.

    torch goes first: installed as a dependency of the project, it would bring CUDA along."""
    python = ensure_venv(run, venv, progress)
    ensure_torch(run, python, progress)
    ensure_packages(run, python, root, extras_for(purpose), progress)
    ensure_model(run, python, progress)


def set_up_installation(run: Runner, progress: Progress) -> None:
    """torch and the default model for the running Python, e.g. after `pip install mooncaked`."""
    python = Path(sys.executable)
    ensure_torch(run, python, progress)
    ensure_model(run, python, progress)


def main(argv: list[str] | None = None) -> int:
    """Entry point; prints one line and returns the exit code when set-up cannot go on."""
    parser = argparse.ArgumentParser(prog="python3 -m mooncakectl.local.setup", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the virtual environment is")
    parser.add_argument("--purpose", choices=sorted(_EXTRAS), default="run", help="test adds the test tools")
    arguments = parser.parse_args(argv)
    root = Path(__file__).resolve().parents[2]
    try:
        check_python(sys.version_info[:2], sys.executable)
        set_up_checkout(run_command, root, arguments.venv.absolute(), arguments.purpose, Progress())
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
