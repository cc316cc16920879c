"""Real nodes with a little memory and a disk: what leaves memory is kept, found again, and served."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mooncaked.client import Client
from tests.node.daemons import Daemon, MakeDaemon, until

BLOCK = 128 << 10
DRAM_BLOCKS = 128  # 16 MiB
COUNT = 4 * DRAM_BLOCKS


def value(number: int) -> bytes:
    """The bytes of block `number`."""
    return hashlib.blake2b(b"%d" % number, digest_size=64).digest() * (BLOCK // 64)


def with_disk(
    make_daemon: MakeDaemon, directory: Path, name: str = "a", size: str = "256MiB", **settings: str
) -> Daemon:
    directory.mkdir(exist_ok=True)
    options = {"ssd__segment_size": "8MiB", "node__drain_timeout": "5s"} | settings
    return make_daemon(name, node__id=name, ssd__devices=f"{directory}={size}", **options)


def write(client: Client, numbers: Sequence[int], reuse: bool = True) -> None:
    """Store blocks, and read each so that it is worth a place on the disk."""
    for number in numbers:
        client.put(b"%d" % number, value(number))
        if reuse:
            assert client.get(b"%d" % number) == value(number)


def write_slowly(daemon: Daemon, client: Client, count: int) -> None:
    """`write`, no faster than what leaves memory can be saved: 16 blocks at a time, an eighth of it."""
    for start in range(0, count, 16):
        write(client, range(start, start + 16))
        if start > 0.9 * DRAM_BLOCKS:
            until(lambda s=start: daemon.status()["tiers"]["demoted_blocks"] >= s, "the disk keeping up")  # type: ignore[misc]


def read(client: Client, numbers: Sequence[int], **options: object) -> list[int]:
    """The numbers of those that were there, each compared."""
    found = []
    for number in numbers:
        data = client.get(b"%d" % number, **options)  # type: ignore[arg-type]
        assert data is None or data == value(number), f"block {number} is not what was written"
        if data is not None:
            found.append(number)
    return found


def test_four_times_the_memory_is_read_back(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = with_disk(make_daemon, tmp_path / "disk").start().ready()
    with daemon.client(timeout_s=20) as client:
        write_slowly(daemon, client, COUNT)
        found = read(client, range(COUNT))
        assert len(found) >= 0.95 * COUNT
        status = daemon.status()
        assert status["node"]["capacity_bytes"]["ssd"] == 256 << 20
        (disk,) = status["tiers"]["disks"]
        assert (disk["state"], disk["reason"]) == ("active", "")
        assert disk["blocks"] >= COUNT / 2
        assert daemon.metric("mooncaked_ssd_promoted_blocks_total") >= COUNT / 2
        assert daemon.metric('mooncaked_ssd_devices{state="active"}') == 1
        assert daemon.metric("mooncaked_ssd_demoted_bytes_total") >= COUNT / 2 * BLOCK
        client.remove_batch([b"3", b"400"])
        assert read(client, [3, 400]) == []


def test_after_kill_9_the_blocks_on_disk_are_there_and_peers_get_them(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    first = with_disk(make_daemon, tmp_path / "disk").start().ready()
    with first.client(timeout_s=20) as client:
        write_slowly(first, client, 2 * DRAM_BLOCKS)
    on_disk = first.status()["tiers"]["disks"][0]["blocks"]
    assert on_disk >= DRAM_BLOCKS
    first.kill()
    first.start().ready()
    assert first.status()["tiers"]["disks"][0]["blocks"] >= on_disk
    with first.client(timeout_s=20) as client:
        numbers = [n for n in range(2 * DRAM_BLOCKS) if client.exists(b"%d" % n)]
        assert len(numbers) >= on_disk
        assert read(client, numbers[:40]) == numbers[:40]

    second = make_daemon("b", node__id="b").start().ready()
    until(lambda: [peer["node_id"] for peer in second.status()["peers"]] == ["a"], "b seeing a")
    rest = numbers[40:100]
    with second.client(timeout_s=20) as client:
        assert read(client, rest, sources=["a"]) == rest
    assert first.metric("mooncaked_peer_sent_bytes_total") == len(rest) * BLOCK


def test_a_block_used_once_does_not_wear_the_disk(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = with_disk(make_daemon, tmp_path / "disk").start().ready()
    with daemon.client(timeout_s=20) as client:
        write(client, range(2 * DRAM_BLOCKS), reuse=False)
    until(lambda: daemon.status()["pool"]["evicted"] >= DRAM_BLOCKS / 2, "blocks leaving")
    assert daemon.status()["tiers"]["demoted_blocks"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield directory
    with contextlib.suppress(OSError):
        subprocess.run(["umount", "-l", str(directory)], check=False)


def test_a_full_file_system_costs_blocks_and_nothing_else(
    make_daemon: MakeDaemon, tmp_path: Path, small_disk: Path
) -> None:
    daemon = with_disk(make_daemon, small_disk, size="128MiB").start().ready()
    with daemon.client(timeout_s=20) as client:
        write_slowly(daemon, client, COUNT)
        found = read(client, range(COUNT))
        assert len(found) >= 1.5 * DRAM_BLOCKS
    assert daemon.http("/readyz")[0] == 200


def test_a_disk_that_becomes_read_only_is_taken_out_for_writes(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = with_disk(make_daemon, tmp_path / "disk")
    daemon.environment["MOONCAKE_FAILPOINTS"] = "ssd.commit.before_write=erofs@4"
    daemon.start().ready()
    with daemon.client(timeout_s=20) as client:
        write(client, range(DRAM_BLOCKS // 2))
        for start in range(DRAM_BLOCKS // 2, COUNT, 16):
            write(client, range(start, start + 16))
        until(lambda: daemon.status()["tiers"]["disks"][0]["state"] == "read_only", "the disk taken out")
        (disk,) = daemon.status()["tiers"]["disks"]
        assert "read-only" in disk["reason"]
        assert disk["blocks"] > 0
        assert len(read(client, range(COUNT - 64, COUNT))) == 64, "it serves on"
        assert read(client, range(DRAM_BLOCKS)), "what is on the disk can be read"
    until(lambda: f"disk {tmp_path / 'disk'} is read-only" in daemon.status_line(), "the line for systemd")
    assert "ssd device takes itself out" in daemon.log
    assert daemon.http("/readyz")[0] == 200


def test_a_disk_that_cannot_be_used_is_left_out(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    (tmp_path / "good").mkdir()
    devices = f"{missing}=64MiB,{tmp_path / 'good'}=64MiB"
    daemon = make_daemon("a", ssd__devices=devices, ssd__segment_size="4MiB").start().ready()
    bad, good = daemon.status()["tiers"]["disks"]
    assert (bad["state"], good["state"]) == ("failed", "active")
    assert "does not exist" in bad["reason"]
    assert f"disk {missing} is failed" in daemon.status_line()


def test_stopping_writes_what_is_on_its_way(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = with_disk(make_daemon, tmp_path / "disk").start().ready()
    with daemon.client(timeout_s=20) as client:
        write(client, range(2 * DRAM_BLOCKS))
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "WARNING" not in daemon.log
    daemon.start().ready()
    assert daemon.status()["tiers"]["disks"][0]["blocks"] > 0
