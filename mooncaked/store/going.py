"""Going: removal, eviction ahead of need, expiry, and regions that come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop

from mooncaked.block import BlockState, Hold
from mooncaked.errors import InvalidRequest
from mooncaked.eviction import Watermarks
from mooncaked.pools.base import Pool
from mooncaked.store.books import Books

SLICE = 64  # blocks that upkeep takes per hold of the lock


class Going(Books):
    """How blocks leave."""

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Make blocks unreadable at once, in every tier, and free their memory; False: it was not here, or
        it is being read and its memory goes with its last reader. A block that is still being written is not
        here yet."""
        with self._lock:
            below = self._below(namespace, keys)
            freed = [self._remove_one(namespace, key) for key in keys]
            self._end_change()
            lower = self._lower
        if lower is not None:
            lower.remove(namespace, keys)
        return [free or low for free, low in zip(freed, below, strict=True)]

    def hold(self, namespace: str, keys: Sequence[bytes], hold: Hold, limit: float) -> list[bool]:
        """Change how firmly readable blocks stay; False: it is not here, or held hard would be more than
        `limit` of the pool."""
        done = []
        with self._lock:
            visible = self._table.visible(namespace)
            for key in keys:
                block = visible.get(key)
                more = 0 if block is None or block.hold is Hold.HARD else block.size
                fits = hold is not Hold.HARD or self._room.hard_bytes + more <= limit * self._room.capacity
                if block is not None and fits:
                    self._room.hold(block, hold)
                done.append(block is not None and fits)
            self._end_change()
        return done

    def evict_to_low(self, stop: Callable[[], bool] = lambda: False) -> int:
        """If the pool is over its high watermark, evict down to the low one, as far as blocks are evictable,
        in short holds of the lock; the number of blocks. `stop` is asked between them."""
        with self._lock:
            goal = self._goal()
            more = goal < self._room.used_bytes
        evicted = 0
        while more and not stop():
            with self._lock:
                count, more = self._room.shrink(goal, SLICE)
                self._end_change()
            evicted += count
        return evicted

    def look_after(self) -> None:
        """Upkeep that is due now and then, about ten times a second: what was read directly, what expired."""
        with self._lock:
            self._note_uses()
            now, expiries = self._clock.monotonic(), self._expiries
            for _ in range(SLICE):
                if not expiries or expiries[0][0] > now:
                    break
                _, _, block = heappop(expiries)
                if block.state is BlockState.COMPLETE:
                    self._counters.expired += 1
                    self._leave(block)
            self._end_change()

    def set_watermarks(self, high: float, low: float) -> None:
        """Change the watermarks, parts of the pool; raises `InvalidRequest` unless 0 < low <= high <= 1."""
        watermarks = Watermarks(high, low)
        with self._lock:
            self._watermarks = watermarks

    # --- regions --------------------------------------------------------------------------------------

    def add_region(self, pool: Pool) -> None:
        """Take a further region into use, whose pages are in place."""
        with self._lock:
            self._room.add_region(pool.region, pool.size)
            self._views[pool.region] = pool.view

    def retire_region(self, region: int) -> None:
        """Place nothing in a region any more; raises `InvalidRequest` for one that is not in use, or the only
        one. To be followed by `evacuate`, until it returns 0, and `drop_region`."""
        with self._lock:
            if region not in self._room.regions or len(self._room.regions) == 1:
                raise InvalidRequest(problem=f"region {region} is not in use, or the only one")
            self._room.retire_region(region)

    def evacuate(self, region: int) -> int:
        """Evict some of a retired region's blocks; how many. 0: what is left is being read or written."""
        with self._lock:
            count = self._room.evacuate(region, SLICE)
            self._end_change()
            return count

    def region_bytes(self, region: int) -> int:
        """Bytes that are in use in a region; 0 in one that was dropped."""
        with self._lock:
            return self._room.region_bytes(region) if region in self._views else 0

    def drop_region(self, region: int) -> bool:
        """Forget a retired region; False while something in it is in use."""
        with self._lock:
            if self._readers is not None:
                self._room.settle(self._readers.reading)
            if self._room.region_bytes(region):
                return False
            self._room.drop_region(region)
            del self._views[region]
            return True

    # --- internals; all under the lock ----------------------------------------------------------------

    def _goal(self) -> int:
        """Bytes down to which eviction is to go; what is used, when it need not."""
        self._note_uses()
        used = self._room.used_bytes
        return used - self._watermarks.excess(used, self._room.capacity)

    def _remove_one(self, namespace: str, key: bytes) -> bool:
        block = self._table.visible(namespace).get(key)
        if block is None:
            return False
        self._counters.removed += 1
        if block in self._leaving:
            self._forsaken.add((namespace, key))
        return self._leave(block)
