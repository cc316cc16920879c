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
    blocks: int  # readable
    pinned: int  # blocks being read
    filling: int  # blocks being written
    hidden: int  # blocks that were removed while being read, and go when their last reader ends
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
    refused_full: int
    refused_too_large: int


class Counters:
    """The counters of `StoreStats`, as they grow."""

    def __init__(self) -> None:
        self.hits = self.misses = self.stored = self.stored_bytes = self.aborted = self.removed = 0
        self.evicted = self.evicted_bytes = self.refused_full = self.refused_too_large = 0
        self.evicted_idle_s = 0.0
