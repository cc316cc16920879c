"""How long a node with many blocks is away when it is killed and started again:

    python -m tests.perf.warm_restart [BLOCKS] [BLOCK_BYTES]

Times are from the start of the new process: until it serves engines, until the first block was read and
compared, and until all blocks were compared with their checksums."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mooncaked.client import Client
from mooncaked.errors import MooncakeError
from tests.node.daemons import Daemon, until

BATCH = 500


def fill(client: Client, blocks: int, size: int) -> None:
    """Store `blocks` values, each its own."""
    for first in range(0, blocks, BATCH):
        keys = [f"block-{i}" for i in range(first, min(first + BATCH, blocks))]
        client.put_batch(keys, [key.encode().ljust(size, b".") for key in keys])


def answers(client: Client, key: str) -> bool:
    """Whether the daemon answers at all; True also for a miss."""
    try:
        client.exists(key)
    except MooncakeError:
        return False
    return True


def reads(client: Client, key: str, size: int) -> bool:
    """Whether the right value is read."""
    try:
        return client.get(key) == key.encode().ljust(size, b".")
    except MooncakeError:
        return False


def main(blocks: int, size: int) -> None:
    """Measure, and print."""
    folder = Path(tempfile.mkdtemp(prefix="mooncaked-perf-", dir="/dev/shm"))
    room = f"{2 + blocks * -(-size // 4096) * 4096 * 9 // 8 >> 20}MiB"
    settings = {"dram__size": room, "dram__warm_restart": "shm", "dram__shm_dir": str(folder)}
    daemon = Daemon(folder / "node", "127.0.0.1:1", "/perf", **settings)
    try:
        with daemon.start().serving().client() as client:
            fill(client, blocks, size)
            present = daemon.status()["pool"]["blocks"]
            daemon.kill()
            begin = time.monotonic()
            daemon.start()
            until(lambda: answers(client, "block-0"), "serving")
            serving_s = time.monotonic() - begin
            used = psutil.Process(daemon.process.pid).cpu_times()
            until(lambda: reads(client, f"block-{blocks // 2}", size), "a block")
            first_s = time.monotonic() - begin
            until(lambda: daemon.status()["pool"]["unverified"] == 0, "all compared")
            all_s = time.monotonic() - begin
            pool = daemon.status()["pool"]
            print(*(line for line in daemon.log.splitlines() if "memory taken over" in line))
            print(
                f"{present} blocks of {size} bytes: {pool['blocks']} back, {pool['damaged']} damaged; "
                f"serving after {serving_s:.2f} s ({used.user + used.system:.2f} s of CPU), "
                f"first read after {first_s:.2f} s, "
                f"all compared after {all_s:.2f} s (load {os.getloadavg()[0]:.1f})"
            )
    finally:
        daemon.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *("100000", "16384")[len(sys.argv) - 1 :]]))
