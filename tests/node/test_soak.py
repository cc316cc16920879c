"""Everything at once for a while: engines that write, read, look and remove, a pool that is far too small,
disks below it, and the kill of an engine in between. Each byte that is read is checked, and so are all
books.

`make soak` runs it for a minute, `make soak SECONDS=3600` for an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from mooncaked.clock import SystemClock
from mooncaked.pools.ssd import SsdDevice, SsdPool
from mooncaked.tiers import Tiers
from tests.node.small_node import SmallNode

SECONDS = float(os.environ.get("SOAK_SECONDS", "25"))
MIB = 1 << 20
ENGINES = 3


class SoakNode(SmallNode):
    """A node of 12 MiB of memory, in which one namespace has a quota, and two disks of 32 MiB."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "c.sock", size=12 * MIB)
        clock = SystemClock()
        self.store.set_watermarks(0.8, 0.6)
        self.store.set_namespaces({"tenant-b/model": 5 * MIB}, {})
        self.tiers = Tiers(self.store, clock, lambda namespace, keys: None)
        for number in range(2):
            (folder / f"disk{number}").mkdir()
        devices = [
            SsdDevice(
                folder / f"disk{number}",
                32 * MIB,
                node_id="n1",
                clock=clock,
                segment_bytes=4 * MIB,
                number=number,
            )
            for number in range(2)
        ]
        self.disks = SsdPool(devices)
        self.disks.open(lost=self.tiers.lost, progress=lambda done, total: None)
        self.tiers.attach(self.disks)
        self.fetch_options = {"ask": self.tiers.ask}

    def check(self) -> None:
        self.store.check_integrity()
        with self.store._lock:
            self.index.check_integrity()

    def end(self) -> None:
        self.tiers.close()
        self.disks.check_integrity()
        self.disks.close()


async def engine(node: SmallNode, seed: int, seconds: float) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tests.node.soak_client", str(node.socket), str(seed), str(seconds)]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


@pytest.mark.timeout(120 + 2 * SECONDS)
async def test_everything_at_once(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    node = SoakNode(tmp_path)
    async with node:
        victim = await engine(node, 99, SECONDS)
        engines = [await engine(node, seed, SECONDS) for seed in range(ENGINES)]
        for second in range(int(SECONDS)):
            await asyncio.sleep(1)
            await asyncio.to_thread(node.check)
            if second == SECONDS // 2:
                victim.kill()
        for each in [victim, *engines]:
            output, _ = await each.communicate()
            if each is victim:
                continue
            report = json.loads(output)
            assert not report["wrong"], report["wrong"]
            assert each.returncode == 0
            done.update(report["done"])
        await asyncio.to_thread(node.check)
        stats, tiers = node.store.stats(), node.tiers.stats()
    node.end()
    for what in ("stored", "exists", "get", "get_into", "view", "get_batch", "removed"):
        assert done[what] > 20, f"{what} was hardly tried: {done}"
    assert stats.evicted > 100
    assert stats.promoted > 20, f"hardly anything came back from disk: {tiers}"
    assert stats.owners == 0, "a connection was forgotten"
    assert (stats.pinned, stats.filling, stats.reserved_bytes) == (0, 0, 0)
