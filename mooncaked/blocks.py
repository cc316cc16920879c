"""The block table: which blocks a node has, in which state, who writes and who reads them.

Pure: events in, new state out; no lock, no memory, no clock. The life of a block:

    ALLOCATED --fill--> FILLING --complete--> COMPLETE --hide--> EVICTING --last unpin--> GONE
                           \\__________________abort_______________________________________/^

ALLOCATED and FILLING hold the key against other writers; only COMPLETE is visible; EVICTING is invisible and
waits for its last reader. Anything else is refused with `IntegrityError`. A block is named by namespace and
key; while an EVICTING block still has readers, a new block of the same name may live beside it.

Writers and readers are owners: one per connection or per fetch. A write is named by its token, a read by its
pin, and only their owner can use them. When an owner ends, so do its writes and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NoReturn

from mooncaked.errors import IntegrityError, InvalidRequest
from mooncaked.keys import show_key


class BlockState(IntEnum):
    """Where in its life a block is."""

    ALLOCATED = 0  # has room in the pool, no writer yet
    FILLING = 1  # a writer puts its bytes in place
    COMPLETE = 2  # readable; the only visible state
    EVICTING = 3  # no longer visible, waits for its last reader
    GONE = 4  # its room is free


@dataclass(slots=True, eq=False)
class Block:
    """One block. Everything but the counters, the state and what `complete` sets is fixed from the start."""

    namespace: str
    key: bytes
    size: int  # bytes of the value
    parent: bytes | None  # key of the block before it in its prefix chain
    meta: bytes
    offset: int  # bytes, in the pool
    state: BlockState = BlockState.ALLOCATED
    checksum: int = 0  # XXH3-64, from `complete` on
    pins: int = 0  # reads in progress
    children: int = 0  # present blocks that name this one as their parent
    touched: int = 0  # belongs to the eviction policy
    used_at_s: float = 0.0  # monotonic time of its last use

    def __repr__(self) -> str:
        return f"<block {self.namespace}/{show_key(self.key)} {self.state.name} pins={self.pins}>"


@dataclass(slots=True)
class _Owner:
    writes: dict[int, Block] = field(default_factory=dict)  # by token
    reads: dict[int, Block] = field(default_factory=dict)  # by pin


@dataclass(slots=True)
class _Space:
    """The blocks of one namespace."""

    visible: dict[bytes, Block] = field(default_factory=dict)  # COMPLETE
    pending: dict[bytes, Block] = field(default_factory=dict)  # ALLOCATED or FILLING
    children: dict[bytes, int] = field(default_factory=dict)  # parent's key -> visible and pending blocks


_EMPTY: dict[bytes, Block] = {}


class BlockTable:
    """Every block, owner, write and read of one node. `released` is called with a block whose last pin or
    last child has gone while it is COMPLETE."""

    def __init__(self, released: Callable[[Block], None]) -> None:
        self._released = released
        self._spaces: dict[str, _Space] = {}
        self._owners: dict[int, _Owner] = {}
        self._last_id = 0  # of owners, tokens and pins
        self._hidden: set[Block] = set()  # EVICTING and pinned
        self.visible_count = 0
        self.pending_count = 0
        self.pinned_count = 0  # blocks
        self.pinned_bytes = 0
        self.pending_bytes = 0

    # --- reading ------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Blocks that have room in the pool, in any state."""
        return self.visible_count + self.pending_count + len(self._hidden)

    @property
    def hidden_count(self) -> int:
        """Blocks that are no longer visible but still read."""
        return len(self._hidden)

    @property
    def owner_count(self) -> int:
        """Owners that have not ended."""
        return len(self._owners)

    def visible(self, namespace: str) -> dict[bytes, Block]:
        """The readable blocks of a namespace by key; not to be changed."""
        space = self._spaces.get(namespace)
        return _EMPTY if space is None else space.visible

    def pending(self, namespace: str) -> dict[bytes, Block]:
        """The blocks of a namespace that are not complete yet, by key; not to be changed."""
        space = self._spaces.get(namespace)
        return _EMPTY if space is None else space.pending

    def all_visible(self) -> list[Block]:
        """Every readable block of every namespace."""
        return [block for space in self._spaces.values() for block in space.visible.values()]

    def all_blocks(self) -> list[Block]:
        """Every block that has room in the pool."""
        pending = [block for space in self._spaces.values() for block in space.pending.values()]
        return [*self.all_visible(), *pending, *self._hidden]

    def read_count(self, owner: int) -> int:
        """Pins that an owner holds; raises `InvalidRequest` when it has ended."""
        return len(self._owner(owner).reads)

    def held(self) -> Iterator[Block]:
        """Blocks that cannot be evicted, because they are written or read; one may come several times."""
        for space in self._spaces.values():
            yield from space.pending.values()
        for owner in self._owners.values():
            yield from owner.reads.values()

    def ancestors(self, namespace: str, keys: Iterable[bytes | None]) -> list[Block]:
        """The visible blocks from each of `keys` up its chain, as far as they are there without a gap; each
        once, roots first."""
        visible = self.visible(namespace)
        found: dict[Block, None] = {}  # also ends the walk where the parents that writers name form a ring
        for start in keys:
            key = start
            while key is not None and (block := visible.get(key)) is not None and block not in found:
                found[block] = None
                key = block.parent
        return list(reversed(found))

    def writes(self, owner: int, tokens: Sequence[int]) -> list[Block]:
        """The blocks behind an owner's tokens; raises `InvalidRequest` when one is not a write in progress of
        this owner, or comes twice."""
        return _look_up(self._owner(owner).writes, tokens, "write token")

    def reads(self, owner: int, pins: Sequence[int]) -> list[Block]:
        """The blocks behind an owner's pins; raises `InvalidRequest` when one is not a pin of this owner, or
        comes twice."""
        return _look_up(self._owner(owner).reads, pins, "pin")

    # --- owners -------------------------------------------------------------------------------------

    def new_owner(self) -> int:
        """A number for a new owner, never used before."""
        owner = self._next_id()
        self._owners[owner] = _Owner()
        return owner

    def check_owner(self, owner: int) -> None:
        """Raise `InvalidRequest` when the owner has ended or never was."""
        self._owner(owner)

    def end_owner(self, owner: int) -> list[Block]:
        """Abort an owner's writes and end its reads; the blocks that are GONE by that. An owner that has
        ended before has nothing left."""
        ended = self._owners.get(owner)
        if ended is None:
            return []
        gone = self.abort(owner, list(ended.writes))
        gone += self.unpin(owner, list(ended.reads))
        del self._owners[owner]
        return gone

    # --- writing ------------------------------------------------------------------------------------

    def allocate(
        self, namespace: str, key: bytes, size: int, parent: bytes | None, meta: bytes, offset: int
    ) -> Block:
        """A new ALLOCATED block at `offset`, which its name belongs to from now on."""
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = _Space()
        if key in space.visible or key in space.pending:
            self._broken(f"{namespace}/{show_key(key)} is allocated twice")
        block = Block(namespace, key, size, parent, meta, offset)
        block.children = space.children.get(key, 0)
        space.pending[key] = block
        self.pending_count += 1
        self.pending_bytes += size
        if parent is not None:
            self._count_child(space, parent, 1)
        return block

    def fill(self, block: Block, owner: int) -> int:
        """ALLOCATED -> FILLING: hand the block to a writer; the token of the write."""
        self._expect(block, BlockState.ALLOCATED)
        writes = self._owner(owner).writes
        token = self._next_id()
        block.state = BlockState.FILLING
        writes[token] = block
        return token

    def complete(self, owner: int, token: int, checksum: int) -> Block:
        """FILLING -> COMPLETE: the block is readable from now on."""
        block = self._owner(owner).writes.pop(token, None)
        if block is None:
            raise InvalidRequest(problem=_unknown("write token", token))
        self._expect(block, BlockState.FILLING)
        block.state = BlockState.COMPLETE
        block.checksum = checksum
        self._leave_pending(block)
        self._spaces[block.namespace].visible[block.key] = block
        self.visible_count += 1
        return block

    def abort(self, owner: int, tokens: Sequence[int]) -> list[Block]:
        """FILLING -> GONE for an owner's writes; the blocks. Raises as `writes` does, then does nothing."""
        blocks = self.writes(owner, tokens)
        for token, block in zip(tokens, blocks, strict=True):
            del self._owners[owner].writes[token]
            self._expect(block, BlockState.FILLING)
            self._leave_pending(block)
            self._leave_chain(block)
            block.state = BlockState.GONE
        return blocks

    # --- reading and going --------------------------------------------------------------------------

    def pin(self, owner: int, blocks: Sequence[Block]) -> list[int]:
        """Protect COMPLETE blocks while `owner` reads them; a pin for each. Pins of one block add up."""
        reads = self._owner(owner).reads
        first = self._last_id + 1
        for pin, block in enumerate(blocks, first):
            self._expect(block, BlockState.COMPLETE)
            self._last_id = pin
            reads[pin] = block
            block.pins += 1
            if block.pins == 1:
                self.pinned_count += 1
                self.pinned_bytes += block.size
        return list(range(first, first + len(blocks)))

    def unpin(self, owner: int, pins: Sequence[int]) -> list[Block]:
        """End an owner's reads; the blocks that are GONE by that. Raises as `reads` does, before anything is
        done."""
        blocks = self.reads(owner, pins)
        reads, gone = self._owners[owner].reads, []
        for pin, block in zip(pins, blocks, strict=True):
            del reads[pin]
            block.pins -= 1
            if block.pins:
                continue
            self.pinned_count -= 1
            self.pinned_bytes -= block.size
            if block.state is BlockState.EVICTING:
                self._hidden.remove(block)
                block.state = BlockState.GONE
                gone.append(block)
            else:
                self._released(block)
        return gone

    def hide(self, block: Block) -> bool:
        """COMPLETE -> EVICTING, and on to GONE when nobody reads it; whether it is GONE."""
        self._expect(block, BlockState.COMPLETE)
        del self._spaces[block.namespace].visible[block.key]
        self.visible_count -= 1
        self._leave_chain(block)
        if block.pins:
            block.state = BlockState.EVICTING
            self._hidden.add(block)
            return False
        block.state = BlockState.GONE
        return True

    # --- integrity ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless states, indexes, owners and counters agree. O(blocks)."""
        pins: dict[Block, int] = {}
        for block in (block for owner in self._owners.values() for block in owner.reads.values()):
            pins[block] = pins.get(block, 0) + 1
        written = [block for owner in self._owners.values() for block in owner.writes.values()]
        visible, pending = self.all_visible(), [b for s in self._spaces.values() for b in s.pending.values()]
        for name, space in self._spaces.items():
            self._check_space(name, space)
        for block in [*visible, *pending, *self._hidden]:
            if block.pins != pins.pop(block, 0):
                self._broken(f"{block!r} is not pinned that often by owners")
        if pins:
            self._broken(f"owners read blocks that are not there: {list(pins)[:5]}")
        if sorted(map(id, written)) != sorted(id(b) for b in pending if b.state is BlockState.FILLING):
            self._broken(f"owners write {len(written)} blocks, {len(pending)} are pending")
        if any(b.state is not BlockState.EVICTING or not b.pins for b in self._hidden):
            self._broken("a hidden block is not read")
        pinned = [block for block in [*visible, *self._hidden] if block.pins]
        pinned_bytes, pending_bytes = (sum(block.size for block in blocks) for blocks in (pinned, pending))
        found = (len(visible), len(pending), len(pinned), pinned_bytes, pending_bytes)
        counters = (
            self.visible_count,
            self.pending_count,
            self.pinned_count,
            self.pinned_bytes,
            self.pending_bytes,
        )
        if found != counters:
            self._broken(
                f"visible, pending, pinned, pinned bytes, pending bytes: counted {counters}, found {found}"
            )

    def _check_space(self, name: str, space: _Space) -> None:
        children: dict[bytes, int] = {}
        for blocks, states in (
            (space.visible, (BlockState.COMPLETE,)),
            (space.pending, (BlockState.ALLOCATED, BlockState.FILLING)),
        ):
            for key, block in blocks.items():
                if (block.namespace, block.key) != (name, key) or block.state not in states:
                    self._broken(f"{block!r} is filed under {name}/{show_key(key)}")
                if block.children != space.children.get(key, 0):
                    self._broken(
                        f"{block!r} counts {block.children} children of {space.children.get(key, 0)}"
                    )
                if block.parent is not None:
                    children[block.parent] = children.get(block.parent, 0) + 1
        if children != space.children or space.visible.keys() & space.pending.keys():
            self._broken(f"namespace {name}: the index of children is off, or a key is there twice")
        if not space.visible and not space.pending:
            self._broken(f"namespace {name} is empty but kept")

    # --- internals ----------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _owner(self, owner: int) -> _Owner:
        found = self._owners.get(owner)
        if found is None:
            raise InvalidRequest(problem=f"owner {owner} has ended: its connection is closed")
        return found

    def _expect(self, block: Block, state: BlockState) -> None:
        if block.state is not state:
            self._broken(f"{block!r} is not {state.name}")

    def _leave_pending(self, block: Block) -> None:
        del self._spaces[block.namespace].pending[block.key]
        self.pending_count -= 1
        self.pending_bytes -= block.size

    def _leave_chain(self, block: Block) -> None:
        """A block that held its name until now no longer counts as a child; an empty namespace goes."""
        space = self._spaces[block.namespace]
        if block.parent is not None:
            self._count_child(space, block.parent, -1)
        if not space.visible and not space.pending:
            del self._spaces[block.namespace]

    def _count_child(self, space: _Space, parent: bytes, change: int) -> None:
        count = space.children.get(parent, 0) + change
        if count:
            space.children[parent] = count
        else:
            del space.children[parent]
        block = space.visible.get(parent)
        if block is None:
            block = space.pending.get(parent)
        if block is None:
            return
        block.children = count
        if not count and block.state is BlockState.COMPLETE:
            self._released(block)

    def _broken(self, detail: str) -> NoReturn:
        raise IntegrityError(what="block table", detail=detail)


def _look_up(entries: dict[int, Block], numbers: Sequence[int], what: str) -> list[Block]:
    try:
        blocks = [entries[number] for number in numbers]
    except KeyError as error:
        raise InvalidRequest(problem=_unknown(what, error.args[0])) from None
    if len(blocks) > 1 and len(set(numbers)) != len(blocks):
        raise InvalidRequest(problem=f"a {what} comes twice in one request")
    return blocks


def _unknown(what: str, number: int) -> str:
    return f"{what} {number} is unknown here: it belongs to another connection, or has been used already"
