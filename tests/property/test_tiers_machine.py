"""Memory and disks together, against a dictionary: whatever moves, is lost or fails, a reader gets what was
written last or nothing, and those who follow the events know where everything is.

Threads are left out: each step that a thread takes is a rule, so that all orders of them come up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncaked.api.protocol import PutItem
from mooncaked.pools.ssd import SsdItem, WriteStatus
from mooncaked.store import Leaving, Store
from mooncaked.tiers.admission import ALL, REUSED, Admission
from mooncaked.tiers.below import SsdBelow
from mooncaked.tiers.raising import Raiser
from mooncaked.types import Tier
from tests.fakes.fake_disks import FakeDisks
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
PAGES = 8
NAMESPACES = st.sampled_from(["a", "b"])
KEYS = st.integers(0, 5).map(lambda n: b"%d" % n)
PICK = st.integers(0, 1 << 20)
Name = tuple[str, bytes]


@dataclass
class OnItsWay:
    """Blocks that were chosen to be written, and how far they are."""

    leaving: list[Leaving]
    fails: bool
    statuses: list[WriteStatus] | None = None


class TiersMachine(RuleBasedStateMachine):
    """One owner that puts, reads and removes; disks that lose and damage blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = StepClock()
        self.store = Store(
            HeapPool(PAGES * PAGE), high_watermark=0.5, low_watermark=0.25, epoch=1, clock=self.clock
        )
        self.disks = FakeDisks(lambda entries, reason: self.below.lost(entries, reason))
        self.needed: list[Name] = []
        self.raiser = Raiser(self.store, lambda _namespace, _keys: None)
        self.raiser.disks = self.disks
        self.owner = self.store.new_owner()
        self.random = random.Random(3)
        self.values: dict[Name, bytes] = {}  # what was written last, whether it is still there or not
        self.way: list[OnItsWay] = []
        self.seen = 0
        self.told: dict[Name, set[Tier]] = {}  # what the events say

    @initialize(mode=st.sampled_from([ALL, REUSED]))
    def begin(self, mode: str) -> None:
        self.below = SsdBelow(self.store, self.disks, Admission(mode, kept_max=4), self.expect)
        self.store.attach_lower(self.below)

    def expect(self, namespace: str, keys: Sequence[bytes]) -> None:
        self.needed += [(namespace, key) for key in keys]

    def names_on_their_way(self) -> set[Name]:
        return {(each.info.namespace, each.info.key) for way in self.way for each in way.leaving}

    # --- the owner ------------------------------------------------------------------------------------

    @rule(
        namespace=NAMESPACES,
        rows=st.lists(
            st.tuples(KEYS, st.none() | KEYS, st.sampled_from([PAGE, PAGE, 100, 2 * PAGE])),
            min_size=1,
            max_size=6,
        ),
        again=st.booleans(),
    )
    def put(self, namespace: str, rows: list[tuple[bytes, bytes | None, int]], again: bool) -> None:
        for key, parent, size in rows:
            self.put_one(namespace, key, parent, size)
        if again:
            self.get(namespace, [key for key, _, _ in rows])

    def put_one(self, namespace: str, key: bytes, parent: bytes | None, size: int) -> None:
        (there,) = self.store.exists(namespace, [key])
        item = PutItem(key=key, size=size, parent=parent if parent != key else None)
        (slot,) = self.store.begin_put(self.owner, namespace, [item])
        assert (slot.status == "exists") == there
        if slot.status != "ok":
            return
        data = self.random.randbytes(size)
        self.store.view(slot.region, slot.offset, size)[:] = data
        self.store.commit(self.owner, [slot.token], [xxhash.xxh3_64_intdigest(data)])
        self.values[namespace, key] = data

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def get(self, namespace: str, keys: list[bytes]) -> None:
        self.clock.now += 1
        blocks = self.store.pin(self.owner, namespace, keys)
        for key, block in zip(keys, blocks, strict=True):
            if block is not None:
                data = bytes(self.store.view(block.region, block.offset, block.size))
                assert data == self.values[namespace, key]
                self.store.unpin(self.owner, [block.pin])

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, min_size=1, max_size=3, unique=True))
    def remove(self, namespace: str, keys: list[bytes]) -> None:
        self.store.remove(namespace, keys)
        assert self.store.exists(namespace, keys) == [False] * len(keys)
        for key in keys:
            self.values.pop((namespace, key), None)

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, min_size=1, max_size=6))
    def prefix_match(self, namespace: str, keys: list[bytes]) -> None:
        self.needed.clear()
        matched = self.store.prefix_match(namespace, keys)
        assert self.store.exists(namespace, keys[: matched + 1]) in (
            [True] * matched,
            [True] * matched + [False],
        )
        below = self.store.below(namespace, keys[:matched])
        assert self.needed == [(namespace, key) for key, low in zip(keys, below, strict=False) if low]

    # --- down -----------------------------------------------------------------------------------------

    @precondition(lambda self: self.store.stats().used_bytes > PAGES * PAGE / 4)
    @rule(
        pages=st.sampled_from([8, 4, 2, 1, 0]),
        ahead=st.booleans(),
        steps=st.integers(0, 2),
        fails=st.sampled_from([False, False, False, True]),
        meanwhile=st.sampled_from(["", "remove", "have a child"]),
    )
    def demote(self, pages: int, ahead: bool, steps: int, fails: bool, meanwhile: str) -> None:
        if ahead:
            leaving = self.store.leave_ahead(self.below.admits, pages * PAGE)
        else:
            leaving = self.store.leave_or_evict(self.below.admits, pages * PAGE).leaving
        if leaving:
            self.way.append(OnItsWay(leaving, fails))
            info = leaving[-1].info
            if meanwhile == "remove":
                self.remove(info.namespace, [info.key])
            elif meanwhile:
                self.put_one(info.namespace, b"child", info.key, 100)
            for _ in range(steps):
                self.go_on(-1)

    @precondition(lambda self: self.way)
    @rule(pick=PICK)
    def go_on(self, pick: int) -> None:
        """Something that is on its way to a disk is written, or its writer hears that it was."""
        way = self.way[pick % len(self.way)]
        if way.statuses is None:
            self.disks.refuses = WriteStatus.FAILED if way.fails else None
            way.statuses = self.disks.write([self.item(each) for each in way.leaving])
        else:
            self.way.remove(way)
            good = (WriteStatus.STORED, WriteStatus.EXISTS)
            self.store.left(way.leaving, [status in good for status in way.statuses])

    def item(self, leaving: Leaving) -> SsdItem:
        info = leaving.info
        return SsdItem(
            namespace=info.namespace,
            key=info.key,
            data=self.store.view(info.region, info.offset, info.size),
            parent=info.parent,
            checksum=info.checksum,
        )

    # --- up -------------------------------------------------------------------------------------------

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def bring_up(self, namespace: str, keys: list[bytes]) -> None:
        found = self.raiser.bring_up(namespace, keys)
        blocks = self.store.pin(self.owner, namespace, keys, count=False)
        for key, block in zip(keys, blocks, strict=True):
            assert (block is not None) == found[key]
            if block is not None:
                data = bytes(self.store.view(block.region, block.offset, block.size))
                assert data == self.values[namespace, key]
                self.store.unpin(self.owner, [block.pin])

    # --- what disks do --------------------------------------------------------------------------------

    @precondition(lambda self: self.disks.values)
    @rule(pick=PICK)
    def lose(self, pick: int) -> None:
        namespace, key = sorted(self.disks.values)[pick % len(self.disks.values)]
        self.disks.lose(namespace, [key])

    @rule(damaged=st.sets(KEYS, max_size=2), capacity=st.integers(0, 30))
    def go_wrong(self, damaged: set[bytes], capacity: int) -> None:
        self.disks.damaged = damaged
        self.disks.capacity_blocks = capacity

    # --- what always holds ------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.store.check_integrity()
        for block in self.store._table.all_visible():
            if block.saved:
                assert self.disks.contains(block.namespace, [block.key])[0], f"{block!r} is not saved"

    @invariant()
    def what_exists_was_written_and_not_removed(self) -> None:
        for namespace in ("a", "b"):
            keys = [b"child", *(b"%d" % n for n in range(6))]
            for key, here in zip(keys, self.store.exists(namespace, keys), strict=True):
                assert not here or (namespace, key) in self.values

    @invariant()
    def events_tell_where_everything_is(self) -> None:
        events = self.store.events_since(self.seen)
        assert events is not None
        self.seen += len(events)
        for event in events:
            tiers = self.told.setdefault((event.namespace, event.key), set())
            (tiers.add if event.stored else tiers.discard)(event.tier)
        _, blocks = self.store.snapshot()
        there: dict[Name, set[Tier]] = {}
        for block in blocks:
            there.setdefault((block.namespace, block.key), set()).add(block.tier)
        for name in self.values.keys() | self.told.keys() | there.keys():
            told, found = self.told.get(name, set()), there.get(name, set())
            if name in self.names_on_their_way():
                told, found = told - {Tier.SSD}, found - {Tier.SSD}
            assert told == found, f"{name} is in {found}, events say {told}"


TestTiers = pytest.mark.timeout(600)(TiersMachine.TestCase)  # a failure takes long to shrink
TestTiers.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
