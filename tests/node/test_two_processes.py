"""Two processes on one node: many blocks written by one and read by the other, each with its checksum."""

from __future__ import annotations

import json
from pathlib import Path

from tests.node.running import line_of, node_process, script

COUNT = 10_000
BLOCK_BYTES = 64 << 10

COMMON = """
import json, sys, time
import numpy as np, xxhash
from mooncaked.client import Client
count, size, batch = int(sys.argv[2]), int(sys.argv[3]), 100
client = Client(sys.argv[1], namespace="two")
pages = np.random.default_rng(7).integers(0, 256, (64, size), np.uint8)
def block(i):                       # a value that says which it is, all over
    value = pages[i % 64] + np.uint8(i // 64)
    value[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)
    return value
"""

WRITER = (
    COMMON
    + """
sums, seconds = [], 0.0
for start in range(0, count, batch):
    keys = [f"block {i}" for i in range(start, start + batch)]
    values = [block(i) for i in range(start, start + batch)]
    sums += [xxhash.xxh3_64_intdigest(value) for value in values]
    begin = time.perf_counter()
    assert set(client.put_batch(keys, values, parents=[None, *keys[:-1]])) == {"stored"}
    seconds += time.perf_counter() - begin
json.dump(sums, open(sys.argv[4], "w"))
print(seconds, flush=True)
"""
)

READER = (
    COMMON
    + """
sums = json.load(open(sys.argv[4]))
target, good, seconds = np.empty((batch, size), np.uint8), 0, 0.0
for start in range(0, count, batch):
    keys = [f"block {i}" for i in range(start, start + batch)]
    begin = time.perf_counter()
    read = client.get_into_batch(keys, list(target))
    seconds += time.perf_counter() - begin
    for i, length in enumerate(read):
        good += length == size and xxhash.xxh3_64_intdigest(target[i]) == sums[start + i]
print(good, seconds, flush=True)
"""
)


def test_ten_thousand_blocks_from_one_process_to_another(tmp_path: Path) -> None:
    sums = tmp_path / "sums.json"
    with node_process(tmp_path / "c.sock", size=704 << 20) as node:
        with script(WRITER, node.socket, COUNT, BLOCK_BYTES, sums) as writer:
            assert float(line_of(writer)) > 0
        assert len(json.loads(sums.read_text())) == COUNT
        with script(READER, node.socket, COUNT, BLOCK_BYTES, sums) as reader:
            good, _ = line_of(reader).split()
            assert int(good) == COUNT


def test_a_writer_of_more_than_the_pool_holds_is_never_refused(tmp_path: Path) -> None:
    """What comes last is there, whole; what came first made room for it."""
    sums = tmp_path / "sums.json"
    with node_process(tmp_path / "c.sock", size=32 << 20) as node:
        with script(WRITER, node.socket, 2000, BLOCK_BYTES, sums) as writer:
            assert float(line_of(writer)) > 0
        with script(
            READER.replace("good += ", "good += length is None or "), node.socket, 2000, BLOCK_BYTES, sums
        ) as reader:
            good, _ = line_of(reader).split()
            assert int(good) == 2000
