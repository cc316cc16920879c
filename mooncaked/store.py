"""The node's one writer: every block of the node comes, is read and goes through a `Store`.

Thread-safe, with one lock. Under it only the books are kept: bytes are copied by the callers, outside, into
slots that `begin_put` gave them and out of blocks that they pinned. So any thread and any event loop may call
any method; `wait_events` and `wait_settled` are the only ones that wait.

Every change that a reader can see is an event with a number. Events are numbered under the lock that makes
the change, so a `snapshot` and the events after its number give the exact contents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec

from mooncaked.api.protocol import META_BYTES_MAX, PinnedBlock, PutItem, PutSlot
from mooncaked.blocks import Block
from mooncaked.clock import Clock
from mooncaked.errors import InvalidRequest
from mooncaked.eventlog import EventLog
from mooncaked.eviction import Watermarks
from mooncaked.keys import as_key, check_namespace, show_key
from mooncaked.pools.base import Pool
from mooncaked.room import Chain, Room
from mooncaked.storestats import Counters, StoreStats
from mooncaked.types import BlockEvent

EVENTS_KEPT = 65_536  # a subscriber further behind than this gets a snapshot
BLOCKS_MAX = 10_000_000  # bounds the books' own memory (about 1 KiB per block), however small the values
PINS_PER_OWNER_MAX = 1_000_000
CHECKSUM_MAX = (1 << 64) - 1
_EVICT_SLICE = 64  # blocks that the background eviction takes per hold of the lock


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One readable block, as `block_info` and `pinned_info` describe it."""

    namespace: str
    key: bytes
    parent: bytes | None
    region: int
    offset: int  # bytes
    size: int  # bytes
    checksum: int  # XXH3-64
    meta: bytes
    pins: int  # reads in progress
    idle_s: float  # since its last use


class Store:
    """The blocks of one pool. `pool` belongs to the caller, and outlives the store.

    An owner is whoever writes and reads: one number from `new_owner` per connection or fetch. Everything that
    an owner began ends with `drop_owner`; from then on its calls raise `InvalidRequest`. An owner must not be
    dropped while a thread still copies into its slots or out of its pins.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        high_watermark: float,
        low_watermark: float,
        epoch: int,
        clock: Clock,
        blocks_max: int = BLOCKS_MAX,
        events_kept: int = EVENTS_KEPT,
    ) -> None:
        self.epoch = epoch  # random per start of the daemon: numbers of another epoch mean nothing here
        self.region = pool.region
        self.tier = pool.tier
        self._view = pool.view
        self._clock = clock
        self._watermarks = Watermarks(high_watermark, low_watermark)
        self._room = Room(pool.size, blocks_max, self._on_evicted)
        self._table = self._room.table
        self._policy = self._room.policy
        self._log: EventLog[BlockEvent] = EventLog(events_kept)
        self._counters = Counters()
        self._closed = False
        self._lock = threading.Lock()
        self._logged = threading.Condition(self._lock)  # there is a new event
        self._settled = threading.Condition(self._lock)  # a write has ended

    # --- owners ---------------------------------------------------------------------------------------

    def new_owner(self) -> int:
        """A number for a new connection or fetch, never used before in this store."""
        with self._lock:
            return self._table.new_owner()

    def drop_owner(self, owner: int) -> None:
        """End an owner: its writes are aborted, its pins end. Does nothing when it has ended before."""
        with self._lock:
            pending = self._table.pending_count
            self._release(self._table.end_owner(owner))
            self._counters.aborted += pending - self._table.pending_count
            self._settled.notify_all()

    # --- writing --------------------------------------------------------------------------------------

    def begin_put(self, owner: int, namespace: str, items: Sequence[PutItem]) -> list[PutSlot]:
        """Make room for values, evicting what was not used for longest; one slot per item, in order, with its
        status as in the protocol. Each item succeeds or fails by itself.

        "full": what is pinned or being written leaves no room, even if all else were evicted; "too_large": it
        is larger than the pool; "exists" counts as a use of the block that is there. Raises `InvalidRequest`
        or `InvalidKey`, before anything is done, when the owner has ended or an item is malformed."""
        check_namespace(namespace)
        for item in items:
            _check_item(item)
        with self._lock:
            self._table.check_owner(owner)
            now, visible = self._clock.monotonic(), self._table.visible(namespace)
            here = [block for item in items if (block := visible.get(item.key)) is not None]
            for block in here:
                block.used_at_s = now
            self._policy.touch(here)
            chain = Chain(self._table, namespace, [item.parent for item in items])
            sequence = self._log.sequence
            slots = [self._begin_one(owner, namespace, item, chain) for item in items]
            if self._log.sequence > sequence:
                self._logged.notify_all()
            return slots

    def commit(self, owner: int, tokens: Sequence[int], checksums: Sequence[int]) -> list[bool]:
        """Make written values readable, all at once; `tokens` of a prefix chain root first. True per token.

        Raises `InvalidRequest`, before anything is done, when a token is not a write in progress of this
        owner, comes twice, or the checksums (XXH3-64 of each value) are not one per token."""
        if len(tokens) != len(checksums):
            raise InvalidRequest(problem=f"{len(tokens)} tokens came with {len(checksums)} checksums")
        if checksums and not 0 <= min(checksums) <= max(checksums) <= CHECKSUM_MAX:
            raise InvalidRequest(problem="a checksum is not an unsigned 64-bit number")
        with self._lock:
            self._table.writes(owner, tokens)
            now = self._clock.monotonic()
            blocks = [self._table.complete(owner, *pair) for pair in zip(tokens, checksums, strict=True)]
            for block in blocks:
                block.used_at_s = now
                self._counters.stored_bytes += block.size
                self._log_change(block, stored=True)
            self._policy.touch(blocks)
            self._counters.stored += len(blocks)
            self._release(())
            self._logged.notify_all()
            self._settled.notify_all()
            return [True] * len(blocks)

    def abort(self, owner: int, tokens: Sequence[int]) -> int:
        """Give up writes; how many. Raises `InvalidRequest` as `commit` does, before anything is done."""
        with self._lock:
            gone = self._table.abort(owner, tokens)
            self._release(gone)
            self._counters.aborted += len(gone)
            self._settled.notify_all()
            return len(gone)

    # --- reading --------------------------------------------------------------------------------------

    def pin(
        self, owner: int, namespace: str, keys: Sequence[bytes], *, count: bool = True
    ) -> list[PinnedBlock | None]:
        """Protect blocks while they are read; `keys` of a prefix chain root first. None per key that is not
        here. A use of the blocks, the first key's most of all. `count`: see `StoreStats`. Raises
        `InvalidRequest` when the owner has ended or would hold more than `PINS_PER_OWNER_MAX`."""
        with self._lock:
            table, region, now = self._table, self.region, self._clock.monotonic()
            if table.read_count(owner) + len(keys) > PINS_PER_OWNER_MAX:
                problem = f"one connection can hold {PINS_PER_OWNER_MAX} pins; unpin some first"
                raise InvalidRequest(problem=problem)
            visible = table.visible(namespace)
            found = [visible.get(key) for key in keys]
            blocks = [block for block in found if block is not None]
            pins = iter(table.pin(owner, blocks))
            for block in blocks:
                block.used_at_s = now
            self._policy.touch(blocks)
            if count:
                self._counters.hits += len(blocks)
                self._counters.misses += len(keys) - len(blocks)
            return [None if block is None else _pinned(next(pins), region, block) for block in found]

    def unpin(self, owner: int, pins: Sequence[int]) -> None:
        """End reads. Raises `InvalidRequest`, before anything is done, when a pin is not one of this owner or
        comes twice."""
        with self._lock:
            self._release(self._table.unpin(owner, pins))

    def exists(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are readable here now. Protects nothing and is no use of them."""
        with self._lock:
            visible = self._table.visible(namespace)
            return [key in visible for key in keys]

    def prefix_match(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many of `keys`, a chain root first, are readable here without a gap. Protects nothing."""
        with self._lock:
            visible = self._table.visible(namespace)
            return next((n for n, key in enumerate(keys) if key not in visible), len(keys))

    def block_info(self, namespace: str, key: bytes) -> BlockInfo | None:
        """What is known of a readable block, None when there is none."""
        with self._lock:
            block = self._table.visible(namespace).get(key)
            return None if block is None else self._info(block)

    def pinned_info(self, owner: int, pins: Sequence[int]) -> list[BlockInfo]:
        """What is known of blocks that `owner` has pinned, also when they were removed since. Raises
        `InvalidRequest` as `unpin` does."""
        with self._lock:
            return [self._info(block) for block in self._table.reads(owner, pins)]

    def view(self, region: int, offset: int, size: int) -> memoryview:
        """The pool's memory from `offset` on, `size` bytes, writable, without a copy. Only for who has that
        place by a slot or a pin. Raises `InvalidRequest` when it is not inside the pool."""
        if region != self.region or not 0 <= offset <= offset + size <= len(self._view):
            problem = f"region {region}, {offset}+{size} bytes is not memory of this node's pool"
            raise InvalidRequest(problem=problem)
        return self._view[offset : offset + size]

    # --- going ----------------------------------------------------------------------------------------

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Make blocks unreadable at once and free their memory; False: it was not here, or it is being read
        and its memory goes with its last reader. A block that is still being written is not here yet."""
        with self._lock:
            freed = [self._remove_one(namespace, key) for key in keys]
            self._logged.notify_all()
            return freed

    def evict_to_low(self, stop: Callable[[], bool] = lambda: False) -> int:
        """If the pool is over its high watermark, evict down to the low one, as far as blocks are evictable,
        in short holds of the lock; the number of blocks. `stop` is asked between them."""
        with self._lock:
            capacity, used = self._room.allocator.capacity, self._room.allocator.used_bytes
            goal = used - self._watermarks.excess(used, capacity)
        evicted, more = 0, goal < used
        while more and not stop():
            with self._lock:
                count, more = self._room.shrink(goal, _EVICT_SLICE)
                self._logged.notify_all()
            evicted += count
        return evicted

    def set_watermarks(self, high: float, low: float) -> None:
        """Change the watermarks, parts of the pool; raises `InvalidRequest` unless 0 < low <= high <= 1."""
        watermarks = Watermarks(high, low)
        with self._lock:
            self._watermarks = watermarks

    # --- events ---------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._log.sequence

    def snapshot(self) -> tuple[int, list[BlockEvent]]:
        """Everything readable, as events, and the number of the newest event that it contains."""
        with self._lock:
            sequence, blocks = self._log.sequence, self._table.all_visible()
        return sequence, [self._event(block, stored=True) for block in blocks]  # these fields never change

    def events_since(self, sequence: int, count_max: int = EVENTS_KEPT) -> list[BlockEvent] | None:
        """Up to `count_max` events after number `sequence`, oldest first. None: they are no longer kept, or
        there is no such number here; take a snapshot."""
        with self._lock:
            return self._log.since(sequence, count_max)

    def wait_events(self, sequence: int, timeout_s: float) -> int:
        """Wait until there is an event after number `sequence`, `timeout_s` has passed, or the store is
        closed; the number of the newest event."""
        with self._logged:
            self._logged.wait_for(lambda: self._closed or self._log.sequence > sequence, timeout_s)
            return self._log.sequence

    def wait_settled(self, namespace: str, keys: Sequence[bytes], timeout_s: float) -> bool:
        """Wait until nobody is writing any of `keys` (committed or given up); False when `timeout_s` has
        passed or the store was closed before."""

        def settled() -> bool:
            return self._table.pending(namespace).keys().isdisjoint(keys)

        with self._settled:
            self._settled.wait_for(lambda: self._closed or settled(), timeout_s)
            return settled()

    # --- the whole ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wake everybody who waits, for good. Everything else goes on working until the pool is closed."""
        with self._lock:
            self._closed = True
            self._logged.notify_all()
            self._settled.notify_all()

    def stats(self) -> StoreStats:
        """How full the pool is and what has happened so far."""
        with self._lock:
            table, allocator = self._table, self._room.allocator
            return StoreStats(
                capacity_bytes=allocator.capacity,
                used_bytes=allocator.used_bytes,
                largest_free_bytes=max(0, allocator.largest_free()),
                pinned_bytes=table.pinned_bytes,
                filling_bytes=table.pending_bytes,
                blocks=table.visible_count,
                pinned=table.pinned_count,
                filling=table.pending_count,
                hidden=table.hidden_count,
                owners=table.owner_count,
                sequence=self._log.sequence,
                **vars(self._counters),
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless all books agree. O(blocks) under the lock: for tests and idling."""
        with self._lock:
            self._room.check_integrity()
            self._log.check_integrity()

    # --- internals; all under the lock ----------------------------------------------------------------

    def _begin_one(self, owner: int, namespace: str, item: PutItem, chain: Chain) -> PutSlot:
        if item.key in self._table.visible(namespace):
            return PutSlot(status="exists")
        if item.key in self._table.pending(namespace):
            return PutSlot(status="busy")
        if item.size > self._room.allocator.capacity:
            self._counters.refused_too_large += 1
            return PutSlot(status="too_large")
        offset = self._room.place(item.size, chain)
        if offset is None:
            self._counters.refused_full += 1
            return PutSlot(status="full")
        block = self._table.allocate(namespace, item.key, item.size, item.parent, item.meta, offset)
        return PutSlot(status="ok", token=self._table.fill(block, owner), region=self.region, offset=offset)

    def _remove_one(self, namespace: str, key: bytes) -> bool:
        block = self._table.visible(namespace).get(key)
        if block is None:
            return False
        self._counters.removed += 1
        self._log_change(block, stored=False)
        return self._room.hide(block)

    def _on_evicted(self, block: Block) -> None:
        self._counters.evicted += 1
        self._counters.evicted_bytes += block.size
        self._counters.evicted_idle_s += max(0.0, self._clock.monotonic() - block.used_at_s)
        self._log_change(block, stored=False)

    def _release(self, gone: Iterable[Block]) -> None:
        """Writes or reads have ended, and by that the blocks `gone` are GONE."""
        self._room.free(gone)
        self._room.loosened()

    def _log_change(self, block: Block, *, stored: bool) -> None:
        self._log.append(self._event(block, stored=stored))

    def _event(self, block: Block, *, stored: bool) -> BlockEvent:
        return BlockEvent(stored, block.namespace, block.key, block.parent, block.size, self.tier)

    def _info(self, block: Block) -> BlockInfo:
        return BlockInfo(
            namespace=block.namespace,
            key=block.key,
            parent=block.parent,
            region=self.region,
            offset=block.offset,
            size=block.size,
            checksum=block.checksum,
            meta=block.meta,
            pins=block.pins,
            idle_s=max(0.0, self._clock.monotonic() - block.used_at_s),
        )


def _pinned(pin: int, region: int, block: Block) -> PinnedBlock:
    return PinnedBlock(
        pin=pin, region=region, offset=block.offset, size=block.size, checksum=block.checksum, meta=block.meta
    )


def _check_item(item: PutItem) -> None:
    """Raise `InvalidKey` or `InvalidRequest` unless the item can be stored as it is."""
    as_key(item.key)
    if item.parent is not None:
        as_key(item.parent)
    if item.size < 0 or len(item.meta) > META_BYTES_MAX or item.parent == item.key:
        problem = (
            f"the item for key {show_key(item.key)} has a size of {item.size} bytes, {len(item.meta)} bytes "
            f"of meta (the limit is {META_BYTES_MAX}), parent {show_key(item.parent or b'')}; "
            "a size is at least 0 and a block is not its own parent"
        )
        raise InvalidRequest(problem=problem)
