"""Blocks from before a restart, and checksums that are still to be compared or worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappush
from itertools import islice
from math import inf

import msgspec

from mooncaked.api.protocol import META_BYTES_MAX
from mooncaked.block import Block, BlockState, Extent, Hold
from mooncaked.errors import InvalidKey
from mooncaked.keys import KEY_BYTES_MAX, check_namespace
from mooncaked.store.books import Books, Restored
from mooncaked.store.writing import CHECKSUM_MAX

PROOF_SHARE_MAX = 1 / 64  # of the pool, pinned at a time to be looked at


class RestoreReport(msgspec.Struct, frozen=True):
    """What came of the blocks from before a restart."""

    blocks: int
    size: int  # bytes
    dropped: int  # overlapping, outside of the pool, without a checksum, twice, or malformed


class Proof(msgspec.Struct, frozen=True):
    """A block that is pinned for the node's own upkeep, so that its bytes can be looked at."""

    pin: int
    region: int
    offset: int
    size: int
    checksum: int | None  # what it should be; None: not known


class Restart(Books):
    """Restoring and proving."""

    def restore(self, records: Iterable[Restored]) -> RestoreReport:
        """Take blocks over that lie in the pool from before, last used last. They exist at once, and are read
        after `set_verified`. Only for a store in which nothing is yet."""
        total = 0
        good: dict[Extent, Restored] = {}
        names: set[tuple[str, bytes]] = set()
        spaces: dict[str, bool] = {}  # whether a namespace can be one
        for record in records:
            total += 1
            name = (record.namespace, record.key)
            if name not in names and _is_whole(record, spaces):
                names.add(name)
                good[Extent(record.region, record.offset, record.size)] = record
        with self._lock:
            adopted = self._room.adopt(good)
            now = self._clock.monotonic()
            blocks = [_block(record, now) for extent, record in good.items() if extent in adopted]
            self._enter_restored(blocks)
        return RestoreReport(len(blocks), sum(block.size for block in blocks), total - len(blocks))

    def wait_unchecked(self, timeout_s: float) -> bool:
        """Wait until there is a block without a checksum, the store is closed, or `timeout_s` has passed;
        whether there is one."""
        with self._lock:
            self._upkeep.wait_for(lambda: self._closed or self._unchecked, timeout_s)
            return bool(self._unchecked)

    def take_unchecked(self, count_max: int) -> list[Proof]:
        """Pin blocks whose checksum is not known yet; for `set_checksums`. They cannot be evicted meanwhile,
        so only one, or some that are a small share of the pool."""
        with self._lock:
            blocks: list[Block] = []
            left = PROOF_SHARE_MAX * self._room.capacity
            while self._unchecked and len(blocks) < count_max and left > 0:
                block = self._unchecked.popleft()
                if block.state is BlockState.COMPLETE and block.checksum is None:
                    blocks.append(block)
                    left -= block.size
            self._checking += len(blocks)
            return self._prove(blocks)

    def set_checksums(self, pins: Sequence[int], checksums: Sequence[int]) -> None:
        """Tell the checksums of blocks from `take_unchecked`, and unpin them."""
        with self._lock:
            for block, checksum in zip(self._table.reads(self._node, pins), checksums, strict=True):
                block.checksum = checksum
                if block.state is BlockState.COMPLETE:
                    self._tell_verified(block)
            self._checking -= len(pins)
            self._end_proofs(pins)

    @property
    def unverified(self) -> int:
        """Blocks from before the restart that nobody has compared with their checksum yet."""
        return len(self._unverified)

    def take_unverified(self, count_max: int) -> list[Proof]:
        """Pin restored blocks that are still to be compared, last used first; for `set_verified`. As many as
        `take_unchecked` does."""
        with self._lock:
            blocks: list[Block] = []
            left = PROOF_SHARE_MAX * self._room.capacity
            for block in self._unverified_idle(count_max):
                if left <= 0:
                    break
                blocks.append(block)
                left -= block.size
            return self._prove(blocks)

    def take_unverified_keys(self, namespace: str, keys: Sequence[bytes]) -> list[Proof]:
        """Pin those of `keys` that are restored and still to be compared, even if somebody else is at it; for
        `set_verified`."""
        with self._lock:
            visible = self._table.visible(namespace)
            blocks = [b for key in keys if (b := visible.get(key)) is not None and b.unverified]
            return self._prove(blocks)

    def set_verified(self, pins: Sequence[int], whole: Sequence[bool]) -> None:
        """Tell whether blocks agree with their checksum, and unpin them. One that does not goes at once."""
        with self._lock:
            for block, good in zip(self._table.reads(self._node, pins), whole, strict=True):
                if block.state is not BlockState.COMPLETE or not block.unverified:
                    continue
                del self._unverified[block]
                block.unverified = False
                if good:
                    self._tell_verified(block)
                else:
                    self._counters.damaged += 1
                    self._leave(block)
            self._end_proofs(pins)

    # --- internals; all under the lock ----------------------------------------------------------------

    def _enter_restored(self, blocks: list[Block]) -> None:
        """As `_enter`, without events: nobody has heard of this life yet, and all begin with a snapshot."""
        run: list[Block] = []  # of one chain, root first, as the policy wants it
        for block in blocks:
            self._room.enter_whole(block)
            self._unverified[block] = None
            for follower in self._followers:
                follower.stored(block)
            if block.expires_at_s != inf:
                heappush(self._expiries, (block.expires_at_s, self._table.next_id(), block))
            if run and block.parent != run[-1].key:
                self._room.touch(run)
                run = []
            run.append(block)
        self._room.touch(run)
        for block in blocks:
            if block.hold_asked is not Hold.NONE:
                self._room.hold(block, block.hold_asked)
        self._counters.restored += len(blocks)
        self._end_change()

    def _unverified_idle(self, count_max: int) -> Iterable[Block]:
        return islice((block for block in reversed(self._unverified) if not block.reads), count_max)

    def _prove(self, blocks: Sequence[Block]) -> list[Proof]:
        pins = self._table.pin(self._node, blocks)
        return [
            Proof(pin, block.region, block.offset, block.size, block.checksum)
            for pin, block in zip(pins, blocks, strict=True)
        ]

    def _end_proofs(self, pins: Sequence[int]) -> None:
        self._release(self._table.unpin(self._node, pins))
        self._end_change()

    def _tell_verified(self, block: Block) -> None:
        for follower in self._followers:
            follower.verified(block)


def _block(record: Restored, now: float) -> Block:
    return Block(
        namespace=record.namespace,
        key=record.key,
        size=record.size,
        parent=record.parent,
        meta=record.meta,
        offset=record.offset,
        region=record.region,
        checksum=record.checksum,
        unverified=True,
        used_at_s=now,
        expires_at_s=record.expires_at_s,
        hold_asked=Hold(record.hold),
    )


def _is_whole(record: Restored, spaces: dict[str, bool]) -> bool:
    """Whether a record can be that of a block; `spaces` remembers which namespaces can be one."""
    space = spaces.get(record.namespace)
    if space is None:
        space = spaces[record.namespace] = _can_be(check_namespace, record.namespace)
    parent = record.parent
    return (
        space
        and 1 <= len(record.key) <= KEY_BYTES_MAX
        and (parent is None or (1 <= len(parent) <= KEY_BYTES_MAX and parent != record.key))
        and record.size >= 0
        and record.offset >= 0
        and len(record.meta) <= META_BYTES_MAX
        and record.checksum is not None
        and 0 <= record.checksum <= CHECKSUM_MAX
        and 0 <= record.hold <= Hold.HARD
    )


def _can_be(check: Callable[[str], object], text: str) -> bool:
    try:
        check(text)
    except InvalidKey:
        return False
    return True
