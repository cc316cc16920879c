"""The GPU tier against a dict: whatever is promoted, read, dropped and evicted in whatever order, a reader
gets the bytes that were last stored under a key, or a miss; and the events tell exactly what is there."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncaked.api.protocol import PinnedBlock
from mooncaked.gpu import GpuTier, Source
from mooncaked.pools.gpu import GpuPool
from mooncaked.types import BlockEvent

PAGE = 4096
KEYS = st.integers(0, 9)
SIZES = st.sampled_from([0, 1, 700, PAGE, PAGE + 1, 3 * PAGE, 9 * PAGE])


class TierMachine(RuleBasedStateMachine):
    """`store` is host memory: what is stored under a key now. Keys can be stored anew with other bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = [GpuPool("cpu", 5 * PAGE, 1), GpuPool("cpu", 3 * PAGE, 2)]
        self.told: set[bytes] = set()
        self.tier = GpuTier(self.pools, self.report)
        self.store: dict[bytes, bytes] = {}
        self.version = 0
        self.calls = self.released = 0
        self.asked: list[tuple[int, Source]] = []  # looked up, and not promoted yet
        self.owner = self.tier.new_owner()
        self.pinned: list[tuple[PinnedBlock, bytes]] = []  # with what its bytes must stay

    def teardown(self) -> None:
        self.tier.work()
        self.tier.close()
        assert self.released == self.calls
        for pool in self.pools:
            pool.close()

    # --- what the tier calls

    def report(self, events: list[BlockEvent]) -> None:
        for event in events:
            assert (event.key in self.told) is not event.stored
            (self.told.add if event.stored else self.told.remove)(event.key)

    def release(self) -> None:
        self.released += 1

    # --- rules

    @rule(number=KEYS, size=SIZES)
    def put(self, number: int, size: int) -> None:
        key = b"%d" % number
        if key not in self.store:
            self.version += 1
            self.store[key] = (b"%d/%d " % (number, self.version) * (size + 1))[:size]

    @rule(number=KEYS)
    def remove(self, number: int) -> None:
        key = b"%d" % number
        self.store.pop(key, None)
        self.tier.forget("ns", [key])
        assert self.tier.contains("ns", [key]) == [False]
        self.tier.tell()

    @rule(number=KEYS, parent=st.none() | KEYS, uses=st.integers(0, 3))
    def look_up(self, number: int, parent: int | None, uses: int) -> None:
        key = b"%d" % number
        mark = self.tier.mark()
        if (data := self.store.get(key)) is None or parent == number:
            return
        source = Source(
            namespace="ns",
            key=key,
            parent=None if parent is None else b"%d" % parent,
            view=memoryview(data),
            checksum=xxhash.xxh3_64_intdigest(data),
            uses=uses,
        )
        self.asked.append((mark, source))

    @rule(count=st.integers(1, 3))
    def promote(self, count: int) -> None:
        """What was looked up some time ago; of equal marks together."""
        if not self.asked:
            return
        mark = self.asked[0][0]
        sources = [source for at, source in self.asked[:count] if at == mark]
        del self.asked[: len(sources)]
        self.calls += 1
        assert self.tier.promote(mark, sources, self.release) == len(sources)

    @rule()
    def work(self) -> None:
        self.tier.work()
        assert self.released == self.calls

    @rule(numbers=st.lists(KEYS, min_size=1, max_size=4))
    def read(self, numbers: list[int]) -> None:
        keys = [b"%d" % number for number in numbers]
        for key, found in zip(keys, self.tier.lookup(self.owner, "ns", keys), strict=True):
            assert (found is None) is (key not in self.told)
            if found is not None:
                assert self.bytes_of(found) == self.store[key]
                self.pinned.append((found, self.store[key]))

    @rule(count=st.integers(1, 3))
    def unpin(self, count: int) -> None:
        done, self.pinned = self.pinned[:count], self.pinned[count:]
        self.tier.unpin(self.owner, [found.pin for found, _ in done])

    @rule()
    def disconnect(self) -> None:
        self.tier.end_owner(self.owner)
        self.pinned.clear()
        self.owner = self.tier.new_owner()

    @invariant()
    def agrees(self) -> None:
        self.tier.check_integrity()
        assert {event.key for event in self.tier.blocks()} == self.told
        assert self.told <= self.store.keys()
        for found, data in self.pinned:
            assert self.bytes_of(found) == data, "what is pinned does not change"

    def bytes_of(self, found: PinnedBlock) -> bytes:
        view = self.pools[found.region - 1].view
        assert view is not None
        return bytes(view[found.offset : found.offset + found.size])


TestTier = pytest.mark.timeout(600)(TierMachine.TestCase)  # a failure takes long to shrink
TestTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
