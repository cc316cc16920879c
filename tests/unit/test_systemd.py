"""The units: what systemd itself says of them, and the few lines that the daemon relies on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")


def settings(unit: str) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for line in (FOLDER / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            result.setdefault(name, []).append(value)
    return result


def installed(unit: str, tmp_path: Path) -> Path:
    """The unit with a program that exists here in place of the installed one; verify checks that too."""
    text = (FOLDER / unit).read_text()
    assert "ExecStart=/usr/bin/mooncaked " in text
    path = tmp_path / unit.replace("@.", "@one.")
    path.write_text(text.replace("/usr/bin/mooncaked", sys.executable))
    return path


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_says_what_the_daemon_relies_on(unit: str) -> None:
    found = settings(unit)
    assert found["Type"] == ["notify"]
    assert found["WatchdogSec"] == ["30"]
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert found["RestartPreventExitStatus"] == ["3 9"]
    assert found["KillMode"] == ["mixed"]
    if unit != "mooncaked-conductor.service":
        assert found["LimitMEMLOCK"] == ["infinity"]
        assert found["FileDescriptorStoreMax"] == ["160"], "128 regions, two journals, and some to spare"
        assert found["Environment"] == ["FDSTORE=160"]


def test_the_template_differs_only_where_instances_must() -> None:
    one, template = settings("mooncaked.service"), settings("mooncaked@.service")
    different = {name for name in one if one[name] != template.get(name)}
    assert different == {"Description", "ExecStart", "StateDirectory", "RuntimeDirectory"}
    assert set(template) == set(one)


@pytest.mark.skipif(ANALYZE is None, reason="this machine has no systemd")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_unit(unit: str, tmp_path: Path) -> None:
    path = installed(unit, tmp_path)
    verify = subprocess.run([str(ANALYZE), "verify", str(path)], capture_output=True, text=True, check=False)
    assert (verify.returncode, verify.stderr) == (0, "")


@pytest.mark.skipif(ANALYZE is None, reason="this machine has no systemd")
@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_exposes_little(unit: str, tmp_path: Path) -> None:
    path = installed(unit, tmp_path)
    command = [str(ANALYZE), "security", "--offline=true", "--threshold=30", str(path)]
    security = subprocess.run(command, capture_output=True, text=True, check=False)
    assert security.returncode == 0, security.stdout
