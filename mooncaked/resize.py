"""The size of the pool while the node runs: regions come, and are emptied and go."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from mooncaked.clock import Clock
from mooncaked.config import REGIONS_MAX, DramConfig
from mooncaked.errors import InvalidRequest, MooncakeError, NotEnoughMemory, Refused
from mooncaked.pools.dram import DramPool
from mooncaked.pools.memory import available_memory, round_up
from mooncaked.pools.regions import ResizePlan, Shape, plan_resize
from mooncaked.store import Store
from mooncaked.units import format_size
from mooncaked.warm import Memory

log = logging.getLogger(__name__)

SIZE_MIN = 1 << 20
_EMPTYING_S = 0.05  # between looks at a region whose last blocks are being read


class RegionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One region of the pool."""

    region: int
    size_bytes: int
    used_bytes: int  # rounded up to pages
    state: str  # "taking" its memory, "serving", or "emptying": no new blocks come
    taken_bytes: int  # pages that are in place
    huge_pages: str
    numa_nodes: list[int]  # empty: as the kernel likes
    kept: bool  # over a restart


class ResizeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of size."""

    size_bytes: int  # what was asked for, rounded up to pages
    state: str  # "running", "done" or "failed"
    problem: str = ""  # why it failed


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /v1/pool."""

    schema: str = "mooncake.pool/1"
    size_bytes: int  # of the regions in use
    configured_bytes: int  # dram.size: what the next start begins with
    kept_by: str  # "systemd", "shm", or empty: the memory ends with the daemon
    cold_because: str  # why the last start did not use what was kept; empty: it did, or there was nothing
    regions: list[RegionStatus]
    resize: ResizeStatus | None


class ResizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of POST /v1/pool/resize: what is going to happen."""

    schema: str = "mooncake.pool-resize/1"
    from_bytes: int
    to_bytes: int
    adds_bytes: list[int]  # sizes of the regions that come
    retires: list[int]  # numbers of the regions that go, with their blocks
    note: str


class Resizer:
    """Changes the pool's size, one change at a time. `run` it in a task; the work is done in a thread."""

    def __init__(
        self, memory: Memory, store: Store, settings: DramConfig, clock: Clock, changed: Callable[[], None]
    ) -> None:
        """`changed` is called on the event loop after each change of the pool's size."""
        self._memory = memory
        self._store = store
        self._settings = settings
        self._clock = clock
        self._changed = changed
        self._wanted = asyncio.Event()
        self._plan: ResizePlan | None = None
        self._last: ResizeStatus | None = None
        self._taking: DramPool | None = None
        self._emptying: set[int] = set()
        self._stop = threading.Event()

    # --- what there is ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the regions in use."""
        return sum(shape.size for shape in self._shapes())

    def status(self) -> PoolStatus:
        """The regions as they are now."""
        pools = [*self._memory.regions.live(), *filter(None, [self._taking])]
        return PoolStatus(
            size_bytes=self.size,
            configured_bytes=self._settings.size,
            kept_by=self._memory.where,
            cold_because=self._memory.cold_because,
            regions=[self._region(pool) for pool in pools],
            resize=self._last,
        )

    def _region(self, pool: DramPool) -> RegionStatus:
        taking = pool is self._taking
        state = "taking" if taking or pool.prefaulted_bytes < pool.size else "serving"
        return RegionStatus(
            region=pool.region,
            size_bytes=pool.size,
            used_bytes=0 if taking else self._store.region_bytes(pool.region),
            state="emptying" if pool.region in self._emptying else state,
            taken_bytes=pool.prefaulted_bytes,
            huge_pages=pool.huge_pages,
            numa_nodes=list(pool.numa_nodes),
            kept=pool.kept and bool(self._memory.where),
        )

    def _shapes(self) -> list[Shape]:
        pools = self._memory.regions.live()
        return [Shape(pool.region, pool.size) for pool in pools if pool.region not in self._emptying]

    # --- changing it --------------------------------------------------------------------------------------

    def request(self, size: int) -> ResizeAnswer:
        """Begin to change the pool to `size` bytes (rounded up to pages), in the background.

        Raises `InvalidRequest` for a size that cannot be, `Refused` while another change goes on,
        `NotEnoughMemory` where the new regions do not fit beside those that there are. On the event loop."""
        if size < SIZE_MIN:
            raise InvalidRequest(problem=f"a pool has at least {format_size(SIZE_MIN)}, not {size} bytes")
        if self._last is not None and self._last.state == "running":
            problem = f"the pool is just being changed to {format_size(self._last.size_bytes)}"
            raise Refused(problem=problem, remedy="Wait for that to end: GET /v1/pool shows it.")
        kind, now = self._settings.huge_pages, self.size
        wanted = round_up(size, kind)
        _check_memory(wanted - now, wanted)
        plan = plan_resize(self._shapes(), wanted, self._settings.region_size, kind)
        _check_memory(sum(plan.add), wanted)
        if (count := len(self._shapes()) + len(plan.add)) > REGIONS_MAX:
            problem = f"the pool would have {count} regions, and {REGIONS_MAX} is the limit"
            raise Refused(problem=problem, remedy="Raise dram.region_size and start again.")
        log.info(
            "pool is resized from=%s to=%s add=%s retire=%s",
            format_size(now),
            format_size(wanted),
            plan.add,
            plan.retire,
        )
        self._plan, self._last = plan, ResizeStatus(size_bytes=wanted, state="running")
        self._wanted.set()
        note = (
            f"Lasts until the daemon ends; to make it last, set dram.size = {format_size(wanted)!r} as well."
        )
        return ResizeAnswer(
            from_bytes=now, to_bytes=wanted, adds_bytes=plan.add, retires=plan.retire, note=note
        )

    async def run(self) -> None:
        """Carry out what is asked for, until cancelled; a region that is half taken is given back then."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                await self._carry_out()
        finally:
            self._stop.set()

    async def _carry_out(self) -> None:
        plan, last = self._plan, self._last
        if plan is None or last is None:
            return
        work = asyncio.get_running_loop().run_in_executor(None, self._execute, plan)
        try:
            await asyncio.shield(work)
            self._last = msgspec.structs.replace(last, state="done")
            log.info("pool was resized size=%s", format_size(self.size))
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait([work])  # no thread may outlive the memory
            raise
        except MooncakeError as error:
            self._last = msgspec.structs.replace(last, state="failed", problem=str(error))
            log.error("pool could not be resized cause=%s", error)
        self._changed()

    def _execute(self, plan: ResizePlan) -> None:
        """In a thread; as far as it came when `stop` is set."""
        for size in plan.add:
            if not self._add(size):
                return
        for region in plan.retire:
            self._store.retire_region(region)
            self._emptying.add(region)
        for region in plan.retire:
            if not self._empty(region):
                return

    def _add(self, size: int) -> bool:
        with self._taken(size) as pool:
            if not pool.prefault(stop=self._stop):
                return False
            self._memory.use(pool)
            self._store.add_region(pool)
            return True

    @contextmanager
    def _taken(self, size: int) -> Iterator[DramPool]:
        """A new region, given back where it does not come to be used."""
        pool = self._taking = self._memory.make_region(size)
        try:
            yield pool
        finally:
            self._taking = None
            if pool not in self._memory.regions.live():
                self._memory.give_back(pool)

    def _empty(self, region: int) -> bool:
        pool = next(pool for pool in self._memory.regions.live() if pool.region == region)
        while not self._store.drop_region(region):
            if not self._store.evacuate(region) and self._stop.wait(_EMPTYING_S):
                return False
        self._memory.give_back(pool)
        self._emptying.remove(region)
        return True


def _check_memory(needed: int, wanted: int) -> None:
    """Raise `NotEnoughMemory` unless there are `needed` bytes for a pool of `wanted`."""
    if needed > (available := available_memory()):
        cause = f"{needed} bytes are needed beside the pool, {available} are available"
        raise NotEnoughMemory(key="the size", size=wanted, cause=cause)
