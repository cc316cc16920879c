"""A condition that costs next to nothing to signal while nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiters:
    """Those who wait for something to change under `lock`."""

    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def wake(self) -> None:
        """Let all look again. Under the lock."""
        if self._count:
            self._condition.notify_all()

    def wait_for(self, holds: Callable[[], object], timeout_s: float) -> bool:
        """Wait until `holds()` is true, for `timeout_s` at most; whether it is. Under the lock, which others
        can take meanwhile."""
        self._count += 1
        try:
            return bool(self._condition.wait_for(holds, timeout_s))
        finally:
            self._count -= 1
