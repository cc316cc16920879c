"""The DRAM pool: what clients get of it, pre-faulting, and errors that name the cause."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import threading
from pathlib import Path

import psutil
import pytest

from mooncaked.errors import ConfigError, InvalidRequest, NotEnoughMemory
from mooncaked.pools import memory
from mooncaked.pools.dram import DramPool

MIB = 1 << 20


def resident_pages(pool: DramPool) -> int:
    """How many pages of the pool are in memory, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    count = pool.size // mmap.PAGESIZE
    found = ctypes.create_string_buffer(count)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool.view))
    assert libc.mincore(address, pool.size, found) == 0, os.strerror(ctypes.get_errno())
    return sum(byte & 1 for byte in found.raw[:count])


def test_prefault_puts_every_page_in_place_and_keeps_what_is_there() -> None:
    pool = DramPool(200 * MIB, prefault_threads=2)
    pool.view[5:10] = b"first"
    assert resident_pages(pool) < 10
    seen: list[tuple[int, int]] = []
    assert pool.prefault(lambda done, total: seen.append((done, total)))
    assert resident_pages(pool) == 200 * MIB // mmap.PAGESIZE
    assert bytes(pool.view[5:10]) == b"first"
    assert seen[-1] == (200 * MIB, 200 * MIB)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) >= 2, "progress comes in steps"
    pool.close()


def test_progress_is_reported_in_the_calling_thread() -> None:
    pool = DramPool(MIB)
    threads: set[int] = set()
    pool.prefault(lambda done, total: threads.add(threading.get_ident()))
    assert threads == {threading.get_ident()}
    pool.close()


def test_prefault_stops_when_told_to() -> None:
    pool = DramPool(512 * MIB, prefault_threads=1)
    stop = threading.Event()
    assert not pool.prefault(lambda done, total: stop.set(), stop)
    assert resident_pages(pool) < pool.size // mmap.PAGESIZE
    pool.close()


def test_an_older_kernel_allocates_the_file_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 255)  # unknown to every kernel: EINVAL
    pool = DramPool(4 * MIB)
    pool.view[:4] = b"kept"
    assert pool.prefault()
    assert os.fstat(pool.fd).st_blocks * 512 == 4 * MIB
    assert bytes(pool.view[:4]) == b"kept"
    pool.close()


def test_memory_that_runs_out_while_prefaulting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size: int, advice: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(memory, "madvise", refuse)
    pool = DramPool(MIB)
    with pytest.raises(
        NotEnoughMemory, match=r"1048576 bytes does not fit here: .*Cannot allocate memory.*dram\.size"
    ):
        pool.prefault()
    pool.close()


def test_memory_that_cannot_be_mapped_is_named_and_leaves_nothing_open() -> None:
    descriptors = psutil.Process().num_fds()
    used = psutil.Process().memory_info().vms
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, limits[1]))
    try:
        with pytest.raises(NotEnoughMemory, match="cannot be mapped: Cannot allocate memory"):
            DramPool(256 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert psutil.Process().num_fds() == descriptors


def test_an_error_of_whoever_shows_progress_is_theirs() -> None:
    def fail(done: int, total: int) -> None:
        raise BrokenPipeError

    pool = DramPool(MIB)
    with pytest.raises(BrokenPipeError):
        pool.prefault(fail)
    pool.close()


def test_a_pool_larger_than_the_machine_is_refused_at_once() -> None:
    with pytest.raises(NotEnoughMemory, match=r"bytes are available\. Lower dram\.size"):
        DramPool(psutil.virtual_memory().total + 4096)


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (-1, 1), (4096, 0)])
def test_senseless_arguments_are_refused(size: int, threads: int) -> None:
    with pytest.raises(InvalidRequest):
        DramPool(size, prefault_threads=threads)


def test_a_client_maps_the_same_memory_by_the_descriptor() -> None:
    pool = DramPool(MIB)
    with mmap.mmap(pool.fd, MIB) as theirs:
        theirs[100:105] = b"hello"
        assert bytes(pool.view[100:105]) == b"hello"
    pool.close()


def test_nobody_can_resize_the_memory_under_the_daemon() -> None:
    pool = DramPool(MIB)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.truncate(pool.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    pool.close()


def test_the_descriptor_is_not_inherited() -> None:
    pool = DramPool(4096)
    assert not os.get_inheritable(pool.fd)
    pool.close()


def test_opening_and_closing_leaks_no_descriptor_and_no_memory() -> None:
    process = psutil.Process()
    DramPool(4096).close()  # whatever the first one sets up for good
    gc.collect()  # what the errors in tests before this one left to the collector
    descriptors, memory = process.num_fds(), process.memory_info().rss
    for _ in range(20):
        pool = DramPool(16 * MIB)
        pool.prefault()
        pool.close()
    assert process.num_fds() == descriptors
    assert process.memory_info().rss - memory < 16 * MIB


def cgroup(root: Path, path: str, limit: str, current: int, inactive_file: int) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\nfile 5\n")


def test_the_tightest_cgroup_limit_counts(tmp_path: Path) -> None:
    cgroup(tmp_path, "a", "1000", 700, 100)
    cgroup(tmp_path, "a/b", "max", 600, 50)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert memory.cgroup_left(tmp_path, own) == 400
    cgroup(tmp_path, "a/b", "650", 600, 50)
    assert memory.cgroup_left(tmp_path, own) == 100
    cgroup(tmp_path, "a/b", "600", 700, 0)
    assert memory.cgroup_left(tmp_path, own) == 0


def test_without_cgroups_there_is_no_such_limit(tmp_path: Path) -> None:
    assert memory.cgroup_left(tmp_path, tmp_path / "missing") > 1 << 60


# --- huge pages and NUMA -----------------------------------------------------------------------------------


def reserved(kind: str = "hugepages-2048kB") -> int:
    """How many huge pages are free."""
    file = Path("/sys/kernel/mm/hugepages") / kind / "free_hugepages"
    return int(file.read_text()) if file.exists() else 0


def test_too_few_huge_pages_are_a_warning_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    size = (reserved() + 3) * 2 * MIB - 4096
    pool = DramPool(size, huge_pages="2MiB")
    assert (pool.huge_pages, pool.size) == ("transparent", size)
    assert "huge pages are not there, using transparent ones" in caplog.text
    assert "sysctl vm.nr_hugepages=" in caplog.text
    pool.close()


@pytest.mark.skipif(reserved() < 2, reason="no huge pages are reserved on this machine")
def test_huge_pages_that_are_reserved_are_used() -> None:
    before = reserved()
    pool = DramPool(3 * MIB, huge_pages="2MiB", numa_nodes=[0])
    assert (pool.huge_pages, pool.size) == ("2MiB", 4 * MIB)
    assert pool.prefault()
    pool.view[:5] = b"hello"
    assert reserved() == before - 2
    with pytest.raises(PermissionError):
        os.truncate(pool.fd, 0)
    pool.discard()
    assert reserved() == before
    pool.close()


def test_how_many_huge_pages_to_reserve(tmp_path: Path) -> None:
    folder = tmp_path / "hugepages-2048kB"
    folder.mkdir()
    (folder / "nr_hugepages").write_text("10\n")
    (folder / "free_hugepages").write_text("3\n")
    assert memory.huge_pages_remedy("2MiB", 100 * MIB, tmp_path) == "sysctl vm.nr_hugepages=57"
    assert "hugepagesz=1G hugepages=2" in memory.huge_pages_remedy("1GiB", 1025 * MIB, tmp_path)


def test_memory_comes_from_the_numa_nodes_that_are_asked_for() -> None:
    pool = DramPool(MIB, numa_nodes=memory.memory_nodes())
    assert pool.prefault()
    assert pool.numa_nodes == tuple(memory.memory_nodes())
    pool.close()
    descriptors = psutil.Process().num_fds()
    with pytest.raises(ConfigError, match=r"dram\.numa: .* NUMA node 900\. Nodes with memory here are: 0"):
        DramPool(MIB, numa_nodes=[900])
    assert psutil.Process().num_fds() == descriptors


def test_a_system_that_refuses_to_bind_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(memory, "bind_to_nodes", refuse)
    pool = DramPool(MIB, numa_nodes=[0])
    assert pool.numa_nodes == ()
    assert "memory cannot be bound to NUMA nodes" in caplog.text
    pool.close()


def test_which_nodes_there_are(tmp_path: Path) -> None:
    assert memory.memory_nodes(tmp_path) == [0]
    (tmp_path / "has_memory").write_text("0-1,4\n")
    assert memory.memory_nodes(tmp_path) == [0, 1, 4]


def test_memory_that_was_given_back_is_gone_for_all_who_map_it() -> None:
    pool = DramPool(4 * MIB)
    pool.prefault()
    with mmap.mmap(pool.fd, 4 * MIB) as theirs:
        theirs[:5] = b"hello"
        pool.discard()
        assert os.fstat(pool.fd).st_blocks == 0
        assert bytes(theirs[:5]) == bytes(5)
    pool.close()


def test_memory_of_another_size_is_not_adopted() -> None:
    fd = memory.make_memfd("x", 4096)
    with pytest.raises(InvalidRequest, match="region 2 has 4096 bytes, not 8192"):
        DramPool(8192, 2, fd=fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
