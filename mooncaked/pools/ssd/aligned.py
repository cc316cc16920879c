"""Memory that O_DIRECT takes: pages of our own beside the caller's, where his are aligned."""

from __future__ import annotations

import mmap

import numpy as np

PAGE = 4096  # alignment of memory, offsets and lengths; no disk of today wants more


def pages_up(size: int) -> int:
    """`size` bytes in whole pages."""
    return -(-size // PAGE) * PAGE


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can move whole pages from or to `view`. An empty one cannot be asked."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE == 0


def aligned_buffer(size: int) -> memoryview:
    """New zeros, page-aligned, in whole pages; given back with the last reference."""
    return memoryview(mmap.mmap(-1, max(PAGE, pages_up(size)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Staging:
    """Aligned memory that is handed out piece by piece and taken back as a whole. For one user at a time; the
    memory grows to what was needed at once, up to `keep` bytes between uses."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._buffer = aligned_buffer(PAGE)
        self._used = 0

    def reset(self) -> None:
        """Take everything back."""
        self._used = 0
        if len(self._buffer) > self._keep:
            self._buffer = aligned_buffer(PAGE)

    def take(self, size: int) -> memoryview:
        """`size` bytes in whole pages, of any content."""
        need = pages_up(size)
        if self._used + need > len(self._buffer):
            self._buffer = aligned_buffer(max(need, 2 * len(self._buffer)))  # earlier pieces keep the old one
            self._used = 0
        piece = self._buffer[self._used : self._used + need]
        self._used += need
        return piece
