"""Clients that read and write through shared memory, beside those who evict, lie, die and fork."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mooncaked.api import shm
from mooncaked.api.protocol import (
    Fetch,
    FetchReply,
    Kind,
    PutBegin,
    PutBeginReply,
    PutCommit,
    PutCommitReply,
    PutData,
    PutItem,
    PutStored,
    RegionInfo,
    Reserve,
    ReserveReply,
    Side,
    StoredItem,
    encode_frame,
)
from mooncaked.api.sharing import SharedRegion
from mooncaked.client import AsyncClient, Client, PutResult
from mooncaked.errors import ConnectionLost, InvalidRequest, ProtocolError
from mooncaked.pools.dram import DramPool
from tests.node.raw import Raw
from tests.node.running import NodeProcess, line_of, node_process, node_thread, script, tell, until
from tests.node.small_node import SmallNode

POOL_BYTES = 32 << 20
MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with node_thread(tmp_path / "c.sock", size=POOL_BYTES) as node:
        yield node


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    with node_process(tmp_path / "c.sock", size=POOL_BYTES) as process:
        yield process


@pytest.fixture
def client(node: SmallNode) -> Iterator[Client]:
    with Client(node.socket) as client:
        client.put("here", b"value")
        yield client


def requests(node: SmallNode, kind: Kind) -> int:
    """How many requests of a kind the daemon has answered."""
    return int(node.counters.requests[kind]._value.get())


# --- reads need no daemon -------------------------------------------------------------------------------


def test_reads_of_what_is_here_ask_nobody(client: Client, node: SmallNode) -> None:
    before = requests(node, Kind.PIN), requests(node, Kind.EXISTS), requests(node, Kind.PREFIX_MATCH)
    assert client.exists("here")
    assert not client.exists("not here")
    assert client.get("here") == b"value"
    assert client.get("not here") is None
    assert client.get_into("here", bytearray(9)) == 5
    assert client.prefix_match(["here", "not here"]) == 1
    with client.get_view("here") as view:
        assert view == b"value"
    after = requests(node, Kind.PIN), requests(node, Kind.EXISTS), requests(node, Kind.PREFIX_MATCH)
    assert after == before


def test_direct_reads_count_as_uses(client: Client, node: SmallNode) -> None:
    hits, misses = node.store.stats().hits, node.store.stats().misses
    for _ in range(10):
        client.get("here")
        client.get("not here")
    until(lambda: node.store.stats().hits == hits + 10, "uses are counted")
    until(lambda: node.store.stats().misses == misses + 10, "misses are counted")


def test_the_last_uses_of_a_client_count(client: Client, node: SmallNode) -> None:
    hits = node.store.stats().hits
    with Client(node.socket) as brief:
        brief.exists("here")
        assert brief.get("here") == b"value"
    until(lambda: node.store.stats().hits == hits + 1, "uses are counted")


def test_what_is_read_directly_is_kept(client: Client, node: SmallNode) -> None:
    client.put("hot", bytes(MIB))
    for number in range(100):  # three times what the pool holds
        client.put(f"cold {number}", bytes(MIB))
        assert client.get_into("hot", bytearray(MIB)) == MIB
        node.store.look_after()


def test_metadata_is_asked_for(client: Client) -> None:
    import numpy as np

    client.put_tensor("tensor", np.arange(6.0))
    assert client.get_tensor("tensor") is not None
    assert len(client.get("tensor") or b"") == 48


# --- views ----------------------------------------------------------------------------------------------


def test_a_view_keeps_its_memory_from_eviction(client: Client, node: SmallNode) -> None:
    value = random.Random(1).randbytes(3 * MIB)
    client.put("viewed", value)
    with client.get_view("viewed") as view:
        for number in range(60):
            client.put(f"k{number}", bytes([number]) * MIB)
        assert view == value
        assert node.store.stats().hidden <= 1
    until(lambda: node.store.stats().hidden == 0, "its memory goes")


def test_views_beyond_what_a_page_holds_are_pins(client: Client, node: SmallNode) -> None:
    with ExitStack() as stack:
        for _ in range(shm.HAZARDS + 3):
            assert stack.enter_context(client.get_view("here")) == b"value"
        assert (node.pages.viewing(), node.store.stats().pinned) == (shm.HAZARDS, 1)
        assert client.remove("here") is False
    until(lambda: node.store.stats().hidden == 0, "its memory goes")


def test_a_daemon_that_is_killed_in_the_middle_of_a_view(process: NodeProcess) -> None:
    with Client(process.socket) as client:
        client.put("k", b"value")
        with pytest.raises(ConnectionLost), client.get_view("k") as view:  # noqa: PT012
            process.signal(signal.SIGKILL)
            until(lambda: not client._pool.direct or not client._pool.direct.connected(), "it is gone")
            assert view == b"value"


async def test_an_asyncio_view_of_a_daemon_that_is_killed(process: NodeProcess) -> None:
    async with AsyncClient(process.socket) as client:
        await client.put("k", b"value")
        with pytest.raises(ConnectionLost):  # noqa: PT012
            async with client.get_view("k") as view:
                process.kill()
                assert view == b"value"


def test_a_client_that_is_closed_in_the_middle_of_a_view(client: Client) -> None:
    with pytest.raises(ConnectionLost), client.get_view("here"):
        client.close()


def test_without_membarrier_views_are_pins(tmp_path: Path) -> None:
    with (
        node_thread(tmp_path / "c.sock", size=POOL_BYTES, fenced=False) as node,
        Client(node.socket) as client,
    ):
        client.put("k", b"value")
        with client.get_view("k") as view:
            assert view == b"value"
            assert (node.pages.viewing(), node.store.stats().pinned) == (0, 1)
        assert client.get("k") == b"value"


def test_a_node_without_a_shared_index_is_asked(tmp_path: Path) -> None:
    with (
        node_thread(tmp_path / "c.sock", size=POOL_BYTES, direct=False) as node,
        Client(node.socket) as client,
    ):
        for number in range(5):
            assert client.put(f"k{number}", b"value") is PutResult.STORED
        assert client.exists("k3")
        assert client.get("k4") == b"value"


# --- under fire -----------------------------------------------------------------------------------------

VALUES = """
import random, sys, time, xxhash
from mooncaked.client import Client
client = Client(sys.argv[1], namespace="storm", timeout_s=20)
rng = random.Random(sys.argv[2])
def key(number): return f"k{number}"
def value(number):
    size = 1000 + number * 7919 % 700_000
    return (b"%08d" % number * (size // 8 + 1))[:size]
def pick(): return min(rng.randrange(160), rng.randrange(160))
end = time.monotonic() + float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
"""

WRITER = (
    VALUES
    + """
count = 0
while time.monotonic() < end:
    numbers = {pick() for _ in range(rng.choice([1, 1, 1, 6]))}
    client.put_batch([key(n) for n in numbers], [value(n) for n in numbers])
    if rng.random() < .2:
        client.remove(key(pick()))
    count += len(numbers)
print(count, flush=True)
"""
)

READER = (
    VALUES
    + """
found, buffer = 0, bytearray(800_000)
while time.monotonic() < end:
    number, how = pick(), rng.randrange(4)
    want = value(number)
    if how == 0:
        got = client.get(key(number))
    elif how == 1:
        size = client.get_into(key(number), buffer)
        got = None if size is None else bytes(buffer[:size])
    elif how == 2:
        numbers = [number, pick()]
        got = client.get_batch([key(n) for n in numbers])
        assert got[1] is None or got[1] == value(numbers[1]), "wrong bytes in a batch"
        got = got[0]
    else:
        with client.get_view(key(number)) as view:
            got = None if view is None else bytes(view)
            assert view is None or bytes(view) == got, "a view changed"
    assert got is None or got == want, f"wrong bytes {how}"
    found += got is not None
print(found, flush=True)
"""
)


def test_readers_never_see_wrong_bytes_while_memory_is_used_again(process: NodeProcess) -> None:
    with ExitStack() as stack:
        sources = [WRITER, WRITER, READER, READER]
        crowd = [
            stack.enter_context(script(source, process.socket, number, 3))
            for number, source in enumerate(sources)
        ]
        assert [line_of(one) for one in crowd] == ["ready"] * len(crowd)
        for one in crowd:
            tell(one)
        assert all(int(line_of(one)) > 20 for one in crowd)


# --- posted writes --------------------------------------------------------------------------------------


def test_repeated_sizes_are_posted_and_seen_by_everybody_at_once(client: Client, node: SmallNode) -> None:
    with Client(node.socket) as other:
        other.get("here")
        for number in range(200):
            value = b"%06d" % number
            assert client.put(f"k{number}", value) is PutResult.STORED
            question = number % 4
            if question == 0:
                assert other.exists(f"k{number}")
            elif question == 1:
                assert other.get(f"k{number}") == value
            elif question == 2:
                assert other.prefix_match([f"k{number}"]) == 1
            else:
                assert other.remove(f"k{number}")
    assert requests(node, Kind.PUT_STORED) > 150
    assert requests(node, Kind.PUT_BEGIN) < 10


def test_a_posted_value_never_changes(client: Client) -> None:
    for number in range(20):
        client.put(f"k{number}", b"%06d" % number)
        assert client.put(f"k{number}", b"xxxxxx") is PutResult.EXISTS
    assert client.get("k19") == b"000019"


def test_posted_batches(client: Client, node: SmallNode) -> None:
    for turn in range(4):
        keys = [f"{turn}/{number}" for number in range(20)]
        values = [key.encode() * 1000 for key in keys]
        values = [(value * 2)[:8000] for value in values]
        assert client.put_batch(keys, values, parents=[None, *keys[:-1]]) == [PutResult.STORED] * 20
        assert client.prefix_match(keys) == 20
        assert client.get_batch(keys) == values
        assert client.put_batch(keys[:2], values[:2]) == [PutResult.EXISTS] * 2
    assert requests(node, Kind.PUT_STORED) >= 4


def test_the_node_works_out_checksums(client: Client, node: SmallNode) -> None:
    value = random.Random(2).randbytes(200_000)
    for number in range(4):
        client.put(f"k{number}", value)
    assert requests(node, Kind.PUT_STORED) > 0

    def checksum() -> int | None:
        info = node.store.block_info("default", b"k3")
        return None if info is None else info.checksum

    until(lambda: checksum() == xxhash.xxh3_64_intdigest(value), "its checksum is known")
    with Client(node.socket, verify=True) as checking:
        assert checking.get("k3") == value
        assert checking.get("k3") == value


def test_a_posted_value_is_fetched_at_once(client: Client, node: SmallNode) -> None:
    for number in range(4):
        client.put(f"k{number}", b"%08d" % number)
    until(lambda: node.store.exists("default", [b"k3"]) == [True], "it is named")
    with Raw(node.peer_address) as peer:
        peer.greet(side=Side.PEER, node_id="n2")
        reply = peer.ask(Kind.FETCH, Fetch(namespace="default", keys=[b"k3"]), FetchReply)
        assert reply.blocks[0] is not None
        assert reply.blocks[0].checksum == xxhash.xxh3_64_intdigest(b"00000003")


def test_room_that_is_not_used_is_taken_back(tmp_path: Path) -> None:
    options = {"reserved_s": 0.2}
    with (
        node_thread(tmp_path / "c.sock", size=POOL_BYTES, unix_options=options) as node,
        Client(node.socket) as client,
    ):
        for turn in range(3):
            for number in range(5):
                assert client.put(f"{turn}/{number}", bytes(50_000)) is PutResult.STORED
            assert node.store.stats().reserved_bytes
            until(lambda: not node.store.stats().reserved_bytes, "it is taken back")
        assert client.get("2/4") == bytes(50_000)


def test_room_ends_with_its_client(client: Client, node: SmallNode) -> None:
    for number in range(5):
        client.put(f"k{number}", bytes(50_000))
    assert node.store.stats().reserved_bytes
    client.close()
    until(lambda: not node.store.stats().reserved_bytes, "it is taken back")


def test_threads_post_side_by_side(client: Client) -> None:
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for number in range(150):
                key, value = f"{name}/{number}", b"%08d" % (name * 1000 + number) * 200
                assert client.put(key, value) is PutResult.STORED
                assert client.get(key) == value
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_name_for_room_that_was_not_reserved_ends_the_connection(node: SmallNode) -> None:
    with Raw(node.socket) as raw:
        raw.greet()
        body = PutStored(namespace="n", items=[StoredItem(token=99, key=b"k", size=1)])
        raw.tell(Kind.PUT_STORED, body)
        with pytest.raises(ProtocolError, match="99"):
            raw.reply(ReserveReply)
        assert raw.ended()


def test_a_reservation_of_a_client_without_a_page_is_its_own(node: SmallNode) -> None:
    with Raw(node.socket) as raw:
        raw.greet()
        (slot,) = raw.ask(Kind.RESERVE, Reserve(sizes=[100]), ReserveReply).slots
        node.pool.view[slot.offset : slot.offset + 5] = b"bytes"
        item = StoredItem(token=slot.token, key=b"k", size=5)
        raw.tell(Kind.PUT_STORED, PutStored(namespace="n", items=[item]))
        with Client(node.socket, namespace="n") as client:
            until(lambda: client.get("k") == b"bytes", "it is there")


# --- what a client writes is not believed ---------------------------------------------------------------


def test_rubbish_in_shared_memory_harms_nobody(client: Client, node: SmallNode) -> None:
    rng = random.Random(3)
    with Client(node.socket) as liar:
        liar.get("here")
        direct, posting = liar._pool.direct, liar._pool.posting
        assert direct is not None
        assert posting is not None
        for _ in range(6):
            for word in range(len(direct.page.words)):
                direct.page.words[word] = rng.choice(
                    [0, 1, (1 << 64) - 1, rng.getrandbits(64), rng.randrange(50)]
                )
            posting._counts._words[rng.randrange(4)] = rng.getrandbits(64)
            assert client.put(f"k{rng.random()}", bytes(MIB)) is PutResult.STORED
            assert client.get("here") == b"value" or client.put("here", b"value")
            assert client.get("not here") is None
            node.store.look_after()
    assert node.store.stats().blocks > 0
    until(lambda: node.pages.viewing() == 0, "what it looked at ends with it")


# --- regions --------------------------------------------------------------------------------------------


def test_a_region_that_comes_later_is_mapped(client: Client, node: SmallNode) -> None:
    more = DramPool(8 * MIB, 1)
    try:
        node.regions.append(SharedRegion(RegionInfo(region=1, size=more.size), more.fd))
        node.store.add_region(more)
        found = set()
        for number in range(60):
            client.put(f"k{number}", bytes([number]) * MIB)
            assert client.get(f"k{number}") == bytes([number]) * MIB
            info = node.store.block_info("default", b"k%d" % number)
            assert info is not None
            found.add(info.region)
        assert found == {0, 1}
        until(lambda: not node.store.wait_unchecked(0) and not node.store.stats().pinned, "nobody reads it")
    finally:
        client.close()
        more.close()


# --- clients that may only read -------------------------------------------------------------------------

INTRUDER = """
import mmap, os, socket, sys
from mooncaked.client.connection import Greeting
from mooncaked.clock import SystemClock
greeting = Greeting(sys.argv[1], None, 5, SystemClock())
fd, size = greeting.fds[0], greeting.hello.regions[0].size
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)  # as the user of an engine
tries = {
    "write": lambda: os.pwrite(fd, b"x", 0),
    "map": lambda: mmap.mmap(fd, size),
    "protect": lambda: mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    "reopen": lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR),
    "truncate": lambda: os.ftruncate(fd, 1),
    "chmod": lambda: os.fchmod(fd, 0o666),
    "index": lambda: os.pwrite(greeting.fds[1], b"x", 0),
    "index map": lambda: mmap.mmap(greeting.fds[1], 4096),
    "index reopen": lambda: mmap.mmap(os.open(f"/proc/self/fd/{greeting.fds[1]}", os.O_RDWR), 4096),
}
done = []
for name, what in tries.items():
    try:
        what()
        done.append(name)
    except (OSError, ValueError):
        pass
print(len(greeting.fds), *done, flush=True)
"""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[SmallNode]:
    with node_thread(tmp_path / "c.sock", size=POOL_BYTES, unix_options={"writable": False}) as node:
        yield node


@pytest.mark.parametrize("size", [1, 1000, 70_000, 3 * MIB])
def test_values_go_through_the_socket(guarded: SmallNode, size: int) -> None:
    with Client(guarded.socket, verify=True) as client:
        for number in range(4):
            value = random.Random(number).randbytes(size)
            halves = [value[: size // 2], value[size // 2 :]]
            assert client.put(f"k{number}", halves) is PutResult.STORED
            assert client.get(f"k{number}") == value
            assert client.get_into(f"k{number}", bytearray(size)) == size
        assert client.put_batch(["a", "k1", "b"], [b"1", b"2", b"33"]) == ["stored", "exists", "stored"]


async def test_values_go_through_the_socket_of_an_asyncio_client(guarded: SmallNode) -> None:
    async with AsyncClient(guarded.socket, verify=True) as client:
        value = random.Random(5).randbytes(3 * MIB)
        assert await client.put("k", value) is PutResult.STORED
        assert await client.get("k") == value


def test_who_may_only_read_cannot_write(guarded: SmallNode) -> None:
    with script(INTRUDER, guarded.socket) as intruder:
        assert line_of(intruder) == "3"


def test_others_are_served_while_a_large_value_comes_in(guarded: SmallNode) -> None:
    with Raw(guarded.socket) as raw, Client(guarded.socket) as client:
        raw.greet()
        begin = PutBegin(namespace="n", items=[PutItem(key=b"k", size=4 * MIB)])
        (slot,) = raw.ask(Kind.PUT_BEGIN, begin, PutBeginReply).slots
        frame = encode_frame(Kind.PUT_DATA, 0, PutData(token=slot.token), payload_len=4 * MIB)
        raw.send(frame + b"x" * MIB)
        assert client.put("other", b"value") is PutResult.STORED
        commit = PutCommit(tokens=[slot.token], checksums=[xxhash.xxh3_64_intdigest(b"x" * (4 * MIB))])
        raw.send(b"x" * (3 * MIB) + encode_frame(Kind.PUT_COMMIT, 5, commit))
        assert raw.reply(PutCommitReply).stored == [True]
    with Client(guarded.socket, namespace="n", verify=True) as client:
        assert client.get("k") == b"x" * (4 * MIB)


@pytest.mark.parametrize("size", [9, 11, 0])
def test_bytes_that_nobody_has_asked_for_end_the_connection(guarded: SmallNode, size: int) -> None:
    with Raw(guarded.socket) as raw:
        raw.greet()
        begin = PutBegin(namespace="n", items=[PutItem(key=b"k", size=10)])
        (slot,) = raw.ask(Kind.PUT_BEGIN, begin, PutBeginReply).slots
        for token in (slot.token, 12345):
            raw.send(encode_frame(Kind.PUT_DATA, 0, PutData(token=token), payload_len=size) + b"x" * size)
        with pytest.raises((ProtocolError, InvalidRequest)):
            raw.reply(PutBeginReply)
        assert raw.ended()


def test_nobody_can_write_through_the_descriptor_of_the_index(node: SmallNode) -> None:
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.pwrite(node.index.fd, b"x", 0)
    with pytest.raises(OSError, match=r"not permitted|Permission"):
        mmap.mmap(os.open(f"/proc/self/fd/{node.index.fd}", os.O_RDWR), mmap.PAGESIZE)


def test_holds_and_times_to_live(client: Client, node: SmallNode) -> None:
    def state(key: str) -> Any:
        return node.store._table.visible("default")[key.encode()]

    client.put("soft", b"1", hold="soft")
    client.put("brief", b"1", ttl_s=0.05)
    assert state("soft").hold.name == "SOFT"
    until(lambda: not client.exists("brief"), "its time is over")
    for wrong in ({"hold": "firm"}, {"ttl_s": -1.0}, {"ttl_s": 1e12}):
        with pytest.raises(InvalidRequest):
            client.put("k", b"1", **wrong)  # type: ignore[arg-type]
