"""Which nodes hold which blocks: the conductor's soft copy of the nodes' block tables.

Every block has one integer, a bit mask with three bits for each source: bit `3 * slot` says that the source
has the block in DRAM, the next two that it has it in GPU memory and on SSD. A lookup walks a prompt's keys
and narrows one mask, so that it costs the same for 4 nodes as for 400.

A source is one subscription to one node. A source that ends is hidden by clearing its bit in `_live`: its
blocks are gone for every lookup at once, whatever their number, and `sweep` takes the bits out later, in
steps short enough for an event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import msgspec

from mooncaked.errors import IntegrityError
from mooncaked.types import BlockEvent, Tier

_TIERS = (Tier.DRAM, Tier.GPU, Tier.SSD)
_TIER_BIT = {tier: bit for bit, tier in enumerate(_TIERS)}
_STRIDE = len(_TIERS)
_TRUTH = bytes.maketrans(b"01", b"\x00\x01")


class Holder(msgspec.Struct, frozen=True):
    """One copy of a block."""

    node_id: str
    tier: Tier
    size: int  # bytes


class Match(msgspec.Struct, frozen=True):
    """What a lookup found: who holds how much of a chain, in groups of equal depth.

    `groups` are (depth, mask) with rising depth: each node of the mask holds exactly the first `depth` blocks
    without a gap. `slow` names, in order, the blocks that some nodes have only on SSD."""

    groups: list[tuple[int, int]] = []
    slow: list[tuple[int, int]] = []  # (position, mask of the nodes for which that block is on SSD only)

    def deepest(self) -> int:
        """The greatest depth of any node, in blocks."""
        return self.groups[-1][0] if self.groups else 0


class SourceStats(msgspec.Struct, frozen=True):
    """One source as operators see it."""

    source: int
    node_id: str
    visible: bool
    copies: int


def _broken(detail: str) -> IntegrityError:
    return IntegrityError(what="the prefix index", detail=detail)


class _Space:
    """The blocks of one namespace."""

    __slots__ = ("masks", "odd_sizes", "size")

    def __init__(self, size: int) -> None:
        self.masks: dict[bytes, int] = {}
        self.size = size  # bytes of a block here, but for those in `odd_sizes`
        self.odd_sizes: dict[bytes, int] = {}


class PrefixIndex:
    """Blocks by namespace and key, and the sources that hold them.

    Holds at most `blocks_max` distinct blocks: what comes beyond them is counted in `refused` and stays
    unknown, which costs a cache hit and nothing else."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.blocks = 0  # distinct blocks, those of hidden and retired sources included
        self.refused = 0  # stored events turned away because the index was full
        self._spaces: dict[str, _Space] = {}
        self._node_of: list[str] = []  # by slot; "" when the slot is free or retired
        self._copies: list[int] = []  # by slot: (block, tier) pairs
        self._live = 0  # DRAM bits of the visible sources
        self._current: dict[str, int] = {}  # node -> its published source
        self._free: list[int] = []
        self._retired: set[int] = set()  # slots whose bits are still in the masks
        self._sweep: tuple[int, Iterator[tuple[str, list[bytes]]]] | None = None
        self._sweep_keys: tuple[str, list[bytes]] = ("", [])

    # --- sources -------------------------------------------------------------------------------------

    def begin(self, node_id: str) -> int:
        """A new source for `node_id`; lookups do not see it before `publish`."""
        if self._free:
            slot = self._free.pop()
            self._node_of[slot] = node_id
        else:
            slot = len(self._node_of)
            self._node_of.append(node_id)
            self._copies.append(0)
        return slot

    def publish(self, source: int) -> None:
        """Make `source` what lookups see of its node; the source seen so far retires."""
        node_id = self._node_of[source]
        before = self._current.get(node_id)
        if before is not None and before != source:
            self.retire(before)
        self._current[node_id] = source
        self._live |= 1 << (_STRIDE * source)

    def hide(self, source: int) -> None:
        """Take the blocks of `source` out of all lookups, at once; `publish` brings them back."""
        self._live &= ~(1 << (_STRIDE * source))

    def retire(self, source: int) -> None:
        """Forget `source`: hidden at once, its memory freed by `sweep`."""
        self.hide(source)
        node_id = self._node_of[source]
        if self._current.get(node_id) == source:
            del self._current[node_id]
        self._node_of[source] = ""
        if self._copies[source]:
            self._retired.add(source)
        else:
            self._free.append(source)

    def drop_node(self, node_id: str) -> None:
        """Retire whatever is published for `node_id`."""
        if (source := self._current.get(node_id)) is not None:
            self.retire(source)

    # --- changes -------------------------------------------------------------------------------------

    def apply(self, source: int, events: Iterable[BlockEvent]) -> None:
        """Take over what a source says. Stored twice or removed while unknown changes nothing."""
        for event in events:
            bit = 1 << (_STRIDE * source + _TIER_BIT[event.tier])
            if event.stored:
                self._insert(source, bit, event)
            else:
                self._remove(source, bit, event.namespace, event.key)

    def _insert(self, source: int, bit: int, event: BlockEvent) -> None:
        space = self._spaces.get(event.namespace)
        mask = 0 if space is None else space.masks.get(event.key, 0)
        if mask & bit:
            return
        if space is None or not mask:
            if self.blocks >= self.blocks_max:
                self.refused += 1
                return
            space = self._new_block(space, event)
        space.masks[event.key] = mask | bit
        self._copies[source] += 1

    def _new_block(self, space: _Space | None, event: BlockEvent) -> _Space:
        if space is None:
            space = self._spaces[event.namespace] = _Space(event.size)
        if event.size != space.size:
            space.odd_sizes[event.key] = event.size
        self.blocks += 1
        return space

    def _remove(self, source: int, bit: int, namespace: str, key: bytes) -> None:
        space = self._spaces.get(namespace)
        if space is None or not (mask := space.masks.get(key, 0)) & bit:
            return
        self._copies[source] -= 1
        self._store(namespace, space, key, mask & ~bit)

    def _store(self, namespace: str, space: _Space, key: bytes, mask: int) -> None:
        if mask:
            space.masks[key] = mask
            return
        del space.masks[key]
        space.odd_sizes.pop(key, None)
        self.blocks -= 1
        if not space.masks:
            del self._spaces[namespace]

    def sweep(self, keys_max: int) -> bool:
        """Clean up after retired sources, looking at `keys_max` blocks; True while there is more to do."""
        if self._sweep is None:
            if not self._retired:
                return False
            gone = sum(0b111 << (_STRIDE * slot) for slot in self._retired)
            lists = [(name, list(space.masks)) for name, space in self._spaces.items()]
            self._sweep = (gone, iter(lists))
        gone, spaces = self._sweep
        while keys_max > 0:
            name, keys = self._sweep_keys
            if not keys:
                following = next(spaces, None)
                if following is None:
                    return self._end_sweep(gone)
                self._sweep_keys = following
                continue
            chunk, keys[-keys_max:] = keys[-keys_max:], []
            keys_max -= len(chunk)
            self._clear_bits(name, chunk, gone)
        return True

    def _clear_bits(self, name: str, keys: Sequence[bytes], gone: int) -> None:
        space = self._spaces.get(name)
        for key in keys:
            if space is not None and (mask := space.masks.get(key, 0)) & gone:
                self._store(name, space, key, mask & ~gone)

    def _end_sweep(self, gone: int) -> bool:
        for slot in [slot for slot in self._retired if gone >> (_STRIDE * slot) & 1]:
            self._retired.discard(slot)
            self._copies[slot] = 0
            self._free.append(slot)
        self._sweep = None
        return bool(self._retired)

    # --- questions -----------------------------------------------------------------------------------

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> Match:
        """Who holds how many of `keys` (a chain, root first) without a gap. Only visible sources count."""
        space = self._spaces.get(namespace)
        alive = self._live
        groups: list[tuple[int, int]] = []
        slow: list[tuple[int, int]] = []
        if space is None or not alive:
            return Match(groups, slow)
        get = space.masks.get
        depth = 0
        for key in keys:
            mask = get(key, 0)
            if mask & alive != alive:  # somebody lacks it, or has it in another tier than DRAM
                here = (mask | mask >> 1 | mask >> 2) & alive
                if here != alive:
                    if depth:
                        groups.append((depth, alive & ~here))
                    alive = here
                    if not alive:
                        return Match(groups, slow)
                if on_ssd := here & ~(mask | mask >> 1):
                    slow.append((depth, on_ssd))
            depth += 1
        if depth:
            groups.append((depth, alive))
        return Match(groups, slow)

    def depths(self, match: Match) -> dict[str, int]:
        """The depth in blocks of every node of `match`; nodes without the first block are absent."""
        found: dict[str, int] = {}
        for depth, mask in match.groups:
            bits = format(mask, "b")[::-_STRIDE].encode().translate(_TRUTH)  # one byte for each slot, 0 or 1
            found.update(dict.fromkeys(compress(self._node_of, bits), depth))
        return found

    def slow_blocks(self, match: Match, node_id: str, depth: int) -> int:
        """How many of the first `depth` blocks `node_id` has on SSD only."""
        return len(self.slow_positions(match, node_id, depth))

    def slow_positions(self, match: Match, node_id: str, depth: int) -> list[int]:
        """Which of the first `depth` blocks `node_id` has on SSD only, root first."""
        if not match.slow or (source := self._current.get(node_id)) is None:
            return []
        bit = 1 << (_STRIDE * source)
        return [position for position, mask in match.slow if position < depth and mask & bit]

    def holders(self, namespace: str, key: bytes) -> list[Holder]:
        """Every visible copy of one block."""
        space = self._spaces.get(namespace)
        mask = 0 if space is None else space.masks.get(key, 0)
        if space is None or not mask:
            return []
        size = space.odd_sizes.get(key, space.size)
        found = []
        for node_id, slot in self._current.items():
            if self._live >> (_STRIDE * slot) & 1:
                bits = mask >> (_STRIDE * slot) & 0b111
                found += [Holder(node_id, tier, size) for tier in _TIERS if bits >> _TIER_BIT[tier] & 1]
        return found

    def sources(self) -> list[SourceStats]:
        """Every source that has not retired."""
        return [
            SourceStats(slot, node_id, bool(self._live >> (_STRIDE * slot) & 1), self._copies[slot])
            for slot, node_id in enumerate(self._node_of)
            if node_id
        ]

    def copies(self, source: int) -> int:
        """How many (block, tier) pairs `source` has named."""
        return self._copies[source]

    def check_integrity(self) -> None:
        """Count everything again; raises `IntegrityError` where a count is wrong."""
        counted = [0] * len(self._copies)
        for name, space in self._spaces.items():
            if not space.masks or not space.odd_sizes.keys() <= space.masks.keys():
                raise IntegrityError(
                    what="the prefix index", detail=f"namespace {name} is empty or keeps sizes"
                )
            for key, mask in space.masks.items():
                if mask <= 0 or mask >> (_STRIDE * len(counted)):
                    raise _broken(f"mask {mask:#x} of {key.hex()}")
                for slot in range(len(counted)):
                    counted[slot] += (mask >> (_STRIDE * slot) & 0b111).bit_count()
        total = sum(len(space.masks) for space in self._spaces.values())
        if total != self.blocks:
            raise IntegrityError(
                what="the prefix index", detail=f"{self.blocks} blocks counted, {total} held"
            )
        for slot, copies in enumerate(self._copies):
            idle = slot in self._free
            settled = slot not in self._retired  # the bits of a retired source go while a sweep is under way
            if (settled and copies != counted[slot]) or (idle and counted[slot]):
                raise _broken(f"source {slot}: {copies} copies counted, {counted[slot]} held, free={idle}")
            if self._live >> (_STRIDE * slot) & 1 and not self._node_of[slot]:
                raise IntegrityError(
                    what="the prefix index", detail=f"source {slot} is visible without a node"
                )
