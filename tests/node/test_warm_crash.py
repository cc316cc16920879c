"""kill -9 at every durable step of the journal, and a start in the memory that is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mooncaked.clock import SystemClock
from mooncaked.failpoints import NAMES, VARIABLE
from mooncaked.store import Store
from mooncaked.verifier import Verifier
from tests.node.daemons import ROOT
from tests.node.warm_process import open_memory, open_store, value_of

STEPS = sorted(name for name in NAMES if name.startswith("journal."))


def run_until_crash(shm: Path, step: str, count: int) -> tuple[set[str], str]:
    """Run a process that ends at `step`, the `count`-th time; the keys that were acknowledged, and the key of
    the change that it may have been at."""
    command = [sys.executable, "-m", "tests.node.warm_process", str(shm), "60"]
    environment = os.environ | {VARIABLE: f"{step}=crash@{count}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    lines = done.stdout.split()
    keys: set[str] = set()
    for line in lines:
        (keys.add if line[0] == "+" else keys.remove)(line[1:])
    if not lines:
        return keys, "k0"
    sign, last = lines[-1][0], int(lines[-1][2:])
    removal = sign == "+" and last % 3 == 2
    underway = f"k{last - 1}" if removal else f"k{last + 1}" if sign == "+" else f"k{last + 2}"
    return keys, underway


def contents(store: Store) -> set[str]:
    """The keys that can be read; their bytes are compared."""
    assert Verifier(store, SystemClock()).run(threading.Event())
    owner = store.new_owner()
    keys = [event.key for event in store.snapshot()[1]]
    for key, block in zip(keys, store.pin(owner, "ns", keys), strict=True):
        assert block is not None
        assert bytes(store.view(block.region, block.offset, block.size)) == value_of(key.decode())
    store.drop_owner(owner)
    return {key.decode() for key in keys}


@pytest.mark.parametrize("step", STEPS)
def test_whatever_was_acknowledged_is_there_after_kill_9(shm: Path, step: str) -> None:
    count = 25 if ".flush." in step else 3 if ".compact." in step else 1
    keys, underway = run_until_crash(shm, step, count)
    memory = open_memory(shm, epoch=2)
    store = open_store(memory)
    assert contents(store) ^ keys <= {underway}
    assert store.stats().damaged == 0
    store.check_integrity()
    memory.close()


def test_it_can_crash_while_it_starts_again(shm: Path) -> None:
    keys, underway = run_until_crash(shm, "journal.flush.after_write", 40)
    for step in ("journal.flush.after_write", "journal.commit.before_header", "journal.commit.after_header"):
        run_until_crash(shm, step, 1)
    memory = open_memory(shm, epoch=9)
    assert contents(open_store(memory)) ^ keys <= {underway}
    memory.close()
