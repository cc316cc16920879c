"""What a store counts, and how each number is defined."""

from __future__ import annotations

import msgspec


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, and counters since the start.

    A hit or a miss is one key in one `pin` call with `count` set, by whether the block was readable here at
    that moment. Probes (`exists`, `prefix_match`, `block_info`) count nowhere, and whoever pins again after a
    fetch of what was missing passes `count=False`, so each key that a reader asks for counts once."""

    capacity_bytes: int
    used_bytes: int  # of the pool, rounded up to pages
    largest_free_bytes: int  # the largest value that fits without eviction
    pinned_bytes: int
    filling_bytes: int
    reserved_bytes: int  # room that writers have taken ahead of time
    blocks: int  # readable
    pinned: int  # blocks being read
    filling: int  # blocks being written
    hidden: int  # blocks that were removed while being read, and go when their last reader ends
    unverified: int  # readable blocks from before a restart that were not compared with their checksum yet
    unchecked: int  # readable blocks whose checksum is still to be worked out
    owners: int
    sequence: int
    hits: int
    misses: int
    stored: int
    stored_bytes: int
    aborted: int
    removed: int
    evicted: int
    evicted_bytes: int
    evicted_idle_s: float  # sum over evicted blocks of the time since their last use
    evicted_unsaved: int  # of those evicted, where there is a tier below: it had no copy
    expired: int  # their time to live was over
    promoted: int  # copied up from the tier below
    restored: int  # taken over from before the restart
    damaged: int  # did not agree with their checksum, and went
    refused_full: int
    refused_too_large: int


class NamespaceStats(msgspec.Struct, frozen=True):
    """What one namespace has in the pool."""

    namespace: str
    blocks: int  # readable
    size_bytes: int  # of their values
    quota_bytes: int | None  # None: no limit of its own


class Counters:
    """The counters of `StoreStats`, as they grow."""

    def __init__(self) -> None:
        self.hits = self.misses = self.stored = self.stored_bytes = self.aborted = self.removed = 0
        self.evicted = self.evicted_bytes = self.refused_full = self.refused_too_large = 0
        self.evicted_unsaved = self.expired = self.promoted = self.restored = self.damaged = 0
        self.evicted_idle_s = 0.0
