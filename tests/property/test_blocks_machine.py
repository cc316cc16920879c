"""The block table against a model of plain dicts, with several owners."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.blocks import Block, BlockState, BlockTable
from mooncaked.errors import InvalidRequest

NAMESPACES = st.sampled_from(["a", "b"])
KEYS = st.integers(0, 4).map(lambda n: b"key%d" % n)
PICK = st.integers(0, 1 << 20)


@dataclass
class ModelOwner:
    writes: dict[int, Block] = field(default_factory=dict)
    reads: dict[int, Block] = field(default_factory=dict)


class TableMachine(RuleBasedStateMachine):
    """`names` is what holds a name: pending or readable blocks. `live` is everything that is not GONE."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(lambda block: self.released.append(block))
        self.released: list[Block] = []
        self.owners: dict[int, ModelOwner] = {}
        self.names: dict[tuple[str, bytes], Block] = {}
        self.live: set[Block] = set()
        self.come()

    @rule()
    def come(self) -> None:
        owner = self.table.new_owner()
        assert owner not in self.owners
        self.owners[owner] = ModelOwner()

    def an_owner(self, pick: int) -> int:
        return sorted(self.owners)[pick % len(self.owners)]

    def pins_of(self, block: Block) -> int:
        return sum(read is block for owner in self.owners.values() for read in owner.reads.values())

    def forget(self, gone: list[Block], expected: set[Block]) -> None:
        assert set(gone) == expected
        assert len(gone) == len(expected)
        self.live -= expected
        assert all(block.state is BlockState.GONE for block in gone)

    @rule(pick=PICK, namespace=NAMESPACES, key=KEYS, parent=st.none() | KEYS, size=st.integers(0, 99))
    def begin(self, pick: int, namespace: str, key: bytes, parent: bytes | None, size: int) -> None:
        if (namespace, key) in self.names or not self.owners:
            return
        owner = self.an_owner(pick)
        block = self.table.allocate(namespace, key, size, parent, b"", 0)
        token = self.table.fill(block, owner)
        self.owners[owner].writes[token] = self.names[namespace, key] = block
        self.live.add(block)

    @precondition(lambda self: any(owner.writes for owner in self.owners.values()))
    @rule(pick=PICK, commit=st.booleans())
    def finish(self, pick: int, commit: bool) -> None:
        writes = [(owner, token) for owner, model in self.owners.items() for token in model.writes]
        owner, token = writes[pick % len(writes)]
        block = self.owners[owner].writes.pop(token)
        if commit:
            assert self.table.complete(owner, token, checksum=pick) is block
            return
        self.forget(self.table.abort(owner, [token]), {block})
        del self.names[block.namespace, block.key]

    @precondition(lambda self: self.owners)
    @rule(pick=PICK, namespace=NAMESPACES, keys=st.lists(KEYS, max_size=4))
    def read(self, pick: int, namespace: str, keys: list[bytes]) -> None:
        owner, visible = self.an_owner(pick), self.table.visible(namespace)
        blocks = [visible[key] for key in keys if key in visible]
        pins = self.table.pin(owner, blocks)
        assert len(set(pins)) == len(blocks)
        self.owners[owner].reads.update(zip(pins, blocks, strict=True))

    @precondition(lambda self: any(owner.reads for owner in self.owners.values()))
    @rule(pick=PICK, count=st.integers(1, 3))
    def end_reads(self, pick: int, count: int) -> None:
        readers = [owner for owner, model in self.owners.items() if model.reads]
        owner = readers[pick % len(readers)]
        pins = sorted(self.owners[owner].reads)[:count]
        blocks = {self.owners[owner].reads.pop(pin) for pin in pins}
        ended = {block for block in blocks if not self.pins_of(block)}
        hidden = {block for block in ended if block.state is BlockState.EVICTING}
        self.released.clear()
        self.forget(self.table.unpin(owner, pins), hidden)
        assert set(self.released) == ended - hidden

    @rule(namespace=NAMESPACES, key=KEYS)
    def hide(self, namespace: str, key: bytes) -> None:
        block = self.table.visible(namespace).get(key)
        if block is None:
            return
        del self.names[namespace, key]
        if self.table.hide(block):
            assert not self.pins_of(block)
            self.forget([block], {block})
        else:
            assert self.pins_of(block)

    @precondition(lambda self: len(self.owners) > 1)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        owner = self.an_owner(pick)
        model = self.owners.pop(owner)
        written = set(model.writes.values())
        unread = {b for b in model.reads.values() if b.state is BlockState.EVICTING and not self.pins_of(b)}
        self.forget(self.table.end_owner(owner), written | unread)
        for block in written:
            del self.names[block.namespace, block.key]
        with pytest.raises(InvalidRequest):
            self.table.check_owner(owner)

    @precondition(lambda self: len(self.owners) > 1)
    @rule(pick=PICK)
    def meddle(self, pick: int) -> None:
        stranger = self.an_owner(pick)
        for owner, model in self.owners.items():
            if owner == stranger:
                continue
            for token in model.writes:
                with pytest.raises(InvalidRequest):
                    self.table.abort(stranger, [token])
                with pytest.raises(InvalidRequest):
                    self.table.complete(stranger, token, 0)
            for pin in model.reads:
                with pytest.raises(InvalidRequest):
                    self.table.unpin(stranger, [pin])

    @invariant()
    def agrees(self) -> None:
        self.table.check_integrity()
        assert set(self.table.all_blocks()) == self.live
        assert self.table.count == len(self.live)
        named = {
            (space, key): block for space in ("a", "b") for key, block in self.table.pending(space).items()
        }
        named |= {
            (space, key): block for space in ("a", "b") for key, block in self.table.visible(space).items()
        }
        assert named == self.names
        for block in self.live:
            assert block.pins == self.pins_of(block)
        for (namespace, key), block in self.names.items():
            siblings = [other for (space, _), other in self.names.items() if space == namespace]
            assert block.children == sum(other.parent == key for other in siblings)


TestTable = pytest.mark.timeout(600)(TableMachine.TestCase)  # a failure takes long to shrink
TestTable.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
