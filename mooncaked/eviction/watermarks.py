"""When the background eviction starts and stops."""

from __future__ import annotations

from mooncaked.errors import InvalidRequest


class Watermarks:
    """How full, as parts of the pool, it gets before the background eviction starts, and where that stops."""

    def __init__(self, high: float, low: float) -> None:
        if not 0.0 < low <= high <= 1.0:
            raise InvalidRequest(problem=f"watermarks need 0 < low <= high <= 1, not low={low} high={high}")
        self.high = high
        self.low = low

    def excess(self, used: int, capacity: int) -> int:
        """Bytes to evict so that `used` of `capacity` bytes falls to the low mark; 0 up to the high mark."""
        if used <= self.high * capacity:
            return 0
        return max(0, used - int(self.low * capacity))
