"""A node's tiers together: the pool in memory, and the disks below it once they are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from mooncaked.clock import Clock, Deadline
from mooncaked.pools.ssd import DeviceStats, LostReason, SsdEntry
from mooncaked.store import Store
from mooncaked.tiers.admission import REUSED, Admission
from mooncaked.tiers.below import Disks, SsdBelow
from mooncaked.tiers.demote import Demoted, Demoter
from mooncaked.tiers.promote import Ask, Promoted, Promoter
from mooncaked.tiers.raising import Raiser

log = logging.getLogger(__name__)

AHEAD_SHARE_MAX = 1 / 4  # of the pool, brought up because of one question for a prefix
AHEAD_UNKNOWN_KEYS = 1024  # likewise, where nothing is known of their size


class TiersStats(msgspec.Struct, frozen=True, kw_only=True):
    """What has moved since the start. `demoted` is None without disks."""

    demoted: Demoted | None
    promoted: Promoted
    missed_blocks: int  # that were worth a place on a disk, and went before they could be written
    missed_bytes: int


class Tiers:
    """Without disks, it evicts, and has restored blocks compared with their checksums when they are read."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        verify: Callable[[str, Sequence[bytes]], object],
        *,
        admission: str = REUSED,
        bytes_per_s: float = 0.0,
        disks: Disks | None = None,
    ) -> None:
        """`verify` compares restored blocks with their checksums, in the calling thread. `bytes_per_s` is
        what may be written to disks; 0: no limit. `disks` are those that `attach` will put below."""
        self._store = store
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._disks = disks
        self._admission = Admission(admission)
        self._raiser = Raiser(store, verify)
        self._promoter = Promoter(self._raiser, clock)
        self._below: SsdBelow | None = None
        self._demoter: Demoter | None = None

    # --- disks ----------------------------------------------------------------------------------------

    def devices(self) -> list[DeviceStats]:
        """The figures of each disk; those that are not opened yet are closed."""
        return [] if self._disks is None else self._disks.stats()

    def attach(self, disks: Disks) -> None:
        """Put disks below the pool, with what they have; they are to tell `lost` of what they lose."""
        self._disks = disks
        self._below = below = SsdBelow(self._store, disks, self._admission, self.expect)
        self._raiser.disks = disks
        self._store.attach_lower(below)
        self._demoter = Demoter(self._store, disks, below.admits, self._clock, bytes_per_s=self._bytes_per_s)
        self._demoter.start()

    def lost(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        """The disks have lost blocks."""
        if self._below is not None:
            self._below.lost(entries, reason)

    def set_rate(self, bytes_per_s: float) -> None:
        """Change what may be written to disks in a second; 0: no limit."""
        self._bytes_per_s = bytes_per_s
        if self._demoter is not None:
            self._demoter.set_rate(bytes_per_s)

    def evict(self) -> None:
        """Keep the pool below its high watermark; to be called about ten times a second. With disks, that
        goes on by itself."""
        if self._demoter is None:
            self._store.evict_to_low()

    # --- bringing up ----------------------------------------------------------------------------------

    def ask(self, namespace: str, keys: Sequence[bytes], deadline: Deadline) -> Ask:
        """Have those of `keys` brought up that can be, by `deadline`; waits for nothing."""
        below = self._store.below(namespace, keys)
        return self._promoter.ask(
            namespace, [key for key, low in zip(keys, below, strict=True) if low], deadline
        )

    def bring_up(self, namespace: str, keys: Sequence[bytes], deadline: Deadline) -> list[bytes]:
        """Bring up those of `keys` that can be, and wait for it, in the calling thread; which can be pinned
        now of those that could not be before."""
        below = self._store.below(namespace, keys)
        if not any(below):
            return []
        return self._promoter.bring_up(
            namespace, [key for key, low in zip(keys, below, strict=True) if low], deadline
        )

    def expect(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """`keys`, of a chain root first, will probably be read soon: bring them up when there is time. Which
        of them are in memory, or noted. Waits for nothing."""
        exists, below = self._store.exists(namespace, keys), self._store.below(namespace, keys)
        wanted = [key for key, low in zip(keys, below, strict=True) if low][: self._ahead_keys_max()]
        noted = set(wanted[: self._promoter.expect(namespace, wanted)])
        return [key in noted if low else here for key, here, low in zip(keys, exists, below, strict=True)]

    def _ahead_keys_max(self) -> int:
        """How many blocks of usual size are the share of the pool that may be brought up ahead of need."""
        devices = self.devices()
        blocks, size = sum(d.blocks for d in devices), sum(d.live_bytes for d in devices)
        if not size:
            return AHEAD_UNKNOWN_KEYS
        return int(AHEAD_SHARE_MAX * self._store.stats().capacity_bytes * blocks / size)

    # --- its life -------------------------------------------------------------------------------------

    def stats(self) -> TiersStats:
        """The figures now."""
        below = self._below
        return TiersStats(
            demoted=None if self._demoter is None else self._demoter.stats(),
            promoted=self._promoter.stats(),
            missed_blocks=0 if below is None else below.missed_blocks,
            missed_bytes=0 if below is None else below.missed_bytes,
        )

    def drain(self, deadline: Deadline) -> None:
        """Write what is on its way to the disks, and nothing more."""
        if self._demoter is not None and not self._demoter.drain(deadline):
            left = self._demoter.stats()
            log.warning("drain cut short unwritten_blocks=%d", left.queued_blocks)

    def close(self) -> None:
        """End; whoever waits gets a miss."""
        self._promoter.close()
        if self._demoter is not None:
            self._demoter.close()
