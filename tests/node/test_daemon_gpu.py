"""A real node with the stand-in of a GPU: what is read often is read in its memory by other processes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mooncaked.api.protocol import (
    GPU_REGION,
    Delta,
    Kind,
    Pin,
    PinReply,
    Side,
    Snapshot,
    Subscribe,
    SubscribeReply,
    Unpin,
    decode_body,
    encode_frame,
)
from mooncaked.client import AsyncClient, Client
from mooncaked.errors import InvalidRequest, ProtocolError
from mooncaked.types import Tier
from tests.node.daemons import Daemon, MakeDaemon, until
from tests.node.raw import Raw
from tests.node.running import line_of, script, tell

pytest.importorskip("torch")

SIZE = 100_000
BLOCKS = 8


def value(key: str) -> bytes:
    return (hashlib.blake2b(key.encode()).digest() * (SIZE // 64 + 1))[:SIZE]


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> Daemon:
    """With room for ten blocks in the memory of its "GPU"."""
    return make_daemon("a", node__id="a", gpu__devices="cpu", gpu__size="1MiB").start().ready()


def bring_up(daemon: Daemon, client: Client, *keys: str) -> None:
    """Store blocks and read them until they are in GPU memory."""
    for key in keys:
        client.put(key, value(key))

    def missing() -> list[str]:  # each is read, and thereby wanted there
        return [key for key in keys if in_gpu(client, key) is None]

    until(lambda: not missing(), "the blocks being brought up", 20)


def in_gpu(client: Client, key: str) -> bytes | None:
    with client.get_gpu_view(key) as tensor:
        return None if tensor is None else bytes(tensor.numpy())


async def in_gpu_async(daemon: Daemon, key: str) -> bytes | None:
    async with AsyncClient(daemon.socket_path) as client, client.get_gpu_view(key) as tensor:
        return None if tensor is None else bytes(tensor.numpy())


def command(daemon: Daemon, *words: str) -> str:
    """What `mooncakectl` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "mooncakectl", *words],
        env={"MOONCAKE_ETCD": daemon.etcd, "MOONCAKE_PREFIX": daemon.prefix, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_read_often_is_read_in_gpu_memory(daemon: Daemon) -> None:
    keys = [f"k{n}" for n in range(BLOCKS)]
    with daemon.client() as client:
        bring_up(daemon, client, *keys)
        assert [in_gpu(client, key) for key in keys] == [value(key) for key in keys]
        assert client.get_batch(keys) == [value(key) for key in keys], "the pool has them as well"
        assert in_gpu(client, "missing") is None
        assert client.remove("k3")
        assert in_gpu(client, "k3") is None
        client.put("k3", b"other")
        assert in_gpu(client, "k3") is None
        assert [info.region for info in client.hello().gpus] == [GPU_REGION]
    assert asyncio.run(in_gpu_async(daemon, "k4")) == value("k4")
    status = daemon.status()
    (pool,) = status["gpus"]["pools"]
    assert (pool["device"], pool["state"], pool["capacity_bytes"]) == ("cpu", "active", 1 << 20)
    assert status["gpus"]["page_locked_bytes"] == 16 << 20
    assert status["node"]["capacity_bytes"] == {"dram": 16 << 20, "gpu": 1 << 20}
    assert status["gpus"]["blocks"] == daemon.metric("mooncaked_gpu_blocks") == BLOCKS - 1
    assert daemon.metric('mooncaked_gpu_reads_total{result="hit"}') >= 2 * BLOCKS
    shown = command(daemon, "node", "show", "a")
    assert "GPU pools" in shown
    assert "pool gpu" in shown
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "WARNING" not in daemon.log


_HOLDER = """
import sys
from contextlib import ExitStack
from mooncaked.client import Client
assert "torch" not in sys.modules
client = Client(sys.argv[1])
with ExitStack() as stack:
    tensors = [stack.enter_context(client.get_gpu_view(key)) for key in sys.argv[2:]]
    print("".join(bytes(t[:4].numpy()).hex() for t in tensors), flush=True)
    sys.stdin.readline()
    print("".join(bytes(t[-4:].numpy()).hex() for t in tensors), flush=True)
    sys.stdin.readline()
"""


def test_a_client_that_dies_ends_its_pins_in_gpu_memory(daemon: Daemon) -> None:
    pinned = ["k0", "k1"]
    with daemon.client() as client:
        bring_up(daemon, client, *pinned)
        with script(_HOLDER, daemon.socket_path, *pinned) as holder:
            assert line_of(holder) == "".join(value(key)[:4].hex() for key in pinned)
            client.remove_batch(pinned)
            until(lambda: daemon.status()["gpus"]["blocks"] == 0, "the blocks being forgotten")
            used = daemon.status()["gpus"]["used_bytes"]
            assert used >= 2 * SIZE, "they are read, so their memory stays"
            tell(holder)
            assert line_of(holder) == "".join(value(key)[-4:].hex() for key in pinned), "and as it was"
            holder.kill()
            until(lambda: daemon.status()["gpus"]["used_bytes"] == 0, "their memory being free")


def test_one_question_pins_copies_and_blocks_and_one_ends_both(daemon: Daemon) -> None:
    with daemon.client() as client, Raw(daemon.socket_path) as raw:
        bring_up(daemon, client, "a")
        client.put("b", value("b"))
        raw.greet(name="test")
        request = Pin(namespace="default", keys=[b"a", b"b", b"c"], deadline_ms=0, tier="gpu")
        copy, block, missing = raw.ask(Kind.PIN, request, PinReply).blocks
        assert copy is not None
        assert block is not None
        assert (copy.region, block.region < GPU_REGION, missing) == (GPU_REGION, True, None)
        plain = msgspec.structs.replace(request, keys=[b"a"], tier="")
        (in_memory,) = raw.ask(Kind.PIN, plain, PinReply).blocks
        assert in_memory is not None
        assert in_memory.region < GPU_REGION, "who did not ask for it is not given GPU memory"
        pins = [copy.pin, block.pin, in_memory.pin]
        raw.send(encode_frame(Kind.UNPIN, 0, Unpin(pins=pins)))
        until(lambda: daemon.status()["pool"]["pinned"] == 0, "no block being read")
        with pytest.raises(InvalidRequest, match="are pinned in"):
            raw.ask(Kind.PIN, msgspec.structs.replace(request, tier="ssd"), PinReply)
        client.remove("a")
        until(lambda: daemon.status()["gpus"]["used_bytes"] == 0, "nor any copy")
        raw.send(encode_frame(Kind.UNPIN, 0, Unpin(pins=[copy.pin])))
        with pytest.raises(ProtocolError, match="pin"):
            raw.ask(Kind.PIN, plain, PinReply)


def test_who_subscribes_hears_of_gpu_memory(daemon: Daemon) -> None:
    with daemon.client() as client, Raw(daemon.peer_address) as raw:
        bring_up(daemon, client, "a")
        raw.greet(side=Side.CONDUCTOR)
        raw.ask(Kind.SUBSCRIBE, Subscribe(), SubscribeReply)
        head, data = raw.frame()
        assert head.kind is Kind.SNAPSHOT
        assert {event.tier for event in decode_body(data, Snapshot, "node").blocks} == {Tier.DRAM, Tier.GPU}
        bring_up(daemon, client, "b")
        client.remove("a")
        heard: list[tuple[bool, bytes, Tier]] = []
        while (False, b"a", Tier.GPU) not in heard:
            _, data = raw.frame()
            heard += [(e.stored, e.key, e.tier) for e in decode_body(data, Delta, "node").events]
        assert [change for change in heard if change[2] is Tier.GPU] == [
            (True, b"b", Tier.GPU),
            (False, b"a", Tier.GPU),
        ]


def test_a_resized_pool_is_page_locked_as_it_is(daemon: Daemon) -> None:
    with daemon.client() as client:
        for size in ("24MiB", "8MiB"):
            command(daemon, "node", "pool", "resize", "a", size)
            locked = int(size.removesuffix("MiB")) << 20
            until(lambda n=locked: daemon.status()["gpus"]["page_locked_bytes"] == n, "the locks")  # type: ignore[misc]
            bring_up(daemon, client, f"after {size}")


def test_a_device_that_cannot_be_had_ends_the_start_with_the_reason(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("a", gpu__devices="cuda:99").start()
    assert daemon.wait() == 3
    assert "cuda:99 cannot be used" in daemon.log


def test_without_torch_the_start_says_how_to_get_it(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = make_daemon("a", gpu__devices="cpu")
    daemon.launcher = [sys.executable, "-c", _WITHOUT_TORCH]
    assert daemon.start().wait() == 3
    assert "pip install 'mooncaked[gpu]'" in daemon.log


_WITHOUT_TORCH = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
sys.argv = ["mooncaked", *sys.argv[4:]]
runpy.run_module("mooncaked", run_name="__main__")
"""
