"""A process with a store in kept memory, which the environment may tell to crash at a failpoint:

    python -m tests.node.warm_process SHM_DIR ROUNDS

It prints one line for each change that was acknowledged: `+key` or `-key`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import xxhash

from mooncaked.api.protocol import PutItem
from mooncaked.clock import SystemClock
from mooncaked.config import DramConfig
from mooncaked.failpoints import arm_from_environment
from mooncaked.notify import Notifier
from mooncaked.pools.keep import open_keeper
from mooncaked.store import Store
from mooncaked.warm import Memory, Origin

SIZE = 8 << 20


def value_of(key: str) -> bytes:
    """The value that is stored under `key`, of a size of its own."""
    return key.encode() * (1 + 97 * int(key.removeprefix("k")) % 3000)


def open_memory(shm_dir: Path, *, epoch: int = 1, cold: bool = False, **settings: object) -> Memory:
    """Memory that is kept in files below `shm_dir`."""
    dram = DramConfig(size=SIZE, warm_restart="shm", shm_dir=shm_dir)
    for name, value in settings.items():
        dram = type(dram)(**{**{n: getattr(dram, n) for n in dram.__struct_fields__}, name: value})
    origin = Origin(settings=dram, source="test", node_id="n1", epoch=epoch, cold=cold)
    return Memory(origin, open_keeper(dram, "n1", Notifier({}), {}), SystemClock())


def open_store(memory: Memory) -> Store:
    """A store in that memory, with the blocks from before."""
    first, *others = memory.regions.live()
    store = Store(
        first,
        high_watermark=0.95,
        low_watermark=0.9,
        epoch=memory.epoch,
        clock=SystemClock(),
        followers=memory.followers,
    )
    for pool in others:
        store.add_region(pool)
    memory.restore(store)
    return store


def put(store: Store, owner: int, key: str, parent: str | None = None) -> None:
    """Store the value of `key`."""
    value = value_of(key)
    item = PutItem(key=key.encode(), size=len(value), parent=parent.encode() if parent else None, meta=b"m")
    (slot,) = store.begin_put(owner, "ns", [item])
    if slot.status == "ok":
        store.view(slot.region, slot.offset, len(value))[:] = value
        store.commit(owner, [slot.token], [xxhash.xxh3_64_intdigest(value)])


def main(shm_dir: Path, rounds: int) -> None:
    memory = open_memory(shm_dir)
    arm_from_environment(os.environ)
    store = open_store(memory)
    owner = store.new_owner()
    for i in range(rounds):
        put(store, owner, f"k{i}")
        print(f"+k{i}", flush=True)
        if i % 3 == 2:
            store.remove("ns", [b"k%d" % (i - 1)])
            print(f"-k{i - 1}", flush=True)
        if i % 10 == 9 and memory.journal is not None:
            memory.journal.compact()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
