"""What the fetcher relies on in a transport, for the real one and for the fake that other tests use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import xxhash

from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import FETCH_BYTES_TARGET, FetchedBlock, PutItem
from mooncaked.clock import Deadline, SystemClock
from mooncaked.errors import DeadlineExceeded, Unreachable
from mooncaked.store import Store
from mooncaked.transports.base import Outcome, Transport
from mooncaked.transports.tcp import TcpTransport
from tests.fakes.fake_transport import FakeTransport
from tests.fakes.heap_pool import HeapPool

NOWHERE = "127.0.0.1:1"


class Far:
    """A node with some blocks, and a transport that reaches it."""

    transport: Transport
    address: str

    def put(self, key: bytes, value: bytes, parent: bytes | None = None) -> None:
        """Let the node have a block."""
        raise NotImplementedError

    def damage(self, key: bytes) -> None:
        """Let a block's bytes no longer match its checksum when they arrive."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        self.transport.close()


class TcpFar(Far):
    def __init__(self) -> None:
        self.transport = TcpTransport("here")
        self.pool = HeapPool(80 << 20, 0)
        self.store = Store(self.pool, high_watermark=1, low_watermark=1, epoch=1, clock=SystemClock())
        self.server = PeerServer(self.store, node_id="far", address="127.0.0.1:0")
        self.address = self.server.start()
        self.owner = self.store.new_owner()
        self.offsets: dict[bytes, int] = {}

    def put(self, key: bytes, value: bytes, parent: bytes | None = None) -> None:
        item = PutItem(key=key, size=len(value), parent=parent)
        (slot,) = self.store.begin_put(self.owner, "n", [item])
        self.pool.view[slot.offset : slot.offset + len(value)] = value
        self.store.commit(self.owner, [slot.token], [xxhash.xxh3_64_intdigest(value)])
        self.offsets[key] = slot.offset

    def damage(self, key: bytes) -> None:
        self.pool.view[self.offsets[key]] ^= 1

    def close(self) -> None:
        super().close()
        self.server.close()
        self.pool.close()


class FakeFar(Far):
    address = "far"

    def __init__(self) -> None:
        self.transport = self.fake = FakeTransport()
        self.fake.nodes["far"] = {}

    def put(self, key: bytes, value: bytes, parent: bytes | None = None) -> None:
        self.fake.nodes["far"]["n", key] = value
        if parent is not None:
            self.fake.parents[key] = parent

    def damage(self, key: bytes) -> None:
        self.fake.damaged.add(key)


@pytest.fixture(params=[TcpFar, FakeFar])
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    far: Far = request.param()
    yield far
    far.close()


def soon(seconds: float = 10) -> Deadline:
    return Deadline(SystemClock(), seconds)


class Memory:
    """Somewhere for blocks to land."""

    def __init__(self, unwanted: Sequence[int] = ()) -> None:
        self.blocks: Sequence[FetchedBlock | None] = []
        self.buffers: list[bytearray | None] = []
        self.calls = 0
        self._unwanted = unwanted

    def place(self, blocks: Sequence[FetchedBlock | None]) -> list[memoryview | None]:
        self.calls += 1
        self.blocks = blocks
        self.buffers = [
            None if block is None or index in self._unwanted else bytearray(block.size)
            for index, block in enumerate(blocks)
        ]
        return [None if buffer is None else memoryview(buffer) for buffer in self.buffers]


def fetch(far: Far, keys: list[bytes], memory: Memory, deadline: Deadline | None = None) -> Outcome:
    return far.transport.fetch(far.address, "n", keys, memory.place, deadline or soon())


def test_blocks_land_with_what_is_known_of_them(far: Far) -> None:
    far.put(b"a", b"first")
    far.put(b"b", b"second", parent=b"a")
    memory = Memory()
    outcome = fetch(far, [b"b", b"x", b"a"], memory)
    assert outcome == Outcome([True, False, True])
    assert memory.buffers == [b"second", None, b"first"]
    assert [block and (block.size, block.parent) for block in memory.blocks] == [(6, b"a"), None, (5, None)]


def test_blocks_that_are_not_wanted_disturb_no_others(far: Far) -> None:
    values = [bytes([i]) * 300_000 for i in range(5)]
    for i, value in enumerate(values):
        far.put(bytes([i]), value)
    memory = Memory(unwanted=[0, 2, 4])
    assert fetch(far, [bytes([i]) for i in range(5)], memory).landed == [False, True, False, True, False]
    assert memory.buffers == [None, values[1], None, values[3], None]


def test_a_large_request_is_answered_in_part(far: Far) -> None:
    far.put(b"large", bytes(FETCH_BYTES_TARGET - 10))
    far.put(b"next", bytes(100))
    memory = Memory()
    assert fetch(far, [b"large", b"next"], memory).landed == [True]
    assert len(memory.blocks) == 1
    assert fetch(far, [b"next"], Memory()).landed == [True]


def test_a_block_larger_than_an_answer_comes_alone(far: Far) -> None:
    far.put(b"larger", bytes(FETCH_BYTES_TARGET + 1))
    assert fetch(far, [b"larger"], Memory()).landed == [True]


def test_a_damaged_block_does_not_land_and_the_others_do(far: Far) -> None:
    for key in (b"a", b"b", b"c"):
        far.put(key, key * 1000)
    far.damage(b"b")
    assert fetch(far, [b"a", b"b", b"c"], Memory()) == Outcome([True, False, True])


def test_a_node_that_cannot_be_reached_is_an_error_in_the_outcome(far: Far) -> None:
    memory = Memory()
    outcome = far.transport.fetch(NOWHERE, "n", [b"k"], memory.place, soon())
    assert outcome.landed == []
    assert isinstance(outcome.error, Unreachable)
    assert memory.calls == 0


def test_a_deadline_that_has_passed(far: Far) -> None:
    far.put(b"k", b"1")
    outcome = fetch(far, [b"k"], Memory(), soon(0))
    assert outcome.landed == []
    assert isinstance(outcome.error, DeadlineExceeded | Unreachable)
    assert fetch(far, [b"k"], Memory()).landed == [True]


def test_a_place_that_fails_is_the_callers_error_and_spoils_nothing(far: Far) -> None:
    far.put(b"k", b"1")

    def fail(_: Sequence[FetchedBlock | None]) -> list[memoryview | None]:
        raise MemoryError

    with pytest.raises(MemoryError):
        far.transport.fetch(far.address, "n", [b"k"], fail, soon())
    assert fetch(far, [b"k"], Memory()).landed == [True]


def test_many_threads_at_once(far: Far) -> None:
    for i in range(50):
        far.put(f"k{i}".encode(), f"value {i}".encode() * 1000)
    wrong: list[object] = []

    def work(number: int) -> None:
        for i in range(number, 50, 5):
            memory = Memory()
            outcome = fetch(far, [f"k{i}".encode(), b"x"], memory)
            if outcome != Outcome([True, False]) or memory.buffers[0] != f"value {i}".encode() * 1000:
                wrong.append(outcome)

    threads = [threading.Thread(target=work, args=[number % 5]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_transport_only_gives_errors(far: Far) -> None:
    far.put(b"k", b"1")
    assert fetch(far, [b"k"], Memory()).landed == [True]
    far.transport.close()
    outcome = fetch(far, [b"k"], Memory())
    assert outcome.landed == []
    assert outcome.error is not None
