"""The store against a model: a dict of bytes, what is being written, and what is being read.

What was evicted is learnt from the event log, which is thereby tested too: replaying it gives the contents.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.api.protocol import PutItem, PutSlot
from mooncaked.errors import InvalidRequest
from mooncaked.store import Store
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
PAGES = 10
NAMESPACES = st.sampled_from(["a", "b"])
KEYS = st.integers(0, 11).map(lambda n: b"%d" % n)
SIZES = st.one_of(
    st.sampled_from([0, 1, 64, 1000, 2048, PAGE, PAGE, PAGE, 2 * PAGE, 3 * PAGE, 5 * PAGE, 11 * PAGE]),
    st.integers(0, PAGES * PAGE),
)
ITEMS = st.lists(st.tuples(KEYS, SIZES, st.none() | KEYS), min_size=1, max_size=4)
PICK = st.integers(0, 1 << 20)
Name = tuple[str, bytes]


@dataclass
class Write:
    """A slot that was given, and the bytes that its writer puts there."""

    name: Name
    offset: int
    data: bytes
    parent: bytes | None


@dataclass
class Value:
    """A readable value. `offset` is where its bytes lie."""

    data: bytes
    parent: bytes | None
    offset: int


@dataclass
class Owner:
    writes: dict[int, Write] = field(default_factory=dict)  # by token
    reads: dict[int, Value] = field(default_factory=dict)  # by pin


class StoreMachine(RuleBasedStateMachine):
    """Several owners write, read and remove in two namespaces of one small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(
            HeapPool(PAGES * PAGE), high_watermark=0.8, low_watermark=0.4, epoch=1, clock=StepClock()
        )
        self.random = random.Random(7)
        self.values: dict[Name, Value] = {}
        self.owners: dict[int, Owner] = {}
        self.seen = 0  # number of the last event that the model knows
        self.come()
        self.come()

    # --- what the model knows -----------------------------------------------------------------------

    def an_owner(self, pick: int) -> int:
        return sorted(self.owners)[pick % len(self.owners)]

    def writes(self) -> list[Write]:
        return [write for owner in self.owners.values() for write in owner.writes.values()]

    def reads(self) -> list[Value]:
        return [value for owner in self.owners.values() for value in owner.reads.values()]

    def is_read(self, value: Value) -> bool:
        return any(read is value for read in self.reads())

    def has_child(self, name: Name) -> bool:
        namespace, key = name
        readable = any(ns == namespace and value.parent == key for (ns, _), value in self.values.items())
        return readable or any(w.name[0] == namespace and w.parent == key for w in self.writes())

    def widest_gap(self) -> int:
        """Pages of the longest run that no writer and no reader holds."""
        held = [(w.offset, len(w.data)) for w in self.writes()] + [
            (v.offset, len(v.data)) for v in self.reads()
        ]
        busy = {
            page
            for offset, size in held
            for page in range(offset // PAGE, (offset + max(1, size) - 1) // PAGE + 1)
        }
        longest = run = 0
        for page in range(PAGES):
            run = 0 if page in busy else run + 1
            longest = max(longest, run)
        return longest

    def learn_evictions(self, *, leaf_first: bool) -> int:
        """Take the removals of new events over into the model; how many."""
        events = self.store.events_since(self.seen)
        assert events is not None
        self.seen += len(events)
        for event in events:
            assert not event.stored
            name = (event.namespace, event.key)
            value = self.values[name]
            assert (event.size, event.parent) == (len(value.data), value.parent)
            assert not self.is_read(value), "a value that is read was evicted"
            if leaf_first and self.has_child(name):
                leaves = [n for n, v in self.values.items() if not self.is_read(v) and not self.has_child(n)]
                assert not leaves, f"{name} was evicted before its children although {leaves} could go"
            del self.values[name]
        return len(events)

    # --- rules --------------------------------------------------------------------------------------

    @rule()
    def come(self) -> None:
        self.owners[self.store.new_owner()] = Owner()

    @rule(pick=PICK, namespace=NAMESPACES, rows=ITEMS)
    def begin_put(self, pick: int, namespace: str, rows: list[tuple[bytes, int, bytes | None]]) -> None:
        owner = self.an_owner(pick)
        items = [PutItem(key=k, size=size, parent=p if p != k else None) for k, size, p in rows]
        largest_free = self.store.stats().largest_free_bytes
        slots = self.store.begin_put(owner, namespace, items)
        evicted = self.learn_evictions(leaf_first=len(items) == 1)
        if len(items) == 1 and max(1, items[0].size) <= largest_free:  # an empty value takes room too
            assert not evicted, "something was evicted although there was room"
        begun: set[bytes] = set()
        for item, slot in zip(items, slots, strict=True):
            self.check_slot(namespace, item, slot, begun)
            if slot.status == "ok":
                begun.add(item.key)
                self.fill(owner, (namespace, item.key), item, slot)

    def check_slot(self, namespace: str, item: PutItem, slot: PutSlot, begun: set[bytes]) -> None:
        name = (namespace, item.key)
        busy = any(write.name == name for write in self.writes())
        if slot.status == "exists":
            assert not busy
        elif busy or item.key in begun:
            assert slot.status == "busy"
        elif item.size > PAGES * PAGE:
            assert slot.status == "too_large"
        elif slot.status == "full":
            # With everything evicted that may go, no run of pages would be long enough. (Later items of the
            # batch may have taken what there was, so what the batch got is counted as held here.)
            assert self.widest_gap() < max(1, -(-item.size // PAGE))
        else:
            assert slot.status == "ok"

    def fill(self, owner: int, name: Name, item: PutItem, slot: PutSlot) -> None:
        data = self.random.randbytes(item.size)
        self.store.view(slot.region, slot.offset, item.size)[:] = data
        self.owners[owner].writes[slot.token] = Write(name, slot.offset, data, item.parent)

    @precondition(lambda self: self.writes())
    @rule(pick=PICK, count=st.integers(1, 3))
    def commit(self, pick: int, count: int) -> None:
        writers = [owner for owner, model in self.owners.items() if model.writes]
        owner = writers[pick % len(writers)]
        tokens = sorted(self.owners[owner].writes)[:count]
        writes = [self.owners[owner].writes.pop(token) for token in tokens]
        checksums = [xxhash.xxh3_64_intdigest(write.data) for write in writes]
        assert self.store.commit(owner, tokens, checksums) == [True] * len(tokens)
        events = self.store.events_since(self.seen)
        assert events is not None
        assert [(e.stored, e.namespace, e.key) for e in events] == [(True, *write.name) for write in writes]
        self.seen += len(events)
        self.values.update({write.name: Value(write.data, write.parent, write.offset) for write in writes})

    @precondition(lambda self: self.writes())
    @rule(pick=PICK)
    def abort(self, pick: int) -> None:
        writers = [owner for owner, model in self.owners.items() if model.writes]
        owner = writers[pick % len(writers)]
        token = min(self.owners[owner].writes)
        del self.owners[owner].writes[token]
        assert self.store.abort(owner, [token]) == 1

    @rule(pick=PICK, namespace=NAMESPACES, keys=st.lists(KEYS, max_size=5))
    def pin(self, pick: int, namespace: str, keys: list[bytes]) -> None:
        owner = self.an_owner(pick)
        blocks = self.store.pin(owner, namespace, keys)
        for key, block in zip(keys, blocks, strict=True):
            value = self.values.get((namespace, key))
            assert (block is None) == (value is None)
            if block is not None and value is not None:
                assert (block.offset, block.size) == (value.offset, len(value.data))
                assert block.checksum == xxhash.xxh3_64_intdigest(value.data)
                self.owners[owner].reads[block.pin] = value

    @precondition(lambda self: self.reads())
    @rule(pick=PICK, count=st.integers(1, 4))
    def unpin(self, pick: int, count: int) -> None:
        readers = [owner for owner, model in self.owners.items() if model.reads]
        owner = readers[pick % len(readers)]
        pins = sorted(self.owners[owner].reads)[:count]
        self.store.unpin(owner, pins)
        for pin in pins:
            del self.owners[owner].reads[pin]

    @rule(namespace=NAMESPACES, keys=st.lists(KEYS, max_size=3, unique=True))
    def remove(self, namespace: str, keys: list[bytes]) -> None:
        found = [self.values.get((namespace, key)) for key in keys]
        expected = [value is not None and not self.is_read(value) for value in found]
        assert self.store.remove(namespace, keys) == expected
        for key in keys:
            self.values.pop((namespace, key), None)
        self.seen += sum(value is not None for value in found)

    @rule()
    def evict_to_low(self) -> None:
        before = self.store.stats().used_bytes
        evicted = self.store.evict_to_low()
        assert self.learn_evictions(leaf_first=True) == evicted
        if before <= 0.8 * PAGES * PAGE:
            assert not evicted
        elif self.store.stats().used_bytes > 0.4 * PAGES * PAGE:
            assert all(self.is_read(value) or self.has_child(name) for name, value in self.values.items())

    @precondition(lambda self: len(self.owners) > 1)
    @rule(pick=PICK)
    def drop_owner(self, pick: int) -> None:
        owner = self.an_owner(pick)
        self.store.drop_owner(owner)
        del self.owners[owner]

    @rule(pick=PICK)
    def meddle(self, pick: int) -> None:
        """One owner tries to use what belongs to the others."""
        stranger = self.an_owner(pick)
        for owner, model in self.owners.items():
            if owner == stranger:
                continue
            for token in model.writes:
                with pytest.raises(InvalidRequest):
                    self.store.commit(stranger, [token], [0])
                with pytest.raises(InvalidRequest):
                    self.store.abort(stranger, [token])
            for pin in model.reads:
                with pytest.raises(InvalidRequest):
                    self.store.unpin(stranger, [pin])

    # --- invariants ---------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.store.check_integrity()
        assert self.store.sequence == self.seen
        stats = self.store.stats()
        assert (stats.blocks, stats.filling, stats.owners) == (
            len(self.values), len(self.writes()), len(self.owners)
        )  # fmt: skip
        sequence, blocks = self.store.snapshot()
        assert sequence == self.seen
        assert {(block.namespace, block.key) for block in blocks} == self.values.keys()

    @invariant()
    def memory_holds_what_was_written(self) -> None:
        for value in [*self.values.values(), *self.reads()]:
            assert bytes(self.store.view(0, value.offset, len(value.data))) == value.data
        for write in self.writes():
            assert bytes(self.store.view(0, write.offset, len(write.data))) == write.data


TestStore = pytest.mark.timeout(600)(StoreMachine.TestCase)  # a failure takes long to shrink
TestStore.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
