"""The node's memory, new or as the life before left it, and the blocks that lie in it.

What was kept is taken over only when it is certain what it is: a journal of this version, node and kind of
pages names the regions, and their sizes agree. Else the start is a cold one, and the log says why. Blocks
from before exist at once, and each is compared with its checksum before its first use (`mooncaked.verifier`).
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from mooncaked.clock import Clock
from mooncaked.config import REGIONS_MAX, DramConfig
from mooncaked.errors import NotEnoughMemory, Unhealthy
from mooncaked.metrics import Reading
from mooncaked.pinning import HostPins
from mooncaked.pools.allocator import PAGE
from mooncaked.pools.dram import DramPool, MakeMemory, Progress, check_nodes
from mooncaked.pools.journal import Journal, Kept, read_journal
from mooncaked.pools.keep import Keeper, Nowhere
from mooncaked.pools.memory import HUGE_BYTES, available_memory, round_up, transparent_possible
from mooncaked.pools.records import Header, RegionShape, Unreadable
from mooncaked.pools.regions import Regions, Shape, adoptable, split
from mooncaked.store import Follower, Restored, RestoreReport, Store
from mooncaked.units import format_size, parse_ranges

log = logging.getLogger(__name__)

GRACE_S = 1.5  # after the last sign of life: for clients to end the copies that they were at
_JOURNALS = ("journal-0", "journal-1")
_SPARE_BYTES = 8 << 20  # of shared memory for the journal, beside the pool


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory it is, and who keeps it."""

    settings: DramConfig
    source: str  # of the settings, for messages
    node_id: str
    epoch: int
    cold: bool = False  # forget what was kept


class Memory:
    """The regions of a node, made, kept and given back here. To be closed last, when nobody uses them."""

    def __init__(self, origin: Origin, keeper: Keeper, clock: Clock) -> None:
        """Take over what was kept, and make what is missing. Raises `NotEnoughMemory`, or `ConfigError` for a
        NUMA node that there is not."""
        self._origin = origin
        self._keeper = keeper
        self._clock = clock
        self._numa_nodes = parse_ranges(origin.settings.numa)
        check_nodes(self._numa_nodes, origin.source)
        self.journal: Journal | None = None
        self.cold_because = ""  # why what was kept was not used
        self.quiet_until_s = 0.0  # monotonic: until then, clients of the life before may still write
        self.regions = Regions()
        self.pins: HostPins | None = None  # lock the regions for GPUs, those that come later too
        self._next_region = 0
        self._fds: list[int] = []  # of the journal, until it has them
        self._kept = self._look_back()
        try:
            self._make_regions()
        except BaseException:
            self.close()
            raise
        self._begin_journal()

    # --- the start ------------------------------------------------------------------------------------

    def _look_back(self) -> Kept | None:
        """What the life before left, if it can be used."""
        names = self._keeper.names()
        if not names:
            return None
        try:
            if self._origin.cold:
                raise Unreadable("it was asked for")
            kept = self._read_back()
            self._check(kept)
        except (Unreadable, OSError) as error:
            self.cold_because = str(error)
            log.warning("kept memory is not used, starting cold cause=%r", self.cold_because)
            for fd in self._fds:
                os.close(fd)
            self._fds = []
            return None
        return kept

    def _read_back(self) -> Kept:
        fds = [self._keeper.take(name) for name in _JOURNALS]
        self._fds = [fd for fd in fds if fd is not None]
        if len(self._fds) < len(_JOURNALS):
            raise Unreadable("its journal is not there")
        kept = read_journal(self._fds)
        if kept is None:
            raise Unreadable("its journal was not finished")
        return kept

    def _check(self, kept: Kept) -> None:
        """Raise `Unreadable` for memory of another geometry or node."""
        header, settings = kept.header, self._origin.settings
        if header.node_id != self._origin.node_id:
            raise Unreadable(f"it is of the node {header.node_id}")
        if header.grain != PAGE or header.huge_pages != settings.huge_pages:
            was, now = (header.grain, header.huge_pages), (PAGE, settings.huge_pages)
            raise Unreadable(f"it is of another geometry: grain and huge pages were {was}, and are {now}")
        shapes = self._whole(kept)
        if not adoptable(shapes, self._wanted):
            was_sizes = ", ".join(format_size(shape.size) for shape in shapes) or "none"
            raise Unreadable(f"its regions ({was_sizes}) do not fit dram.size {format_size(self._wanted)}")

    def _whole(self, kept: Kept) -> list[Shape]:
        there = set(self._keeper.names())
        return [
            Shape(shape.region, shape.size)
            for shape in kept.regions.values()
            if f"region-{shape.region}" in there
        ]

    @property
    def _wanted(self) -> int:
        return round_up(self._origin.settings.size, self._origin.settings.huge_pages)

    def _make_regions(self) -> None:
        if self._kept is not None:
            for shape in adoptable(self._whole(self._kept), self._wanted):
                self._adopt(self._kept.regions[shape.region])
            self._next_region = max(self._kept.regions, default=-1) + 1
            seen_at_s = self._kept.seen_at_s
            now = self._clock.monotonic()
            self.quiet_until_s = min(now, now if seen_at_s is None else seen_at_s) + GRACE_S
        for name in self._keeper.names():
            self._keeper.drop(name)
        settings = self._origin.settings
        step = max(settings.region_size, -(-self._wanted // REGIONS_MAX))
        sizes = split(self._wanted - self.regions.size, step, settings.huge_pages)
        if settings.huge_pages not in HUGE_BYTES and sum(sizes) > (available := available_memory()):
            cause = f"{available} bytes are available"
            raise NotEnoughMemory(key="dram.size", size=self._wanted, cause=cause)
        if sum(sizes) + _SPARE_BYTES > self._keeper.room():
            self._keep_nothing(f"{self._keeper.where} has room for {format_size(self._keeper.room())} only")
        for size in sizes:
            self.regions.add(self.make_region(size))
        if settings.huge_pages == "transparent" and not transparent_possible():
            log.info("the kernel makes no huge pages of shared memory file=shmem_enabled remedy='advise'")

    def _adopt(self, shape: RegionShape) -> None:
        fd = self._keeper.take(f"region-{shape.region}")
        if fd is None:
            return
        if os.fstat(fd).st_size != shape.size:
            log.warning("a kept region has another size, it is not used region=%d", shape.region)
            os.close(fd)
            self._keeper.drop(f"region-{shape.region}")
            return
        self.regions.add(self._pool(shape.size, shape.region, shape.huge_pages, fd=fd))

    def _pool(
        self,
        size: int,
        region: int,
        huge_pages: str | None = None,
        fd: int | None = None,
        make: MakeMemory | None = None,
    ) -> DramPool:
        return DramPool(
            size,
            region,
            huge_pages=huge_pages or self._origin.settings.huge_pages,
            numa_nodes=self._numa_nodes,
            prefault_threads=self._origin.settings.prefault_threads,
            fd=fd,
            make=make,
        )

    def _keep_nothing(self, cause: str) -> None:
        """Do without: one warning, and memory that ends with this process."""
        log.warning("memory is not kept over a restart cause=%r", cause)
        if self.regions.live():  # what was taken over stays kept, what comes now is not
            return
        self._keeper.remove()
        self._keeper = Nowhere()

    def _begin_journal(self) -> None:
        if not self._keeper.where or not any(pool.kept for pool in self.regions.live()):
            return
        try:
            if self._kept is None:
                self._fds = [self._keeper.make(name, 0) for name in _JOURNALS]
            file = 1 - self._kept.file if self._kept else 0
            self.journal = Journal(self._fds, self._header(), file)
        except OSError as error:
            self._keep_nothing(f"there can be no journal: {error}")
        self._fds = []

    def _header(self) -> Header:
        return Header(
            generation=self._kept.header.generation + 1 if self._kept else 1,
            node_id=self._origin.node_id,
            epoch=self._origin.epoch,
            grain=PAGE,
            huge_pages=self._origin.settings.huge_pages,
            regions=[shape_of(pool) for pool in self.regions.live()],
        )

    def restore(self, store: Store) -> RestoreReport | None:
        """Give the store the blocks from before, once; None when there are none. From then on, the journal
        counts that follows the store."""
        kept, self._kept = self._kept, None
        report = None
        if kept is not None:
            with _no_collection():
                report = store.restore(_restored(kept))
        if report is not None and kept is not None:
            log.info(
                "memory taken over where=%s regions=%d blocks=%d dropped=%d size=%s journal_torn=%s",
                self._keeper.where,
                len(self.regions.live()),
                report.blocks,
                report.dropped,
                format_size(report.size),
                kept.torn,
            )
        if self.journal is not None:
            self.journal.commit()
            self.journal.beat(self._clock.monotonic())
        return report

    def prefault(self, progress: Progress, stop: threading.Event) -> bool:
        """Put every page of every region in place; see `DramPool.prefault`."""
        done, total = 0, self.regions.size

        def tell(part: int, _: int) -> None:
            progress(done + part, total)

        for pool in self.regions.live():
            if not pool.prefault(tell, stop):
                return False
            done += pool.size
        return True

    # --- regions that come and go -----------------------------------------------------------------------

    def make_region(self, size: int) -> DramPool:
        """A new region, kept where that is possible; not in use yet. Raises `NotEnoughMemory`."""
        region, keeper = self._next_region, self._keeper
        self._next_region += 1
        if keeper.where:
            try:
                return self._pool(size, region, make=lambda *kind: keeper.make(f"region-{region}", *kind))
            except OSError as error:
                keeper.drop(f"region-{region}")
                log.warning("a region is not kept over a restart region=%d cause=%r", region, str(error))
        return self._pool(size, region)

    def use(self, pool: DramPool) -> None:
        """Blocks are about to be placed in a new region."""
        if self.journal is not None and pool.kept:
            self.journal.region_added(shape_of(pool))
        if self.pins is not None:
            self.pins.add(pool.region, pool.view)
        self.regions.add(pool)

    def give_back(self, pool: DramPool) -> None:
        """Nobody uses a region any more, and none of its bytes are wanted: the system gets its memory."""
        self.regions.remove(pool.region)
        if self.journal is not None and pool.kept:
            self.journal.region_gone(pool.region)
        self._keeper.drop(f"region-{pool.region}")
        if self.pins is not None:
            self.pins.remove(pool.region)
        pool.discard()
        pool.close()

    # --- the whole ------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of this life of the daemon."""
        return self._origin.epoch

    @property
    def followers(self) -> list[Follower]:
        """Who must hear of all changes of the store, from its beginning."""
        return [self.journal] if self.journal is not None else []

    @property
    def where(self) -> str:
        """What keeps the memory over a restart; empty: nothing."""
        return self._keeper.where if self.journal is not None else ""

    def check(self) -> None:
        """For the beat: raises `Unhealthy` when a client has cut off a region that could not be sealed."""
        for pool in self.regions.live():
            if (found := os.fstat(pool.fd).st_size) != pool.size:
                cause = f"region {pool.region} has {found} bytes, not {pool.size}: somebody has resized it"
                raise Unhealthy(what="the pool's memory", cause=cause)

    def close(self) -> None:
        """Unmap everything; what is kept stays where it is."""
        if self.journal is not None:
            self.journal.close()
        for pool in self.regions.live():
            pool.close()
        self._keeper.close()


def shape_of(pool: DramPool) -> RegionShape:
    """A region as the journal knows it."""
    return RegionShape(pool.region, pool.size, pool.huge_pages)


@contextmanager
def _no_collection() -> Iterator[None]:
    """For making very many objects that stay: the collector would look at all of them again and again, now
    and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def _restored(kept: Kept) -> Iterator[Restored]:
    for block in kept.blocks:
        yield Restored(
            namespace=block.namespace,
            key=block.key,
            parent=block.parent,
            meta=block.meta,
            region=block.region,
            offset=block.offset,
            size=block.size,
            checksum=block.checksum,
            hold=block.hold,
            expires_at_s=block.expires_at_s,
        )


def memory_readings(memory: Memory) -> list[Reading]:
    """Metrics of the regions and of the journal."""
    journal = memory.journal
    readings = [
        Reading("mooncaked_regions", "gauge", "Regions of the pool.", lambda: len(memory.regions.live())),
        Reading(
            "mooncaked_memory_kept",
            "gauge",
            "1: the pool outlives a restart of the daemon.",
            lambda: float(journal is not None and not journal.problem),
        ),
    ]
    if journal is not None:
        readings += [
            Reading("mooncaked_journal_bytes", "gauge", "Size of the journal.", lambda: journal.size),
            Reading(
                "mooncaked_journal_compactions",
                "counter",
                "Times that the journal was shortened.",
                lambda: journal.compactions,
            ),
        ]
    return readings
