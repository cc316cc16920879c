"""What lies in GPU memory, what comes in, and what goes for it. Pure: nothing is copied here.

A block comes in only for blocks that were read less often than it (admission), so that a scan does not empty
the tier; each refusal halves the reads that the victim is credited with, so that fame fades. Leaves go before
their parents, and never a block that is read, nor one that the newcomer hangs on.

A promotion takes time, and its block may be removed for good meanwhile, or be removed and stored again with
other bytes. So drops are numbered: whoever promotes takes a `mark` before it looks at the bytes, and what was
dropped after that mark does not become visible.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from mooncaked.block import Block, Extent
from mooncaked.blocks import BlockTable
from mooncaked.errors import IntegrityError, InvalidRequest
from mooncaked.room import Chain, Room

DROPS_KEPT = 65_536  # a promotion that began longer ago than that many drops is given up
PINS_PER_OWNER_MAX = 1_000_000
_BLOCKS_MAX = 10_000_000


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A block in host memory that is to come into a GPU's."""

    namespace: str
    key: bytes
    parent: bytes | None
    view: memoryview  # its bytes; they stay until the promotion says that it needs them no more
    checksum: int | None  # XXH3-64
    meta: bytes = b""
    uses: int = 0  # how often it was read


class Evict(msgspec.Struct, frozen=True):
    """This block has to go before there is room."""

    block: Block


class Placed(msgspec.Struct, frozen=True):
    """There is room: the block is being written, under a token of the tier's."""

    block: Block
    token: int


class Refused(msgspec.Struct, frozen=True):
    """It does not come in."""

    reason: str  # "dropped" | "exists" | "too_large" | "full" | "cooler"


Step = Evict | Placed | Refused


class GpuBooks:
    """Not thread-safe: its owner locks."""

    def __init__(self, regions: Sequence[tuple[int, int]], policy: str, seed: int) -> None:
        """`regions` are (number, bytes) of the pools, one at least."""
        (first, size), *others = regions
        self.room = Room(size, _BLOCKS_MAX, lambda _: None, region=first, policy=policy, seed=seed)
        for region, capacity in others:
            self.room.add_region(region, capacity)
        self.table: BlockTable = self.room.table
        self.owner = self.table.new_owner(own=True)  # of the tier's own writes and reads
        self.refused: Counter[str] = Counter()
        self._mark = 0
        self._forgotten = 0  # drops up to this number are no longer known one by one
        self._drops: OrderedDict[tuple[str, bytes], int] = OrderedDict()  # by number

    # --- drops ----------------------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """The number of the last drop."""
        return self._mark

    def drop(self, namespace: str, key: bytes) -> Block | None:
        """Hide a block for good, now and if it is on its way in; the block, if it was visible."""
        self._mark += 1
        self._drops[namespace, key] = self._mark
        self._drops.move_to_end((namespace, key))
        if len(self._drops) > DROPS_KEPT:
            _, self._forgotten = self._drops.popitem(last=False)
        block = self.table.visible(namespace).get(key)
        if block is not None:
            self.room.hide(block)
        return block

    def dropped_since(self, mark: int, namespace: str, key: bytes) -> bool:
        """Whether a block was dropped after `mark`, or may have been."""
        return mark < self._forgotten or self._drops.get((namespace, key), 0) > mark

    # --- coming in ------------------------------------------------------------------------------------

    def step(self, mark: int, source: Source) -> Step:
        """Bring `source` in, or say what is in its way. After an `Evict`, ask again when that is done."""
        if (reason := self._refusal(mark, source)) is not None:
            return self._refuse(reason)
        size = source.view.nbytes
        if self.room.largest_free >= size:
            return self._place(source, size)
        above = self.table.ancestors(source.namespace, [source.parent])
        self.room.touch(above)
        victim = self.room.victim()
        if victim is None or victim in above:
            return self._refuse("full")
        if victim.uses > source.uses:
            victim.uses //= 2
            return self._refuse("cooler")
        return Evict(victim)

    def _refusal(self, mark: int, source: Source) -> str | None:
        if self.dropped_since(mark, source.namespace, source.key):
            return "dropped"
        if source.key in self.table.visible(source.namespace) or source.key in self.table.pending(
            source.namespace
        ):
            return "exists"
        return "too_large" if source.view.nbytes > self.room.largest else None

    def _refuse(self, reason: str) -> Refused:
        self.refused[reason] += 1
        return Refused(reason)

    def _place(self, source: Source, size: int) -> Placed:
        extent: Extent | None = self.room.place(size, Chain(self.table, source.namespace, (source.parent,)))
        if extent is None:
            detail = f"{size} bytes have no room where {self.room.largest_free} are free"
            raise IntegrityError(what="GPU tier", detail=detail)
        block = self.room.enter(source.namespace, source.key, size, source.parent, source.meta, extent)
        block.uses = source.uses
        return Placed(block, self.table.fill(block, self.owner))

    def arrived(self, mark: int, source: Source, placed: Placed) -> bool:
        """Its bytes are in place; whether it is visible now, or was dropped meanwhile."""
        if self.dropped_since(mark, source.namespace, source.key):
            self.gave_up(placed)
            self._refuse("dropped")
            return False
        block = self.table.complete(self.owner, placed.token, source.checksum)
        self.room.touch((block,))
        self.room.loosened()
        return True

    def gave_up(self, placed: Placed) -> None:
        """Its bytes will not come."""
        self.room.free(self.table.abort(self.owner, (placed.token,)))
        self.room.loosened()

    # --- reading and going ----------------------------------------------------------------------------

    def read(self, owner: int, namespace: str, keys: Sequence[bytes]) -> list[tuple[int, Block] | None]:
        """Pin what is there of `keys`, of a prefix chain root first: pin and block, or None."""
        self.table.check_owner(owner)
        if self.table.read_count(owner) + len(keys) > PINS_PER_OWNER_MAX:
            problem = f"one connection can hold {PINS_PER_OWNER_MAX} pins in GPU memory; unpin some first"
            raise InvalidRequest(problem=problem)
        visible = self.table.visible(namespace)
        found = [block for key in keys if (block := visible.get(key)) is not None]
        for block in found:
            block.uses += 1
        self.room.touch(list(dict.fromkeys(found)))
        pins = iter(self.table.pin(owner, found))
        return [None if (block := visible.get(key)) is None else (next(pins), block) for key in keys]

    def unpin(self, owner: int, pins: Sequence[int]) -> None:
        """End reads."""
        self.room.free(self.table.unpin(owner, pins))
        self.room.loosened()

    def end_owner(self, owner: int) -> None:
        """End all reads of an owner."""
        self.room.free(self.table.end_owner(owner))
        self.room.loosened()

    def clear(self) -> list[Block]:
        """Hide everything that is visible; what it was."""
        blocks = self.table.all_visible()
        for block in blocks:
            self.room.hide(block)
        return blocks

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the books agree with themselves. O(blocks)."""
        self.room.check_integrity()
        numbers = list(self._drops.values())
        if numbers != sorted(numbers) or (numbers and not self._forgotten < numbers[0] <= self._mark):
            detail = f"drops are numbered {numbers[:5]}, after {self._forgotten}, up to {self._mark}"
            raise IntegrityError(what="GPU tier", detail=detail)
