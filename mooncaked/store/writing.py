"""Writing: room for values, and the moment at which they become readable."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from mooncaked.api.protocol import META_BYTES_MAX, PutItem, PutSlot, StoredItem
from mooncaked.block import Block, Extent, Hold
from mooncaked.errors import InvalidRequest
from mooncaked.keys import as_key, check_namespace, show_key
from mooncaked.room import Chain
from mooncaked.store.books import Books

CHECKSUM_MAX = (1 << 64) - 1
RESERVED_SHARE_MAX = 1 / 16  # of the pool, by one owner
RESERVED_OWNER_BYTES_MAX = 64 << 20
RESERVED_ALL_SHARE_MAX = 1 / 4
HARD_SHARE_MAX = 1 / 2  # of the pool, in blocks that are held hard
TTL_S_MAX = 10 * 365 * 86400.0


class Writing(Books):
    """An owner is whoever writes and reads: one number from `new_owner` per connection or fetch. Everything
    that an owner began ends with `drop_owner`; from then on its calls raise `InvalidRequest`. An owner must
    not be dropped while a thread still copies into its slots or out of its pins."""

    def new_owner(self) -> int:
        """A number for a new connection or fetch, never used before in this store."""
        with self._lock:
            return self._table.new_owner()

    def drop_owner(self, owner: int) -> None:
        """End an owner: its writes are aborted, its pins end. Does nothing when it has ended before."""
        with self._lock:
            pending = self._table.pending_count
            self._release(self._table.end_owner(owner))
            for extent in self._room.reservations.end_owner(owner):
                self._room.free_extent(extent)
            self._counters.aborted += pending - self._table.pending_count
            self._settled.wake()

    def begin_put(
        self, owner: int, namespace: str, items: Sequence[PutItem], *, raising: bool = False
    ) -> list[PutSlot]:
        """Make room for values, evicting what is worth least; one slot per item, in order, with its status as
        in the protocol. Each item succeeds or fails by itself. What a tier below has exists, unless the
        writer is `raising` it, from there or from another node.

        "full": what is pinned, held or being written leaves no room, even if all else were evicted, or the
        namespace's quota is too small, or it is too soon after a restart; "too_large": it is larger than the
        pool; "exists" counts as a use of the block that is there. Raises `InvalidRequest` or `InvalidKey`,
        before anything is done, when the owner has ended or an item is malformed."""
        check_namespace(namespace)
        for item in items:
            check_item(item)
        with self._lock:
            self._table.check_owner(owner)
            now, visible = self._clock.monotonic(), self._table.visible(namespace)
            here = [block for item in items if (block := visible.get(item.key)) is not None]
            for block in here:
                block.used_at_s = now
            self._room.touch(here)
            chain = Chain(self._table, namespace, [item.parent for item in items])
            below = self._below(namespace, [] if raising else [item.key for item in items])
            exists = below or [False] * len(items)
            slots = [
                self._begin_one(owner, namespace, *pair, chain) for pair in zip(items, exists, strict=True)
            ]
            self._end_change()
            return slots

    def commit(self, owner: int, tokens: Sequence[int], checksums: Sequence[int | None]) -> list[bool]:
        """Make written values readable, all at once; `tokens` of a prefix chain root first. True per token.

        Raises `InvalidRequest`, before anything is done, when a token is not a write in progress of this
        owner, comes twice, or the checksums (XXH3-64 of each value; None: the node works it
        out soon) are not one per token."""
        if len(tokens) != len(checksums):
            raise InvalidRequest(problem=f"{len(tokens)} tokens came with {len(checksums)} checksums")
        if any(checksum is not None and not 0 <= checksum <= CHECKSUM_MAX for checksum in checksums):
            raise InvalidRequest(problem="a checksum is not an unsigned 64-bit number")
        with self._lock:
            self._table.writes(owner, tokens)
            rows = zip(tokens, checksums, strict=True)
            self._made_readable([self._table.complete(owner, token, checksum) for token, checksum in rows])
            return [True] * len(tokens)

    def abort(self, owner: int, tokens: Sequence[int]) -> int:
        """Give up writes and reservations; how many. Raises `InvalidRequest` as `commit` does, before
        anything is done."""
        with self._lock:
            self._table.check_owner(owner)
            reservations = self._room.reservations
            reserved = [token for token in tokens if reservations.has(owner, token)]
            writes = [token for token in tokens if not reservations.has(owner, token)]
            reservations.look_up(owner, reserved)
            gone = self._table.abort(owner, writes)
            for token in reserved:
                self._room.free_extent(reservations.take(owner, token))
            self._release(gone)
            self._counters.aborted += len(gone)
            self._settled.wake()
            return len(gone) + len(reserved)

    def reserve(self, owner: int, sizes: Sequence[int]) -> list[PutSlot]:
        """Take room ahead of time; one slot per size, "ok" or "full". An owner
        gets `RESERVED_SHARE_MAX` of the pool at most. Ends by `put_reserved`, `abort` or with the owner."""
        if sizes and min(sizes) < 0:
            raise InvalidRequest(problem=f"room of {min(sizes)} bytes cannot be reserved")
        with self._lock:
            self._table.check_owner(owner)
            if self._clock.monotonic() < self._quiet_until_s:
                return [PutSlot(status="full")] * len(sizes)
            chain = Chain(self._table, "", ())
            slots = [self._reserve_one(owner, size, chain) for size in sizes]
            self._end_change()
            return slots

    def put_reserved(self, owner: int, namespace: str, items: Sequence[StoredItem]) -> list[str]:
        """Make values readable that lie in reserved room; `items` of a prefix chain root first. Per item
        "stored", "exists" or "busy" (then its room is given back), or "full" (the namespace is at its quota).

        Raises `InvalidRequest` or `InvalidKey`, before anything is done, for what is malformed, or room that
        this owner has not reserved, or reserved smaller."""
        check_namespace(namespace)
        for item in items:
            check_item(item)
        with self._lock:
            self._table.check_owner(owner)
            extents = self._room.reservations.look_up(owner, [item.token for item in items])
            for item, extent in zip(items, extents, strict=True):
                if item.size > extent.size:
                    problem = (
                        f"{item.size} bytes for key {show_key(item.key)} were put in room for {extent.size}"
                    )
                    raise InvalidRequest(problem=problem)
            below = self._below(namespace, [item.key for item in items])
            blocks: list[Block] = []
            statuses = []
            for item, exists in zip(items, below, strict=True):
                extent = self._room.reservations.take(owner, item.token)
                status = "exists" if exists else self._name_status(namespace, item)
                if status:
                    self._room.free_extent(extent)
                else:
                    blocks.append(self._name(namespace, item, extent))
                statuses.append(status or "stored")
            self._made_readable(blocks)
            return statuses

    def keep_quiet(self, until_s: float) -> None:
        """Give no room to anybody until this monotonic time: after a restart, somebody may still write into
        memory that was given to him before it, and that is free now."""
        with self._lock:
            self._quiet_until_s = until_s

    def set_namespaces(self, quotas: dict[str, int], ttls_s: dict[str, float]) -> None:
        """Limit the bytes of some namespaces, and how long their blocks stay readable without being asked to
        by the writer."""
        with self._lock:
            self._room.set_quotas(quotas)
            self._ttls_s = ttls_s
            self._end_change()

    # --- internals; all under the lock ----------------------------------------------------------------

    def _begin_one(self, owner: int, namespace: str, item: PutItem, exists: bool, chain: Chain) -> PutSlot:
        status = "exists" if exists else self._refusal(namespace, item.key, item.size, HOLDS[item.hold])
        if status:
            return PutSlot(status=status)
        extent = self._room.place(item.size, chain)
        if extent is None:
            self._counters.refused_full += 1
            return PutSlot(status="full")
        block = self._room.enter(namespace, item.key, item.size, item.parent, item.meta, extent)
        self._set_terms(block, item)
        token = self._table.fill(block, owner)
        return PutSlot(status="ok", token=token, region=extent.region, offset=extent.offset)

    def _refusal(self, namespace: str, key: bytes, size: int, hold: Hold) -> str:
        """Why a value gets no room, whatever is evicted; empty when it may."""
        if key in self._table.visible(namespace):
            return "exists"
        if key in self._table.pending(namespace):
            return "busy"
        if self._clock.monotonic() < self._quiet_until_s:
            self._counters.refused_full += 1
            return "full"
        if size > self._room.largest:
            self._counters.refused_too_large += 1
            return "too_large"
        if hold is Hold.HARD and self._room.hard_bytes + size > HARD_SHARE_MAX * self._room.capacity:
            self._counters.refused_full += 1
            return "full"
        return ""

    def _set_terms(self, block: Block, item: PutItem | StoredItem) -> None:
        """How long and how firmly a new block stays."""
        ttl_s = item.ttl_ms / 1000 or self._ttls_s.get(block.namespace, inf)
        block.expires_at_s = self._clock.monotonic() + ttl_s
        block.hold_asked = HOLDS[item.hold]

    def _made_readable(self, blocks: Sequence[Block]) -> None:
        self._enter(blocks)
        self._release(())
        self._end_change()
        self._settled.wake()

    def _reserve_one(self, owner: int, size: int, chain: Chain) -> PutSlot:
        room, reservations = self._room, self._room.reservations
        if (
            reservations.owned_bytes(owner) + size
            > min(RESERVED_OWNER_BYTES_MAX, RESERVED_SHARE_MAX * room.capacity)
            or reservations.used_bytes + size > RESERVED_ALL_SHARE_MAX * room.capacity
            or (extent := room.place(size, chain)) is None
        ):
            return PutSlot(status="full")
        token = self._table.next_id()
        reservations.add(owner, token, extent)
        return PutSlot(status="ok", token=token, region=extent.region, offset=extent.offset)

    def _name_status(self, namespace: str, item: StoredItem) -> str:
        """Why a value in reserved room does not get its name; empty when it does."""
        status = self._refusal(namespace, item.key, item.size, HOLDS[item.hold])
        if not status and namespace in self._room.quotas:
            chain = Chain(self._table, namespace, (item.parent,))
            if not self._room.fit_quota(item.size, chain):
                self._counters.refused_full += 1
                return "full"
        return status

    def _name(self, namespace: str, item: StoredItem, extent: Extent) -> Block:
        block = Block(
            namespace, item.key, item.size, item.parent, item.meta, extent.offset, extent.region,
            checksum=item.checksum,
        )  # fmt: skip
        if item.ttl_ms or item.hold or self._ttls_s:
            self._set_terms(block, item)
        self._room.enter_whole(block)
        return block


HOLDS = {"": Hold.NONE, "soft": Hold.SOFT, "hard": Hold.HARD}


def check_item(item: PutItem | StoredItem) -> None:
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
    if item.hold not in HOLDS or not 0 <= item.ttl_ms <= TTL_S_MAX * 1000:
        problem = (
            f"the item for key {show_key(item.key)} is to be held {item.hold!r} for {item.ttl_ms} ms; a hold "
            f'is "", "soft" or "hard", and a time to live from 0 (none) to {TTL_S_MAX:.0f} s'
        )
        raise InvalidRequest(problem=problem)
    if isinstance(item, StoredItem) and item.checksum is not None and not 0 <= item.checksum <= CHECKSUM_MAX:
        raise InvalidRequest(problem="a checksum is not an unsigned 64-bit number")
