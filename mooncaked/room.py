"""Room in the pool for new blocks: allocators, block table and eviction policies taken together. Pure.

A full pool refuses nothing that eviction could make room for. Free memory may be in pieces, so eviction goes
on until one piece is large enough, and only what is pinned or being written can stop it. Where evicting one
block is not certain to be enough, it is worked out first whether evicting all of them would be, so that a
value that fits nowhere between pinned blocks does not empty the cache in vain.

A pool has one or more regions, each with an allocator; a block lies in one of them. A namespace with a quota
has a policy of its own, so that it makes room among its own blocks when it is at its quota; all other
namespaces share one. Where room is needed for anybody, the policies' victims are compared by their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from mooncaked.block import Block, Extent, Hold
from mooncaked.blocks import BlockTable
from mooncaked.errors import IntegrityError
from mooncaked.eviction import Policy, make_policy
from mooncaked.pools.allocator import SMALL_MAX, Allocator
from mooncaked.reservations import Reservations

Leaves = Callable[[Block], bool]


class Room:
    """Places and frees blocks. `evicted` is called with each block that has to make room, before it goes.
    `leaves` is called with each block that ceases to be readable, for whatever reason, before its memory is
    free; it answers whether somebody still reads it without having pinned it. Not thread-safe."""

    def __init__(
        self,
        capacity: int,
        blocks_max: int,
        evicted: Callable[[Block], None],
        *,
        region: int = 0,
        policy: str = "lru",
        seed: int = 0,
        leaves: Leaves = lambda _: False,
    ) -> None:
        self.table = BlockTable(self._on_released)
        self.reservations = Reservations()
        self._allocators = {region: Allocator(capacity)}
        self._retired: dict[int, Allocator] = {}  # regions that take no new blocks
        self._measure()
        self._make_policy: Callable[[], Policy[Block]] = partial(make_policy, policy, seed)
        self._shared: Policy[Block] = self._make_policy()
        self._own: dict[str, Policy[Block]] = {}  # of namespaces with a quota
        self._quotas: dict[str, int] = {}
        self._quota_used: dict[str, int] = {}  # bytes of values, of namespaces with a quota
        self._soft: OrderedDict[Block, None] = OrderedDict()  # held softly, oldest first
        self._hard: dict[Block, None] = {}
        self.hard_bytes = 0  # of values that are held hard
        self._blocks_max = blocks_max
        self._evicted = evicted
        self._leaves = leaves
        self._linger = self.table.new_owner(own=True)  # reads on behalf of those who did not pin
        self._lingering: dict[int, Block] = {}  # by pin
        self._impossible: int | None = None  # bytes; from this size on nothing fits until `loosened`

    # --- how full -------------------------------------------------------------------------------------

    @property
    def regions(self) -> list[int]:
        """Numbers of the regions that take new blocks."""
        return list(self._allocators)

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks and reservations have, without those in retired regions."""
        return sum(allocator.used_bytes for allocator in self._allocators.values())

    @property
    def largest_free(self) -> int:
        """Bytes of the largest value that fits without eviction."""
        return max((allocator.largest_free() for allocator in self._allocators.values()), default=-1)

    def region_bytes(self, region: int) -> int:
        """Bytes that are used in a region, retired or not."""
        return self._allocator(region).used_bytes

    # --- placing --------------------------------------------------------------------------------------

    def place(self, size: int, chain: Chain) -> Extent | None:
        """An extent of `size` bytes, after evicting what is in the way; None when what is pinned or being
        written leaves no room. Blocks in `chain` go last."""
        if self._impossible is not None and size >= self._impossible:
            return None
        if not self.fit_quota(size, chain):
            return None
        while self.table.count >= self._blocks_max:
            if (block := self._next(chain)) is None:
                return None
            self._evict(block)
        can_fit = size <= SMALL_MAX
        while (extent := self._allocate(size)) is None:
            block = self._next(chain)
            can_fit = can_fit or (block is not None and (block.size >= size or self._can_fit(size)))
            if block is None or not can_fit:
                self._impossible = size
                return None
            self._evict(block)
        return extent

    def fit_quota(self, size: int, chain: Chain) -> bool:
        """Whether the chain's namespace may have `size` more bytes, after evicting blocks of its own."""
        name = chain.namespace
        if name not in self._quotas:
            return True
        if size > self._quotas[name]:
            return False
        policy = self._own[name]
        while self._quota_used[name] + size > self._quotas[name]:
            block = policy.victim()
            if block is None:
                policy.touch(chain.take())
                block = policy.victim() or policy.inner_victim()
            if block is None:
                return False
            self._evict(block)
        return True

    def _allocate(self, size: int) -> Extent | None:
        for region, allocator in self._allocators.items():
            if (offset := allocator.allocate(size)) is not None:
                return Extent(region, offset, size)
        return None

    def adopt(self, extents: Iterable[Extent]) -> set[Extent]:
        """Take exactly these extents, as they were before a restart, before anything else is placed. Which of
        them could be: they lie in a region, and not where another one lies."""
        by_region: dict[int, list[Extent]] = {}
        for extent in extents:
            by_region.setdefault(extent.region, []).append(extent)
        taken: set[Extent] = set()
        for region, group in by_region.items():
            if (allocator := self._allocators.get(region)) is not None:
                good = allocator.adopt((extent.offset, extent.size) for extent in group)
                taken |= {Extent(region, offset, size) for offset, size in good}
        return taken

    def enter(
        self, namespace: str, key: bytes, size: int, parent: bytes | None, meta: bytes, extent: Extent
    ) -> Block:
        """A new block at an extent that was placed, reserved or adopted."""
        self._charge(namespace, size)
        return self.table.allocate(namespace, key, size, parent, meta, extent.offset, extent.region)

    def enter_whole(self, block: Block) -> None:
        """Enter a block whose bytes are in its place already, which was adopted or reserved; to be touched
        next."""
        self._charge(block.namespace, block.size)
        self.table.adopt(block)

    def touch(self, blocks: Sequence[Block]) -> None:
        """Readable blocks, a chain root first, were used; or have just become readable."""
        if not self._own:
            self._shared.touch(blocks)
            return
        by_policy: dict[int, list[Block]] = {}
        for block in blocks:
            by_policy.setdefault(id(self._policy(block)), []).append(block)
        for group in by_policy.values():
            self._policy(group[0]).touch(group)

    def hold(self, block: Block, hold: Hold) -> None:
        """Change how firmly a readable block stays."""
        self._forget_hold(block)
        self.table.hold(block, hold)
        if hold is Hold.SOFT:
            self._soft[block] = None
        elif hold is Hold.HARD:
            self._hard[block] = None
            self.hard_bytes += block.size
        self.loosened()

    def _forget_hold(self, block: Block) -> None:
        self._soft.pop(block, None)
        if block in self._hard:
            del self._hard[block]
            self.hard_bytes -= block.size

    # --- going ----------------------------------------------------------------------------------------

    def free(self, blocks: Iterable[Block]) -> None:
        """Give back the memory of blocks that are GONE."""
        for block in blocks:
            self._charge(block.namespace, -block.size)
            self.free_extent(block.extent)

    def free_extent(self, extent: Extent) -> None:
        """Give back memory that no block has."""
        self._allocator(extent.region).free(extent.offset)

    def loosened(self) -> None:
        """A block ceased to be pinned or written: what did not fit before may fit now."""
        self._impossible = None

    def hide(self, block: Block) -> bool:
        """Take a readable block away; whether its memory is free already, or waits for its last reader."""
        if self._leaves(block):
            (pin,) = self.table.pin(self._linger, (block,))
            self._lingering[pin] = block
        gone = self.table.hide(block)
        self._policy(block).discard(block)
        self._forget_hold(block)
        if gone:
            self.free((block,))
        return gone

    def settle(self, still_read: Callable[[list[Block]], list[bool]]) -> None:
        """Free the hidden blocks that nobody reads any more without having pinned them."""
        if not self._lingering:
            return
        pins = list(self._lingering)
        busy = still_read([self._lingering[pin] for pin in pins])
        done = [pin for pin, reading in zip(pins, busy, strict=True) if not reading]
        for pin in done:
            del self._lingering[pin]
        self.free(self.table.unpin(self._linger, done))
        self.loosened()

    def shrink(self, goal: int, blocks_max: int) -> tuple[int, bool]:
        """Evict blocks that are neither pinned nor have a child, until at most `goal` bytes are used; at most
        `blocks_max` of them. How many, and whether there is more to do."""
        for count in range(blocks_max):
            if self.used_bytes <= goal or (block := self.victim()) is None:
                return count, False
            self._evict(block)
        return blocks_max, True

    def victim(self) -> Block | None:
        """The block that is worth least of those that may go; it stays."""
        if not self._own:
            return self._shared.victim()
        victims = (policy.victim() for policy in self._policies())
        return min((b for b in victims if b is not None), key=lambda b: b.used_at_s, default=None)

    # --- regions and quotas -----------------------------------------------------------------------------

    def add_region(self, region: int, capacity: int) -> None:
        """Take a further region into use."""
        if region in self._allocators or region in self._retired:
            raise IntegrityError(what="room", detail=f"region {region} is there already")
        self._allocators[region] = Allocator(capacity)
        self._measure()
        self.loosened()

    def retire_region(self, region: int) -> None:
        """Place nothing in a region any more. What is there stays until it is evicted or ends."""
        self._retired[region] = self._allocators.pop(region)
        self._measure()

    def evacuate(self, region: int, blocks_max: int) -> int:
        """Evict up to `blocks_max` blocks of a retired region; how many. 0: what is left is pinned or being
        written."""
        blocks = (b for b in self.table.all_visible() if b.region == region and not b.reads)
        chosen = [block for block, _ in zip(blocks, range(blocks_max), strict=False)]
        for block in chosen:
            self._evict(block)
        return len(chosen)

    def drop_region(self, region: int) -> None:
        """Forget a retired region in which nothing is left; raises `IntegrityError` when something is."""
        if used := self._retired[region].used_bytes:
            raise IntegrityError(what="room", detail=f"region {region} still has {used} bytes in use")
        del self._retired[region]

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Limit the bytes of values of some namespaces. One that is over its quota shrinks with its next
        write. Where other namespaces have a quota than before, the policies begin anew with the order of last
        use: a block must not change hands, since a policy may still know it by what it noted about it."""
        renew = quotas.keys() != self._quotas.keys()
        self._quotas = dict(quotas)
        self._quota_used = dict.fromkeys(quotas, 0)
        for block in self.table.all_blocks():
            self._charge(block.namespace, block.size)
        if not renew:
            return
        self._shared = self._make_policy()
        self._own = {name: self._make_policy() for name in quotas}
        blocks = self.table.all_visible()
        blocks.reverse()  # of those used at the same time, the root of a chain is to be the most recent
        blocks.sort(key=lambda block: block.used_at_s)
        for block in blocks:
            block.touched, block.policy = 0, None
        for block in blocks:
            self._policy(block).touch((block,))

    @property
    def quotas(self) -> Mapping[str, int]:
        """Bytes by namespace."""
        return self._quotas

    # --- integrity --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless table, policies and allocators agree on what is where. O(blocks)."""
        self.table.check_integrity()
        self.reservations.check_integrity()
        blocks = self.table.all_blocks()
        places = [(block.region, block.offset) for block in blocks]
        places += [(extent.region, extent.offset) for extent in self.reservations.extents()]
        taken: set[tuple[int, int]] = set()
        for region, allocator in [*self._allocators.items(), *self._retired.items()]:
            allocator.check_integrity()
            taken |= {(region, offset) for offset in allocator.offsets()}
        if len(set(places)) != len(places) or set(places) != taken:
            detail = (
                f"{len(places)} blocks and reservations at {len(set(places))} places, {len(taken)} allocated"
            )
            raise IntegrityError(what="room", detail=detail)
        for policy in self._policies():
            policy.check_integrity()
        known, visible = sum(map(len, self._policies())), self.table.visible_count
        touched = sum(1 for block in blocks if block.touched)
        if not touched == known == visible:
            detail = f"{visible} readable, {touched} touched, {known} in the order"
            raise IntegrityError(what="room", detail=detail)
        for name, used in self._quota_used.items():
            if used != sum(block.size for block in blocks if block.namespace == name):
                raise IntegrityError(what="room", detail=f"namespace {name} does not have {used} bytes")

    # --- internals --------------------------------------------------------------------------------------

    def _measure(self) -> None:
        capacities = [allocator.capacity for allocator in self._allocators.values()]
        self.capacity = sum(capacities)  # bytes that blocks can have, without retired regions
        self.largest = max(capacities)  # bytes of the largest value that could ever have room

    def _policies(self) -> Iterator[Policy[Block]]:
        yield self._shared
        yield from self._own.values()

    def _policy(self, block: Block) -> Policy[Block]:
        return self._own.get(block.namespace, self._shared)

    def _allocator(self, region: int) -> Allocator:
        return self._allocators.get(region) or self._retired[region]

    def _on_released(self, block: Block) -> None:
        self._policy(block).released(block)

    def _charge(self, namespace: str, change: int) -> None:
        """Count bytes of a namespace's values, where it has a quota."""
        if namespace in self._quota_used:
            self._quota_used[namespace] += change

    def _can_fit(self, size: int) -> bool:
        kept: dict[int, list[int]] = {region: [] for region in self._allocators}
        for extent in self.reservations.extents():
            kept.setdefault(extent.region, []).append(extent.offset)
        for block in (*self.table.held(), *self._hard):
            kept.setdefault(block.region, []).append(block.offset)
        gaps = (allocator.widest_gap(kept[region]) for region, allocator in self._allocators.items())
        return max(gaps, default=0) >= size

    def _next(self, chain: Chain) -> Block | None:
        if (block := self.victim()) is not None:
            return block
        self.touch(chain.take())
        block = self.victim() or next(filter(None, (p.inner_victim() for p in self._policies())), None)
        if block is None and self._soft:
            self.hold(next(iter(self._soft)), Hold.NONE)
            return self._next(chain)
        return block

    def _evict(self, block: Block) -> None:
        self._evicted(block)
        self.hide(block)


class Chain:
    """The readable blocks above a batch of new ones in their prefix chains. Walked only when it comes to
    evicting blocks with children, and only once."""

    def __init__(self, table: BlockTable, namespace: str, parents: Iterable[bytes | None]) -> None:
        self._table = table
        self.namespace = namespace
        self._parents: Iterable[bytes | None] = parents

    def take(self) -> list[Block]:
        """The blocks, root first, at the first call; nothing at later ones."""
        parents, self._parents = self._parents, ()
        return self._table.ancestors(self.namespace, parents)
