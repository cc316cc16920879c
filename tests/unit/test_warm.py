"""The node's memory over restarts: taken over, or refused with a reason, and never left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mooncaked.clock import SystemClock
from mooncaked.errors import ConfigError, Unhealthy
from mooncaked.pools.keep import ShmFiles
from mooncaked.warm import Memory
from tests.node.warm_process import SIZE, open_memory, open_store, put, value_of

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For files that are kept. Not in memory, which makes no difference to the code, and needs no tidying."""
    return tmp_path / "shm"


@pytest.fixture(autouse=True)
def shm_dir(folder: Path) -> None:
    folder.mkdir()


def leave(folder: Path, **settings: object) -> None:
    """A life with three blocks, one below the other."""
    memory = open_memory(folder, **settings)
    store = open_store(memory)
    owner = store.new_owner()
    put(store, owner, "k1")
    put(store, owner, "k2", "k1")
    put(store, owner, "k3", "k2")
    memory.close()


def keys_after(memory: Memory) -> list[str]:
    keys = [event.key.decode() for event in open_store(memory).snapshot()[1]]
    memory.close()
    return keys


def test_blocks_come_back_as_they_were(folder: Path) -> None:
    leave(folder)
    memory = open_memory(folder, epoch=2)
    store = open_store(memory)
    _, events = store.snapshot()
    assert [(e.key, e.parent, e.size) for e in events] == [
        (b"k1", None, len(value_of("k1"))),
        (b"k2", b"k1", len(value_of("k2"))),
        (b"k3", b"k2", len(value_of("k3"))),
    ]
    info = store.block_info("ns", b"k2")
    assert info is not None
    assert info.meta == b"m"
    assert bytes(store.view(info.region, info.offset, info.size)) == value_of("k2")
    assert (store.epoch, memory.where, memory.cold_because) == (2, "shm", "")
    store.check_integrity()
    memory.close()


def test_it_comes_back_again_and_again(folder: Path) -> None:
    leave(folder)
    for epoch in range(2, 6):
        assert keys_after(open_memory(folder, epoch=epoch)) == ["k1", "k2", "k3"]
    assert sorted(p.name for p in folder.glob("*/*")) == ["journal-0", "journal-1", "lock", "region-0"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"size": SIZE // 2}, r"its regions \(8MiB\) do not fit dram.size 4MiB"),
        ({"huge_pages": "off"}, "another geometry: .*'transparent'.*'off'"),
        ({"cold": True}, "it was asked for"),
    ],
)
def test_another_geometry_starts_cold_with_a_reason(
    folder: Path, settings: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave(folder)
    memory = open_memory(folder, **settings)  # type: ignore[arg-type]
    assert keys_after(memory) == []
    assert "kept memory is not used, starting cold" in caplog.text
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(memory.cold_because)


def test_memory_of_another_node_is_refused(folder: Path) -> None:
    leave(folder)
    (ours,) = folder.iterdir()
    journal = (ours / "journal-0").read_bytes()
    (ours / "journal-0").write_bytes(journal.replace(b"n1", b"n2", 1))
    memory = open_memory(folder)
    assert keys_after(memory) == []
    assert "header is damaged" in memory.cold_because


def test_a_journal_that_is_gone_makes_a_cold_start(folder: Path) -> None:
    leave(folder)
    next(folder.glob("*/journal-1")).unlink()
    memory = open_memory(folder)
    assert (keys_after(memory), memory.cold_because) == ([], "its journal is not there")


def test_a_pool_that_was_made_larger_keeps_its_blocks(folder: Path) -> None:
    leave(folder)
    memory = open_memory(folder, size=SIZE + 3 * MIB)
    assert [(pool.region, pool.size) for pool in memory.regions.live()] == [(0, SIZE), (1, 3 * MIB)]
    assert keys_after(memory) == ["k1", "k2", "k3"]
    memory = open_memory(folder)
    assert [pool.region for pool in memory.regions.live()] == [0], "the newest goes first"
    assert keys_after(memory) == ["k1", "k2", "k3"]
    assert not list(folder.glob("*/region-1"))


def test_a_region_that_is_gone_takes_its_blocks_along(folder: Path) -> None:
    leave(folder, region_size=2 * MIB)
    next(folder.glob("*/region-0")).unlink()
    memory = open_memory(folder, region_size=2 * MIB)
    assert [pool.region for pool in memory.regions.live()] == [1, 2, 3, 4]
    assert keys_after(memory) == []


def test_a_region_of_another_size_is_not_used(folder: Path) -> None:
    leave(folder)
    os.truncate(next(folder.glob("*/region-0")), SIZE - 4096)
    memory = open_memory(folder)
    assert memory.regions.size == SIZE
    assert keys_after(memory) == []


def test_with_it_off_nothing_stays(folder: Path) -> None:
    leave(folder)
    memory = open_memory(folder, warm_restart="off")
    assert (memory.where, memory.journal, list(folder.iterdir())) == ("", None, [])
    memory.close()


def test_what_another_daemon_has_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = open_memory(folder)
    second = open_memory(folder)
    assert (second.where, second.regions.size) == ("", SIZE)
    assert "memory is not kept over a restart" in caplog.text
    second.close()
    assert (first.where, first.regions.live()[0].kept) == ("shm", True)
    first.close()


def test_too_little_shared_memory_is_one_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ShmFiles, "room", lambda _: MIB)
    memory = open_memory(folder, region_size=2 * MIB)
    assert (memory.where, memory.regions.size, list(folder.iterdir())) == ("", SIZE, [])
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert "shm has room for 1MiB only" in caplog.text
    memory.close()


def test_a_numa_node_that_is_not_there_is_an_error_of_the_configuration(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"test: dram.numa: there is no memory at NUMA node 900"):
        open_memory(folder, numa="900")
    memory = open_memory(folder, numa="0")
    assert memory.regions.live()[0].numa_nodes == (0,)
    memory.close()


def test_progress_counts_all_regions(folder: Path) -> None:
    memory = open_memory(folder, region_size=2 * MIB)
    seen: list[tuple[int, int]] = []
    assert memory.prefault(lambda done, total: seen.append((done, total)), threading.Event())
    assert seen[-1] == (SIZE, SIZE)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    memory.close()


def test_a_region_that_a_client_cut_off_is_noticed(folder: Path) -> None:
    memory = open_memory(folder)
    memory.check()
    os.truncate(memory.regions.live()[0].fd, 4096)
    with pytest.raises(Unhealthy, match="region 0 has 4096 bytes, not 8388608"):
        memory.check()
    memory.close()


def test_writers_of_the_life_before_get_time_to_notice(folder: Path) -> None:
    now = SystemClock().monotonic()
    assert open_first(folder).quiet_until_s == 0.0, "nobody was here before"
    memory = open_memory(folder)
    assert now < memory.quiet_until_s <= SystemClock().monotonic() + 5.0
    memory.close()


def open_first(folder: Path) -> Memory:
    memory = open_memory(folder)
    open_store(memory)
    memory.close()
    return memory
