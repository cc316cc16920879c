"""The store with all that is around its pool: regions that come and go, room taken ahead of time, holds,
times to live, quotas, direct readers, and a tier below that takes what leaves.

The model only knows bytes. What goes is learnt from the event log; what must never happen is that bytes which
somebody may look at change, that a follower's picture is another one, or that a promise is broken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.api.protocol import PutItem, StoredItem
from mooncaked.block import Block, Hold
from mooncaked.eviction import POLICIES
from mooncaked.store import DirectUses, Leaving, LowerBlock, Store
from mooncaked.types import Tier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
PAGES = 32
NAMESPACES = st.sampled_from(["a", "b"])
KEYS = st.integers(0, 15).map(lambda n: b"%d" % n)
SIZES = st.sampled_from([0, 1, 100, 2000, PAGE, PAGE, 2 * PAGE, 5 * PAGE])
PICK = st.integers(0, 1 << 20)
Name = tuple[str, bytes]


@dataclass
class Value:
    data: bytes
    region: int
    offset: int


class Around:
    """Follower, direct readers and the tier below, in one."""

    def __init__(self) -> None:
        self.readable: dict[Name, Block] = {}
        self.looked_at: dict[Block, Value] = {}
        self.below: dict[Name, bytes] = {}
        self.uses: list[Block] = []

    def stored(self, block: Block) -> None:
        self.readable[block.namespace, block.key] = block

    def verified(self, block: Block) -> None:
        pass

    def removed(self, block: Block) -> None:
        del self.readable[block.namespace, block.key]

    def flush(self) -> None:
        pass

    def reading(self, blocks: Sequence[Block]) -> list[bool]:
        return [block in self.looked_at for block in blocks]

    def drain(self) -> DirectUses:
        uses, self.uses = self.uses, []
        return DirectUses(uses)

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        return [(namespace, key) in self.below for key in keys]

    def admits(self, block: Block) -> bool:
        return True

    def evicted(self, block: Block) -> None:
        assert (block.namespace, block.key) not in self.below

    def needed(self, namespace: str, keys: Sequence[bytes]) -> None:
        pass

    def remove(self, namespace: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.below.pop((namespace, key), None)

    def blocks(self) -> list[LowerBlock]:
        return [LowerBlock(ns, key, None, len(data)) for (ns, key), data in self.below.items()]


class TiersMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()
        self.around = Around()
        self.store = Store(
            HeapPool(PAGES * PAGE),
            high_watermark=0.8,
            low_watermark=0.4,
            epoch=1,
            clock=self.clock,
            policy=self.policy,
            followers=[self.around],
            readers=self.around,
        )
        self.store.attach_lower(self.around)
        self.random = random.Random(5)
        self.owner = self.store.new_owner()
        self.values: dict[Name, Value] = {}
        self.pinned: dict[int, Value] = {}
        self.hard: set[Name] = set()
        self.mortal: set[Name] = set()
        self.reserved: dict[int, tuple[int, int, int]] = {}  # token -> region, offset, size
        self.leaving: list[Leaving] = []
        self.regions = [0]
        self.next_region = 1
        self.seen = 0

    def learn(self) -> None:
        """Follow the event log."""
        events = self.store.events_since(self.seen)
        assert events is not None
        self.seen += len(events)
        for event in events:
            if event.tier is Tier.DRAM and not event.stored:
                name = (event.namespace, event.key)
                assert name not in self.hard or name in self.mortal, "a hard hold was broken"
                del self.values[name]
                self.mortal.discard(name)
                self.hard.discard(name)

    def fill(self, region: int, offset: int, size: int) -> Value:
        data = self.random.randbytes(size)
        self.store.view(region, offset, size)[:] = data
        return Value(data, region, offset)

    # --- writing --------------------------------------------------------------------------------------

    @rule(
        namespace=NAMESPACES,
        key=KEYS,
        size=SIZES,
        parent=st.none() | KEYS,
        hold=st.sampled_from(["", "", "", "soft", "hard"]),
        ttl_ms=st.sampled_from([0, 0, 0, 5000]),
    )
    def put(
        self, namespace: str, key: bytes, size: int, parent: bytes | None, hold: str, ttl_ms: int
    ) -> None:
        item = PutItem(key=key, size=size, parent=parent if parent != key else None, hold=hold, ttl_ms=ttl_ms)
        (slot,) = self.store.begin_put(self.owner, namespace, [item])
        self.learn()
        if slot.status != "ok":
            return
        value = self.fill(slot.region, slot.offset, size)
        self.store.commit(self.owner, [slot.token], [0])
        name = (namespace, key)
        self.values[name] = value
        if hold == "hard":
            self.hard.add(name)
        if ttl_ms:
            self.mortal.add(name)
        self.learn()

    @rule(size=SIZES)
    def reserve(self, size: int) -> None:
        (slot,) = self.store.reserve(self.owner, [size])
        self.learn()
        if slot.status == "ok":
            self.reserved[slot.token] = (slot.region, slot.offset, size)

    @precondition(lambda self: self.reserved)
    @rule(pick=PICK, namespace=NAMESPACES, key=KEYS)
    def put_reserved(self, pick: int, namespace: str, key: bytes) -> None:
        token = sorted(self.reserved)[pick % len(self.reserved)]
        region, offset, size = self.reserved.pop(token)
        value = self.fill(region, offset, size)
        (status,) = self.store.put_reserved(
            self.owner, namespace, [StoredItem(token=token, key=key, size=size)]
        )
        if status == "stored":
            self.values[namespace, key] = value
        else:
            assert status == "full" or (namespace, key) in self.values
        self.learn()

    @precondition(lambda self: self.reserved)
    @rule()
    def give_back(self) -> None:
        token, _ = self.reserved.popitem()
        assert self.store.abort(self.owner, [token]) == 1

    # --- reading --------------------------------------------------------------------------------------

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, max_size=4, unique=True))
    def pin(self, namespace: str, keys: list[bytes]) -> None:
        for key, block in zip(keys, self.store.pin(self.owner, namespace, keys), strict=True):
            if block is None:
                assert (namespace, key) not in self.values or (namespace, key) in self.mortal
            else:
                self.pinned[block.pin] = self.values[namespace, key]

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        pin, _ = self.pinned.popitem()
        self.store.unpin(self.owner, [pin])

    @precondition(lambda self: self.values)
    @rule(pick=PICK)
    def look(self, pick: int) -> None:
        name = sorted(self.values)[pick % len(self.values)]
        block = self.around.readable[name]
        self.around.looked_at[block] = self.values[name]
        self.around.uses.append(block)

    @precondition(lambda self: self.around.looked_at)
    @rule()
    def look_away(self) -> None:
        self.around.looked_at.popitem()

    # --- going ----------------------------------------------------------------------------------------

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, max_size=3, unique=True))
    def remove(self, namespace: str, keys: list[bytes]) -> None:
        self.hard -= {(namespace, key) for key in keys}
        self.store.remove(namespace, keys)
        self.learn()
        assert not any(self.store.exists(namespace, keys))

    @rule(namespace=NAMESPACES, key=KEYS, hold=st.sampled_from(Hold))
    def hold(self, namespace: str, key: bytes, hold: Hold) -> None:
        (done,) = self.store.hold(namespace, [key], hold, 0.5)
        name = (namespace, key)
        if done:
            (self.hard.add if hold is Hold.HARD else self.hard.discard)(name)

    @rule()
    def evict(self) -> None:
        self.store.evict_to_low()
        self.learn()

    @precondition(lambda self: not self.leaving)
    @rule(bytes_max=st.sampled_from([PAGE, 10 * PAGE]))
    def leave_ahead(self, bytes_max: int) -> None:
        self.leaving = self.store.leave_ahead(lambda _: True, bytes_max)
        self.learn()

    @precondition(lambda self: not self.leaving)
    @rule(bytes_max=st.sampled_from([0, PAGE, 10 * PAGE]))
    def leave(self, bytes_max: int) -> None:
        self.leaving = self.store.leave_or_evict(lambda _: True, bytes_max).leaving
        self.learn()

    @precondition(lambda self: self.leaving)
    @rule(good=st.booleans())
    def left(self, good: bool) -> None:
        for each in self.leaving:
            info = each.info
            if good:
                view = self.store.view(info.region, info.offset, info.size)
                self.around.below[info.namespace, info.key] = bytes(view)
        self.store.left(self.leaving, [good] * len(self.leaving))
        self.leaving = []
        self.learn()

    @rule(quota=st.none() | st.integers(1, PAGES))
    def set_quota(self, quota: int | None) -> None:
        self.store.set_namespaces({} if quota is None else {"a": quota * PAGE}, {})

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.look_after()
        self.learn()

    @rule()
    def grow(self) -> None:
        if len(self.regions) < 3:
            self.store.add_region(HeapPool(8 * PAGE, region=self.next_region))
            self.regions.append(self.next_region)
            self.next_region += 1

    @precondition(lambda self: len(self.regions) > 1 and not self.leaving)
    @rule()
    def shrink(self) -> None:
        """Take a region away, with all that is in it: as an operator does, after the readers have gone."""
        region = self.regions.pop()
        self.pinned = {}
        self.reserved = {}
        self.around.looked_at = {}
        self.store.drop_owner(self.owner)
        self.owner = self.store.new_owner()
        self.hard = {name for name in self.hard if self.values[name].region != region}
        self.store.retire_region(region)
        while self.store.evacuate(region):
            pass
        self.store.look_after()
        self.learn()
        assert all(value.region != region for value in self.values.values())
        assert self.store.drop_region(region)

    # --- invariants -----------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.store.check_integrity()
        assert self.store.sequence == self.seen
        assert self.around.readable.keys() == self.values.keys()
        _, blocks = self.store.snapshot()
        names = {(b.namespace, b.key) for b in blocks if b.tier is Tier.DRAM}
        assert names == self.values.keys()

    @invariant()
    def bytes_stay(self) -> None:
        for value in [*self.values.values(), *self.pinned.values(), *self.around.looked_at.values()]:
            view = self.store.view(value.region, value.offset, len(value.data))
            assert bytes(view) == value.data


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", POLICIES)
def test_tiers(policy: str) -> None:
    class Machine(TiersMachine):
        pass

    Machine.policy = policy
    case = Machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    case().runTest()
