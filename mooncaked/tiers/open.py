"""A node's disks from its configuration, and their opening in threads while the node answers already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from mooncaked.clock import Clock
from mooncaked.config import Config, ssd_devices
from mooncaked.pools.ssd import SsdDevice, SsdPool
from mooncaked.store import Store
from mooncaked.tiers.tiers import Tiers

log = logging.getLogger(__name__)


def make_disks(config: Config, node_id: str, clock: Clock) -> SsdPool | None:
    """The disks that are configured, not opened yet; None without any. Raises `InvalidRequest` for a size
    that cannot be."""
    devices = [
        SsdDevice(
            directory,
            size,
            node_id=node_id,
            clock=clock,
            segment_bytes=config.ssd.segment_size,
            number=number,
        )
        for number, (directory, size) in enumerate(ssd_devices(config).items())
    ]
    return SsdPool(devices) if devices else None


class Opening:
    """A node's tiers from its configuration, and how far its disks have been read after the start."""

    def __init__(
        self,
        config: Config,
        node_id: str,
        store: Store,
        clock: Clock,
        verify: Callable[[str, Sequence[bytes]], object],
    ) -> None:
        """See `Tiers` for `verify`. Raises as `make_disks`."""
        self._disks = make_disks(config, node_id, clock)
        self.tiers = Tiers(
            store,
            clock,
            verify,
            admission=config.ssd.admission,
            bytes_per_s=config.ssd.write_bandwidth,
            disks=self._disks,
        )
        self._segments_done = 0
        self._segments = 0
        self._done = self._disks is None

    def progress(self) -> str:
        """A part of a sentence on why the node is not ready; empty when it is no reason."""
        return (
            "" if self._done else f"{self._segments_done} of {self._segments} segments on disks are indexed"
        )

    async def run(self) -> None:
        """Open the disks and put them below the pool. One that cannot be used is left out, and says why."""
        if self._disks is None:
            return
        await asyncio.to_thread(self._disks.open, lost=self.tiers.lost, progress=self._note)
        await asyncio.to_thread(self.tiers.attach, self._disks)
        self._done = True

    def _note(self, done: int, total: int) -> None:
        """Called on the threads that open."""
        if total and 10 * done // total > 10 * self._segments_done // total:
            log.info("disks are being read segments=%d of=%d", done, total)
        self._segments_done, self._segments = done, total

    def close(self) -> None:
        """End all movement, and close the disks."""
        self.tiers.close()
        if self._disks is not None:
            self._disks.close()
