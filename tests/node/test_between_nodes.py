"""Nodes as processes: blocks that one has and another's client reads, and nodes that die meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncaked.client import Client
from tests.node.running import NodeProcess, node_process, node_thread
from tests.node.small_node import SmallNode


@pytest.fixture
def far(tmp_path: Path) -> Iterator[NodeProcess]:
    with node_process(tmp_path / "far.sock", node_id="far", size=256 << 20) as far:
        yield far


@pytest.fixture
def near(tmp_path: Path, far: NodeProcess) -> Iterator[SmallNode]:
    peers = {"far": far.peer_address, "dead": "127.0.0.1:1"}
    with node_thread(tmp_path / "near.sock", node_id="near", size=256 << 20, peers=peers) as near:
        yield near


def test_a_block_of_another_node_is_read_by_its_name(near: SmallNode, far: NodeProcess) -> None:
    with Client(far.socket) as writer, Client(near.socket, verify=True) as reader:
        writer.put_batch(["a", "b"], [b"1" * 1000, b"2" * 1000], parents=[None, "a"])
        assert reader.get("a") is None  # without a hint only this node is looked at
        assert reader.get_batch(["a", "x", "b"], sources=["far"]) == [b"1" * 1000, None, b"2" * 1000]
        assert reader.get("a") == b"1" * 1000  # it stays as a replica
        info = near.store.block_info("default", b"b")
        assert info is not None
        assert info.parent == b"a"


def test_tensors_travel_with_shape_and_type(near: SmallNode, far: NodeProcess) -> None:
    tensor = np.arange(12, dtype=np.float16).reshape(3, 4)
    with Client(far.socket) as writer, Client(near.socket) as reader:
        writer.put_tensor("t", tensor)
        assert np.array_equal(reader.get_tensor("t", sources=["far"]), tensor)


def test_a_dead_source_before_a_good_one(near: SmallNode, far: NodeProcess) -> None:
    with Client(far.socket) as writer, Client(near.socket) as reader:
        writer.put("a", b"value")
        assert reader.get("a", sources=["dead", "unknown", "far"]) == b"value"


def test_two_clients_that_want_the_same(near: SmallNode, far: NodeProcess) -> None:
    value = np.random.default_rng(1).bytes(8 << 20)
    results: list[bytes | None] = []
    with Client(far.socket) as writer, Client(near.socket) as one, Client(near.socket) as two:
        writer.put("a", value)
        threads = [
            threading.Thread(target=lambda client=client: results.append(client.get("a", sources=["far"])))
            for client in (one, two, one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [value] * 4
    assert near.store.stats().stored == 1


def test_a_node_killed_in_the_middle_of_a_fetch(near: SmallNode, far: NodeProcess) -> None:
    """Whatever had come by then is whole, everything else a miss, and soon."""
    keys = [f"k{i}" for i in range(200)]
    rng = np.random.default_rng(3)
    values = {key: rng.bytes(1 << 20) for key in keys}
    read: list[bytes | None] = []
    with Client(far.socket) as writer, Client(near.socket, timeout_s=10) as reader:
        writer.put_batch(keys, list(values.values()))
        thread = threading.Thread(target=lambda: read.extend(reader.get_batch(keys, sources=["far"])))
        thread.start()
        near.store.wait_events(0, 10)  # the first blocks have come
        begin = time.monotonic()
        far.kill()
        thread.join(20)
        assert time.monotonic() - begin < 8
        assert len(read) == len(keys)
        for key, value in zip(keys, read, strict=True):
            assert value is None or value == values[key]
        assert near.store.stats().filling == 0
        assert reader.get("k199x", sources=["far"]) is None


def test_a_node_that_hangs_is_a_miss_by_the_deadline(near: SmallNode, far: NodeProcess) -> None:
    with Client(far.socket) as writer, Client(near.socket, timeout_s=1) as reader:
        writer.put("a", b"value")
        far.signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert reader.get("a", sources=["far"]) is None
        assert time.monotonic() - begin < 1.5
        begin = time.monotonic()
        for _ in range(20):  # the breaker spares the others the wait
            assert reader.get("b", sources=["far"]) is None
        assert time.monotonic() - begin < 2.5
        far.signal(signal.SIGCONT)


def test_a_node_that_comes_back_is_read_from_again(near: SmallNode, far: NodeProcess) -> None:
    with Client(near.socket) as reader:
        far.kill()
        assert reader.get("a", sources=["far"]) is None
        far.start()
        near.peers["far"] = far.peer_address
        with Client(far.socket) as writer:
            writer.put("a", b"value")
        end = time.monotonic() + 10
        while reader.get("a", sources=["far"]) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
