"""A crash at every durable step of the SSD pool: of the process, and of the whole machine."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncaked import failpoints
from mooncaked.pools.ssd import DeviceState, groups
from mooncaked.pools.ssd.disk import IOV_MAX
from tests.fakes import ssd_writer
from tests.fakes.faulty_disk import FaultyDisk
from tests.fakes.ssd_model import Model

NAMES = sorted(name for name in failpoints.NAMES if name.startswith("ssd."))


class PowerCut(BaseException):
    """Nothing of the process goes on after this."""


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    failpoints.disarm()
    groups.IOV_MAX = IOV_MAX


def test_every_failpoint_in_the_code_has_a_name_and_the_other_way_round() -> None:
    code = [path.read_text() for path in Path("mooncaked").rglob("*.py")]
    used = {name for text in code for name in re.findall(r'failpoint\(f?"([^"]+)"\)', text)}
    steps = {step for text in code for step in re.findall(r'"(ssd\.[a-z]+)"\)', text)}
    used = {
        n for name in used for n in ([name.replace("{step}", s) for s in steps] if "{" in name else [name])
    }
    assert used == failpoints.NAMES


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", NAMES)
def test_power_goes_at_every_step(name: str, seed: int | None) -> None:
    for count in (1, 3, 9):
        disk = FaultyDisk(1 << 22)
        disk.make_directory("/ssd")
        model = Model()
        if not cut_power(name, count, disk, model):
            assert count > 1, "the scenario comes by every failpoint"
            return
        disk.crash(seed)
        device = ssd_writer.make_device("/ssd", disk=disk)
        device.open(lost=model.on_lost)
        assert device.state is DeviceState.ACTIVE
        model.check(device)
        device.check_integrity()
        model.write(device, ssd_writer.KEYS[:3])
        model.check(device)
        device.close()


def cut_power(name: str, count: int, disk: FaultyDisk, model: Model) -> bool:
    """Use the disk until `name` is passed for the `count`-th time; False if it is not."""
    left = count

    def act() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise PowerCut

    failpoints.arm(name, act)
    try:
        ssd_writer.use(model, "/ssd", disk)
    except PowerCut:
        return True
    finally:
        failpoints.disarm()
    return False


@pytest.mark.parametrize("name", NAMES)
def test_the_process_is_killed_at_every_step(name: str, tmp_path: Path) -> None:
    directory, diary = tmp_path / "ssd", tmp_path / "diary"
    directory.mkdir()
    process = forks().Process(target=ssd_writer.run, args=(directory, diary, name, 2))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL, "it was to be killed there"
    model = ssd_writer.read_diary(diary)
    device = ssd_writer.make_device(directory)
    device.open(lost=model.on_lost)
    assert device.state is DeviceState.ACTIVE
    model.check(device)
    model.write(device, ssd_writer.KEYS[:3])
    model.check(device)
    device.check_integrity()
    device.close()


def forks() -> multiprocessing.context.ForkServerContext:
    """Processes that have everything imported when they start, and none of this one's threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fakes.ssd_writer"])
    return context
