"""A pool on the Python heap: passes the same contract tests as the real one, without any system call."""

from __future__ import annotations

from mooncaked.types import Tier


class HeapPool:
    """`size` bytes, rounded up to pages of 4 KiB."""

    tier = Tier.DRAM

    def __init__(self, size: int, region: int = 0) -> None:
        self.region = region
        self.size = -(-size // 4096) * 4096
        self.view = memoryview(bytearray(self.size))

    def close(self) -> None:
        self.view.release()
