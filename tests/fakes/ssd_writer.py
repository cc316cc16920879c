"""A process that fills an SSD device and notes what it was told, to be killed at a failpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mooncaked import failpoints
from mooncaked.clock import SystemClock
from mooncaked.pools.ssd import LostReason, SsdDevice, SsdEntry, WriteStatus, groups
from mooncaked.pools.ssd.disk import Disk
from tests.fakes.ssd_model import Model

SEGMENT = 128 << 10
CAPACITY = 6 * (SEGMENT + (16 << 10)) + (64 << 10)
KEYS = [b"key-%02d" % number for number in range(50)]
_ROUNDS = 12


class Diary(Model):
    """A model that notes every change of it in a file, which outlives the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *words: bytes) -> None:
        """One line, in the kernel's hands before anything else happens."""
        os.write(self._fd, b" ".join(words) + b"\n")

    def written(self, key: bytes, status: WriteStatus) -> None:
        super().written(key, status)
        self.note(b"written", key, status.encode())

    def on_lost(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        super().on_lost(entries, reason)
        for entry in entries:
            self.note(b"lost", entry.key)

    def removals_are_durable(self) -> None:
        super().removals_are_durable()
        self.note(b"durable")


def make_device(directory: Path | str, capacity: int = CAPACITY, disk: Disk | None = None) -> SsdDevice:
    """A small device with many segments."""
    return SsdDevice(
        directory,
        capacity,
        node_id="node-1",
        clock=SystemClock(),
        segment_bytes=SEGMENT,
        group_bytes=48 << 10,
        readers=1,
        autoflush=False,
        disk=disk,
    )


def use(model: Model, directory: Path | str, disk: Disk | None = None) -> None:
    """Come by every durable step that there is: fill, remove, write again, reclaim, restart, shrink."""
    groups.IOV_MAX = 3  # so that a group takes more than one call
    device = make_device(directory, disk=disk)
    device.open(lost=model.on_lost)
    for number in range(_ROUNDS):
        keys = [KEYS[(7 * number + i) % len(KEYS)] for i in range(9)]
        if isinstance(model, Diary):
            for key in keys:
                model.note(b"tried", key)
        model.write(device, keys)
        gone = keys[number % 4 :: 4]
        if isinstance(model, Diary):
            for key in gone:
                model.note(b"removing", key)
        model.remove(device, gone)
        model.flush(device)
        model.check(device)
    device.close()
    device = make_device(directory, CAPACITY - 2 * (SEGMENT + (16 << 10)), disk)
    device.open(lost=model.on_lost)
    model.write(device, KEYS[:5])
    device.close()


def run(directory: Path, diary: Path, name: str, count: int) -> None:
    """`use` a directory and be killed by SIGKILL when `name` is passed for the `count`-th time."""
    failpoints.arm(name, f"crash@{count}")
    use(Diary(diary), directory)
    os._exit(0)


def read_diary(path: Path) -> Model:
    """The model that the process had when it ended."""
    model = Model()
    for line in path.read_bytes().splitlines():
        match line.split():
            case [b"tried", key]:
                model.item(key)
            case [b"written", key, status]:
                model.written(key, WriteStatus(status.decode()))
            case [b"removing", key]:
                model.note_removal(key)
            case [b"lost", key]:
                model.allowed[key].add(0)
            case [b"durable"]:
                model.removals_are_durable()
    return model
