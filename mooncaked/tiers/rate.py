"""How fast something may be done. Pure."""

from __future__ import annotations

BURST_S = 0.25  # what may be made up for after a pause


class Rate:
    """A bucket of tokens, one per byte. Taking may leave it in debt, which is paid back before the next."""

    def __init__(self, per_s: float) -> None:
        """`per_s` bytes in a second; 0: no limit."""
        self._per_s = per_s
        self._tokens = per_s * BURST_S
        self._seen_s: float | None = None

    def set(self, per_s: float) -> None:
        """Change the limit."""
        self._per_s = per_s
        self._tokens = min(self._tokens, per_s * BURST_S)

    def free(self, now_s: float) -> bool:
        """Whether something may be taken at `now_s` of a monotonic clock."""
        if not self._per_s:
            return True
        if self._seen_s is not None:
            more = max(0.0, now_s - self._seen_s) * self._per_s
            self._tokens = min(self._tokens + more, self._per_s * BURST_S)
        self._seen_s = now_s
        return self._tokens > 0

    def take(self, size: int) -> None:
        """`size` bytes are being done."""
        if self._per_s:
            self._tokens -= size
