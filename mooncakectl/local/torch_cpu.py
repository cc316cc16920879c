"""Installs torch without gigabytes of CUDA on a machine that has no GPU. Standard library only.

Which build pip would take depends on the machine's architecture and on the package folders that pip is
set up with, so pip is asked first: a build that requires NVIDIA's packages is never downloaded here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from mooncakectl.local.progress import Progress
from mooncakectl.local.tools import Runner, check_command, has_module, pip, pip_install
from mooncaked.errors import SetupFailed

TORCH_PINNED = "torch==2.13.0"  # known to work with the reference engine
TORCH_ANY = "torch>=2.6"
_CUDA_REQUIREMENT = re.compile(r"(nvidia|cuda|triton)\b", re.IGNORECASE)
_STEP = "torch"
_REMEDY = (
    "Check the network and run it again, or install a CPU build of torch into this environment yourself "
    "({python} -m pip install WHEEL) and run it again."
)


def has_gpu(run: Runner, device: Path = Path("/dev/nvidia0")) -> bool:
    """Whether this machine has an NVIDIA GPU that torch could use."""
    return device.exists() or run(["nvidia-smi", "-L"]).returncode == 0


def needs_cuda(report: str) -> bool:
    """Whether the torch in pip's installation report (JSON) requires CUDA packages.

    Raises ValueError when the report holds no torch."""
    for item in json.loads(report).get("install", []):
        metadata = item.get("metadata", {})
        if metadata.get("name") == "torch":
            return any(_CUDA_REQUIREMENT.match(line) for line in metadata.get("requires_dist", []))
    raise ValueError("pip's report names no torch")


def pip_takes_cpu_build(run: Runner, python: Path) -> bool:
    """Ask pip, without installing anything, whether `TORCH_PINNED` is a CPU build here."""
    asked = run([*pip(python), "install", "--dry-run", "--no-deps", "--quiet", "--report", "-", TORCH_PINNED])
    if asked.returncode:
        return False
    try:
        return not needs_cuda(asked.stdout)
    except ValueError:
        return False


def ensure_torch(run: Runner, python: Path, progress: Progress) -> None:
    """Make torch importable for `python`; raises `SetupFailed` when no suitable build can be had."""
    if has_module(run, python, "torch"):
        return
    remedy = _REMEDY.format(python=python)
    if has_gpu(run):
        with progress.step("installing torch (for the NVIDIA GPU of this machine)"):
            check_command(run, [*pip_install(python), TORCH_ANY], _STEP, remedy)
        return
    with progress.step("installing torch (CPU build, some 200 MB)"):
        if pip_takes_cpu_build(run, python):
            check_command(run, [*pip_install(python), TORCH_PINNED], _STEP, remedy)
        else:
            _install_with_uv(run, python, remedy)
    if not has_module(run, python, "torch"):
        cause = "It was installed, but Python does not find it."
        raise SetupFailed(step=_STEP, cause=cause, remedy="Remove the virtual environment and run it again.")


def _install_with_uv(run: Runner, python: Path, remedy: str) -> None:
    """uv knows where the PyTorch project keeps its CPU builds; pip's own sources have CUDA builds only."""
    check_command(run, [*pip_install(python), "uv"], _STEP, remedy)
    uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python), "--torch-backend", "cpu"]
    check_command(run, [*uv, TORCH_PINNED], _STEP, remedy)
