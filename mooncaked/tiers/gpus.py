"""The GPU memory of a node: pools on its devices, and the tier of copies in them. There is none of it before
`open`, which runs when the pages of the host memory are in place, nor without devices in the configuration.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from importlib.util import find_spec

import msgspec

from mooncaked.api.protocol import GPU_REGION, GpuRegionInfo
from mooncaked.config_keys import GpuConfig
from mooncaked.errors import MissingDependency
from mooncaked.gpu import GpuTier, GpuTierStats
from mooncaked.pinning import HostPins
from mooncaked.pools.gpu import GpuPool
from mooncaked.store import Store
from mooncaked.tiers.gpu import GpuLink
from mooncaked.units import format_size
from mooncaked.warm import Memory

log = logging.getLogger(__name__)


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The pool on one device, for /v1/status."""

    device: str
    capacity_bytes: int
    state: str  # "opening" | "active" | "failed"
    reason: str = ""


class GpusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """All pools, and what lies in them."""

    pools: list[GpuStatus] = []
    used_bytes: int = 0
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    page_locked_bytes: int = 0  # of host memory
    page_lock_problem: str = ""  # why that is not all of it


class Gpus:
    """The GPUs of one node. `open` is called in a thread, once; everything else in any thread."""

    def __init__(self, config: GpuConfig, store: Store, memory: Memory) -> None:
        """Raises `MissingDependency` when there are devices and no torch."""
        self._config = config
        self._store = store
        self._memory = memory
        self._pools: list[GpuPool] = []
        self._link: GpuLink | None = None
        self.tier: GpuTier | None = None  # set by `open`
        self.regions: list[GpuRegionInfo] = []  # for clients
        if config.devices and find_spec("torch") is None:
            raise MissingDependency(feature="A GPU pool", package="torch", install="mooncaked[gpu]")

    @property
    def capacity_bytes(self) -> int:
        """Of all pools, open or not."""
        return self._config.size * len(self._config.devices)

    def open(self, progress: Callable[[int, int], None], stop: threading.Event) -> bool:
        """Take the memory, lock the host's for it, and begin; False when `stop` was set before the end.

        `progress` hears of each step of locking: bytes done and in all of a region. Raises `GpuUnavailable`,
        `NotEnoughGpuMemory` or `GpuFailed`."""
        for number, device in enumerate(self._config.devices):
            if stop.is_set():
                return False
            progress(0, self._config.size)
            pins = self._pools[0].pins if self._pools else None
            pool = GpuPool(device, self._config.size, GPU_REGION + number, pins=pins)
            self._pools.append(pool)
            self.regions.append(GpuRegionInfo(region=pool.region, handle=pool.export()))
            log.info("GPU memory taken device=%s size=%s", device, format_size(self._config.size))
        if not self._pools:
            return True
        if self._config.page_lock and not self._lock_memory(self._pools[0].pins, progress, stop):
            return False
        self.tier = GpuTier(
            self._pools, self._store.log_upper, in_flight_bytes_max=self._config.in_flight_max
        )
        self._link = GpuLink(self._store, self.tier, self._config.promote_uses)
        self.tier.start()
        return True

    def _lock_memory(
        self, pins: HostPins, progress: Callable[[int, int], None], stop: threading.Event
    ) -> bool:
        """Page-lock the pool, what comes later as well; what cannot be locked takes a detour."""
        for pool in self._memory.regions.live():
            pins.add(pool.region, pool.view, progress, stop)
        self._memory.pins = pins
        return not stop.is_set()

    def promote(self) -> None:
        """Bring up what was read often since the last call; about ten times a second."""
        if self._link is not None:
            self._link.promote()

    def stats(self) -> GpuTierStats:
        """The tier; empty before `open`."""
        return _NOTHING if self.tier is None else self.tier.stats()

    @property
    def pinned(self) -> int:
        """Blocks that are being read there."""
        return self.stats().pinned_blocks

    def check(self) -> None:
        """For the beat: raises `Unhealthy` when the thread that copies has ended."""
        if self.tier is not None:
            self.tier.check_alive()

    def status(self) -> GpusStatus:
        """For people and programs."""
        stats, pins = self.stats(), self._pools[0].pins if self._pools else None
        state = "opening" if self.tier is None else "failed" if stats.failure else "active"
        return GpusStatus(
            pools=[
                GpuStatus(device=device, capacity_bytes=self._config.size, state=state, reason=stats.failure)
                for device in self._config.devices
            ],
            used_bytes=stats.used_bytes,
            blocks=stats.blocks,
            hits=stats.hits,
            misses=stats.misses,
            page_locked_bytes=pins.locked_bytes if pins else 0,
            page_lock_problem=pins.failure if pins else "",
        )

    def close(self) -> None:
        """End the copying and give all memory back; before the host memory goes."""
        if self.tier is not None:
            self.tier.close()
        if self._link is not None:
            self._link.close()
        self._memory.pins = None
        for pool in reversed(self._pools):  # the first has the pins of all
            pool.close()


_NOTHING = GpuTierStats(
    capacity_bytes=0,
    used_bytes=0,
    blocks=0,
    pinned_blocks=0,
    queued_blocks=0,
    in_flight_bytes=0,
    hits=0,
    misses=0,
    promoted=0,
    promoted_bytes=0,
    evicted=0,
    refused={},
    failure="",
)
