"""The tier below: what leaves the pool for it, and what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mooncaked.block import Block, BlockState
from mooncaked.store.books import BlockInfo, LowerBlock, LowerTier
from mooncaked.store.going import SLICE, Going

ATTACH_KEYS = 1024  # looked at per hold of the lock
AHEAD_SHARE = 1 / 2  # of the low watermark; a pool less full than that has no need of the tier below
CHAIN_BLOCKS_MAX = 64  # saved together with the leaf of their chain

Wanted = Callable[[Block], bool]


class Leaving(msgspec.Struct, frozen=True):
    """A block that is pinned while it is copied to the tier below."""

    pin: int
    info: BlockInfo
    used_at_s: float  # monotonic time of its last use when it was chosen
    goes: bool  # whether it makes room then; the others only wait for their turn, and need no copy then


class Leave(msgspec.Struct, frozen=True):
    """What `leave_or_evict` came to."""

    leaving: list[Leaving]
    more: bool  # there is more to evict, and it can go on at once


class Lower(Going):
    """How the pool and the tier below go together."""

    def attach_lower(self, lower: LowerTier) -> None:
        """Put a tier below, with what it has. The store may serve already; subscribers get a new snapshot."""
        blocks = lower.blocks()
        with self._lock:
            self._lower = lower
            if blocks:
                first = blocks[0]
                self._log.cut(self._lower_event(first, stored=True))
            names = [(block.namespace, block.key) for block in self._table.all_visible()]
            self._end_change()
        for start in range(0, len(names), ATTACH_KEYS):
            by_namespace: dict[str, list[bytes]] = {}
            for namespace, key in names[start : start + ATTACH_KEYS]:
                by_namespace.setdefault(namespace, []).append(key)
            for namespace, keys in by_namespace.items():
                self._note_saved(namespace, keys)
                with self._lock:
                    visible = self._table.visible(namespace)
                    for block in filter(None, map(visible.get, keys)):
                        self._consider(block)

    def leave_or_evict(self, wanted: Wanted, bytes_max: int) -> Leave:
        """Like `evict_to_low`, in one go of bounded length, but blocks that the tier below lacks and that are
        `wanted` there are not evicted but pinned for the caller, up to `bytes_max` bytes, who copies them and
        then calls `left`; with a leaf come those above it in its chain. What does not fit into `bytes_max`
        waits for the next call, or is evicted when the pool is nearly full. A single block may be larger."""
        leaving: list[Leaving] = []
        with self._lock:
            self._note_uses()
            left, more = bytes_max, False
            for _ in range(SLICE):
                if not (more := self._excess() > 0) or len(leaving) >= SLICE:
                    break
                block = self._room.victim()
                if block is None:
                    more = False
                    break
                if not block.saved and wanted(block):
                    if block.size <= left or (bytes_max > 0 and not self._leaving):
                        leaving += (taken := self._take_chain(block, wanted, left))
                        left -= sum(each.info.size for each in taken)
                        continue
                    if not self._pressed():
                        more = False
                        break
                self._on_evicted(block)
                self._leave(block)
            self._end_change()
        return Leave(leaving, more)

    def leave_ahead(self, wanted: Wanted, bytes_max: int) -> list[Leaving]:
        """When the pool is filling up, blocks that the tier below admits and lacks, in the order in which it
        came to want them, pinned as by `leave_or_evict`; they stay, and need no copy when they have to leave.
        So a burst of writes finds room at once."""
        leaving: list[Leaving] = []
        with self._lock:
            self._note_uses()
            left = bytes_max
            while self._ahead and len(leaving) < SLICE and self._filling():
                block = self._ahead[0]
                here = block.state is BlockState.COMPLETE and block not in self._leaving
                if here and not block.saved and wanted(block):
                    if block.size > left and (leaving or self._leaving or not bytes_max):
                        break
                    leaving += self._take((block,))
                    left -= block.size
                self._ahead.popleft()
            self._end_change()
        return leaving

    def left(self, leaving: Sequence[Leaving], saved: Sequence[bool]) -> None:
        """End the pins of `leave_or_evict`. A block that was saved below goes if it was to, unless it was
        used meanwhile; one that could not be saved stays for the eviction to come."""
        removed: dict[str, list[bytes]] = {}
        with self._lock:
            pins = [each.pin for each in leaving]
            blocks = self._table.reads(self._node, pins)
            self._release(self._table.unpin(self._node, pins))
            for each, block, good in zip(leaving, blocks, saved, strict=True):
                self._leaving.discard(block)
                self._leaving_bytes -= block.size if each.goes else 0
                if (block.namespace, block.key) in self._forsaken:
                    removed.setdefault(block.namespace, []).append(block.key)
                elif good:
                    self._end_leaving(each, block)
            self._end_change()
            lower = self._lower
        for namespace, keys in removed.items():
            if lower is not None:
                lower.remove(namespace, keys)
            with self._lock:
                self._forsaken -= {(namespace, key) for key in keys}

    def lower_removed(self, blocks: Sequence[LowerBlock]) -> None:
        """The tier below has lost or given up blocks."""
        with self._lock:
            for block in blocks:
                here = self._table.visible(block.namespace).get(block.key)
                if here is not None:
                    here.saved = False
                self._log.append(self._lower_event(block, stored=False))
            self._end_change()

    def raised(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Blocks were copied up from the tier below, which still has them."""
        self._note_saved(namespace, keys)
        with self._lock:
            self._counters.promoted += len(keys)

    # --- internals ------------------------------------------------------------------------------------

    def _note_saved(self, namespace: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            visible = self._table.visible(namespace)
            for key, below in zip(keys, self._below(namespace, keys), strict=True):
                if (block := visible.get(key)) is not None:
                    block.saved = below

    # --- all under the lock

    def _excess(self) -> int:
        """Bytes that are still to go: from the high watermark on, until the low one is reached."""
        used, capacity = self._room.used_bytes - self._leaving_bytes, self._room.capacity
        low = int(self._watermarks.low * capacity)
        if used > self._watermarks.high * capacity:
            self._shrinking = True
        elif used <= low:
            self._shrinking = False
        return used - low if self._shrinking else 0

    def _filling(self) -> bool:
        return self._room.used_bytes > AHEAD_SHARE * self._watermarks.low * self._room.capacity

    def _pressed(self) -> bool:
        """Whether half of what is above the high watermark is in use too: no time is left to save blocks."""
        return self._room.used_bytes > (1 + self._watermarks.high) / 2 * self._room.capacity

    def _take_chain(self, leaf: Block, wanted: Wanted, bytes_max: int) -> list[Leaving]:
        """Pin a leaf that goes, and what is above it, as far as that has no other children: when one leaf
        after the other could be saved, a long chain would take as many waits for the disk."""
        chain, size = [leaf], leaf.size
        visible = self._table.visible(leaf.namespace)
        while len(chain) < CHAIN_BLOCKS_MAX and (key := chain[-1].parent) is not None:
            block = visible.get(key)
            if block is None or block.saved or block.children != 1 or block in self._leaving:
                break
            size += block.size
            if size > bytes_max or not wanted(block):
                break
            chain.append(block)
        chain.reverse()
        self._leaving_bytes += leaf.size
        return self._take(chain, leaf)

    def _take(self, blocks: Sequence[Block], goes: Block | None = None) -> list[Leaving]:
        self._leaving.update(blocks)
        pins = self._table.pin(self._node, blocks)
        return [
            Leaving(pin, self._info(block), block.used_at_s, block is goes)
            for pin, block in zip(pins, blocks, strict=True)
        ]

    def _end_leaving(self, leaving: Leaving, block: Block) -> None:
        """A block was saved; unless the tier below has lost it again, it need not be any more."""
        (block.saved,) = self._below(block.namespace, (block.key,))
        if block.saved:
            self._log.append(self._lower_event(_lower_block(leaving.info), stored=True))
        unused = not block.pins and not block.children and block.used_at_s == leaving.used_at_s
        if leaving.goes and block.saved and unused and block.state is BlockState.COMPLETE:
            self._on_evicted(block)
            self._leave(block)


def _lower_block(info: BlockInfo) -> LowerBlock:
    return LowerBlock(info.namespace, info.key, info.parent, info.size)
