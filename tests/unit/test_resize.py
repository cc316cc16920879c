"""A pool that changes its size while it is used."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from mooncaked.clock import SystemClock
from mooncaked.config import DramConfig
from mooncaked.errors import InvalidRequest, NotEnoughMemory, Refused
from mooncaked.pools.dram import DramPool
from mooncaked.resize import Resizer
from tests.node.warm_process import SIZE, open_memory, open_store, put, value_of

MIB = 1 << 20
FULL = 1400  # more blocks than the pool has room for


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what happens in another thread."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


class Node:
    """Memory and store with a resizer."""

    def __init__(self, folder: Path, region_size: int) -> None:
        self.memory = open_memory(folder, region_size=region_size)
        self.store = open_store(self.memory)
        self.owner = self.store.new_owner()
        settings = DramConfig(size=SIZE, region_size=region_size)
        self.changes = 0
        self.resizer = Resizer(self.memory, self.store, settings, SystemClock(), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def resize(self, size: int) -> str:
        """Change the size and wait for the end; the state that it ended in."""
        self.resizer.request(size)
        await until(lambda: self.state != "running")
        self.store.check_integrity()
        return self.state

    @property
    def state(self) -> str:
        status = self.resizer.status().resize
        return status.state if status else ""

    def regions(self) -> list[tuple[int, int]]:
        return [(region.region, region.size_bytes) for region in self.resizer.status().regions]

    def fill(self, count: int) -> None:
        for i in range(count):
            put(self.store, self.owner, f"k{i}")

    def here(self) -> set[str]:
        """The keys that can be read; their bytes are compared."""
        keys = [event.key for event in self.store.snapshot()[1]]
        owner = self.store.new_owner()
        for key, block in zip(keys, self.store.pin(owner, "ns", keys), strict=True):
            assert block is not None
            value = self.store.view(block.region, block.offset, block.size)
            assert bytes(value) == value_of(key.decode())
        self.store.drop_owner(owner)
        return {key.decode() for key in keys}


@pytest.fixture
def made() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.memory.close()


@pytest.fixture
async def node(tmp_path: Path, made: list[Node]) -> AsyncIterator[Node]:
    """A pool of four regions of 2 MiB, and a running resizer."""
    node = Node(tmp_path, 2 * MIB)
    made.append(node)
    running = asyncio.create_task(node.resizer.run())
    yield node
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_it_grows_and_loses_nothing(node: Node) -> None:
    node.fill(20)
    assert await node.resize(SIZE + 3 * MIB) == "done"
    assert node.regions()[4:] == [(4, 3 * MIB // 2), (5, 3 * MIB // 2)]
    assert len(node.here()) == 20
    assert node.store.stats().capacity_bytes == node.resizer.size == SIZE + 3 * MIB
    assert all(r.taken_bytes == r.size_bytes for r in node.resizer.status().regions[4:]), "pages first"
    assert (node.changes, node.memory.regions.version) == (1, node.memory.regions.version)


async def test_it_shrinks_by_whole_regions_and_gives_the_memory_back(node: Node, tmp_path: Path) -> None:
    node.fill(FULL)
    before, last = node.here(), node.memory.regions.live()[-1]
    with last.view[:4096] as mapped:  # as a client's mapping, which keeps the memory alive
        fd = os.dup(last.fd)
        assert await node.resize(SIZE - 2 * MIB) == "done"
        assert os.fstat(fd).st_blocks == 0, "its pages are back although it is mapped"
        assert bytes(mapped) == bytes(4096)
        os.close(fd)
    assert [region for region, _ in node.regions()] == [0, 1, 2]
    after = node.here()
    assert set() < after < before
    assert not (tmp_path / f"mooncaked-{os.getuid()}-n1" / "region-3").exists()
    put(node.store, node.owner, "k900")
    assert "k900" in node.here()


async def test_it_waits_for_readers(node: Node) -> None:
    node.fill(FULL)
    keys = [event.key for event in node.store.snapshot()[1]]
    pins = node.store.pin(node.owner, "ns", keys)
    held = [pin for pin in pins if pin is not None and pin.region == 3]
    node.store.unpin(node.owner, [pin.pin for pin in pins if pin is not None and pin.region != 3])
    node.resizer.request(SIZE - 2 * MIB)
    await until(lambda: node.resizer.status().regions[-1].state == "emptying")
    assert node.resizer.size == SIZE - 2 * MIB
    assert node.state == "running"
    assert held
    for pin, key in ((pin, keys[pins.index(pin)]) for pin in held):
        assert bytes(node.store.view(3, pin.offset, pin.size)) == value_of(key.decode())
    node.store.unpin(node.owner, [pin.pin for pin in held])
    await until(lambda: node.state != "running")
    assert (node.state, len(node.regions())) == ("done", 3)


async def test_a_smaller_region_takes_the_place_of_one(node: Node) -> None:
    assert await node.resize(5 * MIB) == "done"
    assert node.regions() == [(0, 2 * MIB), (1, 2 * MIB), (4, MIB)]
    assert await node.resize(MIB) == "done"
    assert node.regions() == [(5, MIB)], "the last region too"
    node.fill(5)
    assert len(node.here()) == 5


async def test_what_comes_back_after_a_restart(node: Node, tmp_path: Path, made: list[Node]) -> None:
    assert await node.resize(SIZE + 2 * MIB) == "done"
    assert await node.resize(SIZE - MIB) == "done"
    node.fill(60)
    here = node.here()
    node.memory.close()
    after = Node(tmp_path, 2 * MIB)
    made[:] = [after]
    assert after.store.stats().blocks == len(here)
    assert after.resizer.size == SIZE, "dram.size counts"


async def test_what_cannot_be_is_refused_at_once(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="at least 1MiB"):
        node.resizer.request(4096)
    with pytest.raises(NotEnoughMemory, match="are needed beside the pool"):
        node.resizer.request(1 << 50)
    assert node.resizer.status().resize is None
    answer = node.resizer.request(SIZE + MIB)
    assert (answer.from_bytes, answer.to_bytes, answer.adds_bytes) == (SIZE, SIZE + MIB, [MIB])
    assert "dram.size = '9MiB'" in answer.note
    with pytest.raises(Refused, match="just being changed to 9MiB"):
        node.resizer.request(SIZE)


async def test_memory_that_runs_out_meanwhile_is_said(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pool: DramPool, *_: object, **__: object) -> bool:
        raise NotEnoughMemory(key="dram.size", size=pool.size, cause="the system gave 0 bytes")

    monkeypatch.setattr(DramPool, "prefault", fail)
    assert await node.resize(SIZE + MIB) == "failed"
    status = node.resizer.status()
    assert status.resize is not None
    assert "the system gave 0 bytes" in status.resize.problem
    assert (status.size_bytes, len(status.regions)) == (SIZE, 4)


async def test_ending_gives_up_a_region_that_is_half_taken(tmp_path: Path, made: list[Node]) -> None:
    node = Node(tmp_path, 64 * MIB)
    made.append(node)
    node.resizer.request(SIZE + 600 * MIB)
    running = asyncio.create_task(node.resizer.run())
    await until(lambda: len(node.resizer.status().regions) > 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert node.resizer.size < SIZE + 600 * MIB
    node.store.check_integrity()
