"""What all parts of the store share: its books, its lock, and whom it tells of changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush
from math import inf
from typing import Protocol

import msgspec

from mooncaked.block import Block, BlockState, Hold
from mooncaked.clock import Clock
from mooncaked.eventlog import EventLog
from mooncaked.eviction import Watermarks
from mooncaked.pools.base import Pool
from mooncaked.room import Room
from mooncaked.storestats import Counters
from mooncaked.types import BlockEvent, Tier
from mooncaked.waiters import Waiters

EVENTS_KEPT = 65_536  # a subscriber further behind than this gets a snapshot
BLOCKS_MAX = 10_000_000  # bounds the books' own memory (about 1 KiB per block), however small the values
PINS_PER_OWNER_MAX = 1_000_000
AHEAD_SPARE = 1024
HOT_MAX = 16_384  # blocks that wait to be offered to the tier above; it is offered the others when used again


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One readable block, as `block_info` and `pinned_info` describe it."""

    namespace: str
    key: bytes
    parent: bytes | None
    region: int
    offset: int  # bytes
    size: int  # bytes
    checksum: int | None  # XXH3-64; None: not computed yet
    meta: bytes
    pins: int  # reads in progress
    idle_s: float  # since its last use
    uses: int = 0  # reads since it is here


class LowerBlock(msgspec.Struct, frozen=True):
    """A block of a lower tier, as far as others need to know of it."""

    namespace: str
    key: bytes
    parent: bytes | None
    size: int  # bytes


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A block that lay in the pool before a restart."""

    namespace: str
    key: bytes
    parent: bytes | None
    meta: bytes
    region: int
    offset: int  # bytes
    size: int  # bytes
    checksum: int | None  # XXH3-64 of the value
    hold: int = 0  # a `Hold`
    expires_at_s: float = inf  # monotonic


class Follower(Protocol):
    """Whoever keeps a picture of the readable blocks, told of each change under the store's lock: so quick,
    without waiting, without raising, and without a call back."""

    def stored(self, block: Block) -> None:
        """It became readable; with `block.unverified` set, only after `verified`."""

    def verified(self, block: Block) -> None:
        """A readable block has a checksum now, or has proved to agree with it after a restart."""

    def removed(self, block: Block) -> None:
        """It ceased to be readable; its memory can be another block's only after the next `flush`."""

    def flush(self) -> None:
        """A change is complete, and the lock about to be let go."""


class DirectUses(msgspec.Struct, frozen=True):
    """What clients read without asking since the last look."""

    blocks: Sequence[Block] = ()  # by last use, oldest first; one may come several times
    misses: int = 0  # keys


class DirectReaders(Protocol):
    """Those who read through shared memory. Called under the store's lock."""

    def reading(self, blocks: Sequence[Block]) -> list[bool]:
        """Which of these blocks, that a shared index no longer names, somebody still looks at."""

    def drain(self) -> DirectUses:
        """What was read since the last call."""


class LowerTier(Protocol):
    """What lies below the pool. It says by `lower_removed` what it has lost, after it does not contain it any
    more, and without a lock that it needs here."""

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` it has. Called under the store's lock, so it answers from memory."""

    def admits(self, block: Block) -> bool:
        """Whether a block that it lacks is worth being copied there. Called under the store's lock."""

    def evicted(self, block: Block) -> None:
        """A block that it lacks had to make room above. Called under the store's lock."""

    def needed(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Somebody asked whether `keys`, of a chain root first, are here. They have to be brought up before
        they are read, which will probably be soon. Does not wait."""

    def remove(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Forget `keys` for good, as far as it has them."""

    def blocks(self) -> Sequence[LowerBlock]:
        """All that it has."""


class UpperTier(Protocol):
    """What lies above the pool: copies of readable blocks."""

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` it has. Called under the store's lock, so it answers from memory."""

    def forget(self, namespace: str, keys: Sequence[bytes]) -> None:
        """These blocks cease to be readable, so their copies do. Called under the store's lock."""

    def blocks(self) -> Sequence[BlockEvent]:
        """All that it has, as events."""


class Books:
    """The state of a store. Everything that begins with an underscore is under `_lock`."""

    def __init__(
        self,
        pool: Pool,
        *,
        high_watermark: float,
        low_watermark: float,
        epoch: int,
        clock: Clock,
        policy: str = "lru",
        seed: int = 0,
        followers: Sequence[Follower] = (),
        readers: DirectReaders | None = None,
        blocks_max: int = BLOCKS_MAX,
        events_kept: int = EVENTS_KEPT,
    ) -> None:
        self.epoch = epoch  # random per start of the daemon: numbers of another epoch mean nothing here
        self.tier = pool.tier
        self._views = {pool.region: pool.view}
        self._clock = clock
        self._watermarks = Watermarks(high_watermark, low_watermark)
        self._followers = tuple(followers)
        self._readers = readers
        self._room = Room(
            pool.size,
            blocks_max,
            self._on_evicted,
            region=pool.region,
            policy=policy,
            seed=seed,
            leaves=self._on_leaving,
        )
        self._table = self._room.table
        self._log: EventLog[BlockEvent] = EventLog(events_kept)
        self._counters = Counters()
        self._ttls_s: Mapping[str, float] = {}  # by namespace
        self._expiries: list[tuple[float, int, Block]] = []  # a heap
        self._unchecked: deque[Block] = deque()  # readable, without a checksum; some may have gone since
        self._checking = 0  # blocks whose checksum is being worked out
        self._unverified: dict[Block, None] = {}  # by last use, oldest first
        self._lower: LowerTier | None = None
        self._ahead: deque[Block] = deque()  # to be copied there; some may have gone since, or are saved
        self._leaving: set[Block] = set()  # are being copied to the tier below
        self._leaving_bytes = 0  # of those that go then
        self._forsaken: set[tuple[str, bytes]] = set()  # were removed meanwhile: the copies count no more
        self._upper: UpperTier | None = None
        self._upper_uses = 0  # reads of a block from which on it is offered there
        self._hot: dict[Block, None] = {}  # were read that often; some may have gone since
        self._shrinking = False  # the pool has passed the high watermark, and not come down to the low one
        self._node = self._table.new_owner(own=True)  # reads for the node's own upkeep
        self._quiet_until_s = 0.0  # monotonic
        self._closed = False
        self._lock = threading.Lock()
        self._logged = Waiters(self._lock)  # there is a new event
        self._settled = Waiters(self._lock)  # a write has ended
        self._upkeep = Waiters(self._lock)  # there is a block without a checksum

    # --- all under the lock ---------------------------------------------------------------------------

    def _enter(self, blocks: Sequence[Block]) -> None:
        """Blocks, of prefix chains root first, have become readable."""
        now = self._clock.monotonic()
        for block in blocks:
            block.used_at_s = now
            self._counters.stored_bytes += block.size
            self._log_change(block, stored=True)
            for follower in self._followers:
                follower.stored(block)
            if block.expires_at_s != inf:
                heappush(self._expiries, (block.expires_at_s, self._table.next_id(), block))
            if block.checksum is None:
                self._unchecked.append(block)
            if self._lower is not None:
                self._consider(block)
        self._room.touch(blocks)
        for block in blocks:
            if block.hold_asked is not Hold.NONE:
                self._room.hold(block, block.hold_asked)
        self._counters.stored += len(blocks)
        if self._unchecked:
            self._upkeep.wake()

    def _leave(self, block: Block) -> bool:
        """A readable block is to go; whether its memory is free already."""
        return self._room.hide(block)

    def _end_change(self) -> None:
        """Tell those who follow, and those who wait. The last thing in each change."""
        for follower in self._followers:
            follower.flush()
        self._logged.wake()

    def _on_evicted(self, block: Block) -> None:
        self._counters.evicted += 1
        self._counters.evicted_bytes += block.size
        self._counters.evicted_idle_s += max(0.0, self._clock.monotonic() - block.used_at_s)
        if self._lower is not None and not block.saved:
            self._counters.evicted_unsaved += 1
            self._lower.evicted(block)

    def _on_leaving(self, block: Block) -> bool:
        self._log_change(block, stored=False)
        self._unverified.pop(block, None)
        if self._upper is not None:
            self._hot.pop(block, None)
            self._upper.forget(block.namespace, (block.key,))
        for follower in self._followers:
            follower.removed(block)
        return self._readers is not None and self._readers.reading((block,))[0]

    def _note_uses(self) -> None:
        """Take note of what was read directly, and free what is no longer."""
        if self._readers is None:
            return
        uses = self._readers.drain()
        now = self._clock.monotonic()
        run: list[Block] = []  # of one chain, root first, as the policy wants it
        for block in uses.blocks:
            block.used_at_s = now
            self._count_use(block)
            if not block.touched:  # gone since
                continue
            if run and block.parent != run[-1].key:
                self._room.touch(run)
                run = []
            run.append(block)
        self._room.touch(run)
        self._counters.hits += len(uses.blocks)
        self._counters.misses += uses.misses
        self._room.settle(self._readers.reading)

    def _count_use(self, block: Block) -> None:
        block.uses += 1
        if block.uses == 1 and self._lower is not None:
            self._consider(block)
        if self._upper is not None and block.uses >= self._upper_uses and len(self._hot) < HOT_MAX:
            self._hot[block] = None

    def _consider(self, block: Block) -> None:
        """Perhaps a block is worth being copied to the tier below before it has to leave."""
        if self._lower is None or block.saved or not self._lower.admits(block):
            return
        self._ahead.append(block)
        if len(self._ahead) > 2 * self._table.visible_count + AHEAD_SPARE:  # most of them have gone
            self._ahead = deque(b for b in self._ahead if b.state is BlockState.COMPLETE and not b.saved)

    def _release(self, gone: Iterable[Block]) -> None:
        """Writes or reads have ended, and by that the blocks `gone` are GONE."""
        self._room.free(gone)
        self._room.loosened()

    def _log_change(self, block: Block, *, stored: bool) -> None:
        self._log.append(self._event(block, stored=stored))

    def _lower_event(self, block: LowerBlock, *, stored: bool) -> BlockEvent:
        return BlockEvent(stored, block.namespace, block.key, block.parent, block.size, Tier.SSD)

    def _event(self, block: Block, *, stored: bool) -> BlockEvent:
        return BlockEvent(stored, block.namespace, block.key, block.parent, block.size, self.tier)

    def _info(self, block: Block) -> BlockInfo:
        return BlockInfo(
            namespace=block.namespace,
            key=block.key,
            parent=block.parent,
            region=block.region,
            offset=block.offset,
            size=block.size,
            checksum=block.checksum,
            meta=block.meta,
            pins=block.reads,
            idle_s=max(0.0, self._clock.monotonic() - block.used_at_s),
            uses=block.uses,
        )

    def _below(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` a lower tier has."""
        if self._lower is None or not keys:
            return [False] * len(keys)
        found = self._lower.contains(namespace, keys)
        if not self._forsaken:
            return found
        return [has and (namespace, key) not in self._forsaken for key, has in zip(keys, found, strict=True)]
