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
from typing import NoReturn

from mooncaked.block import Block, BlockState, Hold
from mooncaked.errors import IntegrityError, InvalidRequest
from mooncaked.namespace import Namespace

__all__ = ["Block", "BlockState", "BlockTable"]


@dataclass(slots=True)
class _Owner:
    writes: dict[int, Block] = field(default_factory=dict)  # by token
    reads: dict[int, Block] = field(default_factory=dict)  # by pin


_EMPTY: dict[bytes, Block] = {}


class BlockTable:
    """Every block, owner, write and read of one node. `released` is called with a block whose last pin or
    last child has gone while it is COMPLETE."""

    def __init__(self, released: Callable[[Block], None]) -> None:
        self._released = released
        self._spaces: dict[str, Namespace] = {}
        self._owners: dict[int, _Owner] = {}
        self._own = 0  # owners that belong to the node itself
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
        """Owners that have not ended, but for the node's own."""
        return len(self._owners) - self._own

    def visible(self, namespace: str) -> dict[bytes, Block]:
        """The readable blocks of a namespace by key; not to be changed."""
        space = self._spaces.get(namespace)
        return _EMPTY if space is None else space.visible

    def pending(self, namespace: str) -> dict[bytes, Block]:
        """The blocks of a namespace that are not complete yet, by key; not to be changed."""
        space = self._spaces.get(namespace)
        return _EMPTY if space is None else space.pending

    def namespaces(self) -> dict[str, tuple[int, int]]:
        """Readable blocks and bytes by namespace."""
        return {name: (len(space.visible), space.visible_bytes) for name, space in self._spaces.items()}

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
        """Blocks that are written or read; one may come several times."""
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

    def new_owner(self, *, own: bool = False) -> int:
        """A number for a new owner, never used before. `own`: it is the node."""
        owner = self.next_id()
        self._owners[owner] = _Owner()
        self._own += own
        return owner

    def next_id(self) -> int:
        """A number that names nothing yet: for an owner, a write, a read, or what else an owner has."""
        self._last_id += 1
        return self._last_id

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
        self,
        namespace: str,
        key: bytes,
        size: int,
        parent: bytes | None,
        meta: bytes,
        offset: int,
        region: int = 0,
    ) -> Block:
        """A new ALLOCATED block at `offset` of `region`, which its name belongs to from now on."""
        block = Block(namespace, key, size, parent, meta, offset, region)
        self._space(namespace).enter(block)
        self.pending_count += 1
        self.pending_bytes += size
        return block

    def adopt(self, block: Block) -> None:
        """Enter a block whose bytes are there already: it is COMPLETE from the first."""
        block.state = BlockState.COMPLETE
        self._space(block.namespace).enter(block)
        self.visible_count += 1

    def fill(self, block: Block, owner: int) -> int:
        """ALLOCATED -> FILLING: hand the block to a writer; the token of the write."""
        self._expect(block, BlockState.ALLOCATED)
        writes = self._owner(owner).writes
        token = self.next_id()
        block.state = BlockState.FILLING
        writes[token] = block
        return token

    def complete(self, owner: int, token: int, checksum: int | None) -> Block:
        """FILLING -> COMPLETE: the block is readable from now on. Its checksum may be told later."""
        block = self._owner(owner).writes.pop(token, None)
        if block is None:
            raise InvalidRequest(problem=_unknown("write token", token))
        self._expect(block, BlockState.FILLING)
        block.state = BlockState.COMPLETE
        block.checksum = checksum
        self._leave_pending(block)
        self._spaces[block.namespace].show(block)
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
            block.reads += 1
            if block.reads == 1:
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
            block.reads -= 1
            if block.reads:
                continue
            self.pinned_count -= 1
            self.pinned_bytes -= block.size
            if block.state is BlockState.EVICTING:
                self._hidden.remove(block)
                block.state = BlockState.GONE
                gone.append(block)
            elif not block.pins:
                self._released(block)
        return gone

    def hold(self, block: Block, hold: Hold) -> None:
        """Change how firmly a COMPLETE block stays; with anything but `NONE` it cannot be evicted."""
        self._expect(block, BlockState.COMPLETE)
        held, block.hold = block.hold, hold
        block.pins += (hold is not Hold.NONE) - (held is not Hold.NONE)
        if not block.pins and held is not Hold.NONE:
            self._released(block)

    def hide(self, block: Block) -> bool:
        """COMPLETE -> EVICTING, and on to GONE when nobody reads it; whether it is GONE."""
        self._expect(block, BlockState.COMPLETE)
        self._spaces[block.namespace].hide(block)
        self.visible_count -= 1
        self._leave_chain(block)
        if block.hold is not Hold.NONE:
            block.hold = Hold.NONE
            block.pins -= 1
        if block.reads:
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
        for space in self._spaces.values():
            space.check_integrity()
        for block in [*visible, *pending, *self._hidden]:
            if block.reads != pins.pop(block, 0) or block.pins != block.reads + (block.hold is not Hold.NONE):
                self._broken(f"{block!r} is not pinned that often by owners: {block.reads} reads")
        if pins:
            self._broken(f"owners read blocks that are not there: {list(pins)[:5]}")
        if sorted(map(id, written)) != sorted(id(b) for b in pending if b.state is BlockState.FILLING):
            self._broken(f"owners write {len(written)} blocks, {len(pending)} are pending")
        if any(b.state is not BlockState.EVICTING or not b.reads for b in self._hidden):
            self._broken("a hidden block is not read")
        pinned = [block for block in [*visible, *self._hidden] if block.reads]
        pinned_bytes, pending_bytes = (sum(block.size for block in blocks) for blocks in (pinned, pending))
        found = (len(visible), len(pending), len(pinned), pinned_bytes, pending_bytes)
        names = ("visible_count", "pending_count", "pinned_count", "pinned_bytes", "pending_bytes")
        counters = tuple(getattr(self, name) for name in names)
        if found != counters:
            self._broken(f"{names}: counted {counters}, found {found}")

    # --- internals ----------------------------------------------------------------------------------

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

    def _space(self, namespace: str) -> Namespace:
        space = self._spaces.get(namespace)
        if space is None:
            space = self._spaces[namespace] = Namespace(namespace)
        return space

    def _leave_chain(self, block: Block) -> None:
        """A block that held its name until now no longer counts as a child; an empty namespace goes."""
        space = self._spaces[block.namespace]
        if block.parent is not None and (leaf := space.count_child(block.parent, -1)) is not None:
            self._released(leaf)
        if not space:
            del self._spaces[block.namespace]

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
