"""What is common to all pools of memory, and what the store needs of one that this process can address."""

from __future__ import annotations

from typing import Protocol

from mooncaked.types import Tier


class Region(Protocol):
    """One region of memory that blocks lie in, of whatever tier. It belongs to whoever built it."""

    @property
    def region(self) -> int:
        """Number of the region, unique on its node."""

    @property
    def tier(self) -> Tier:
        """What the region is made of."""

    @property
    def size(self) -> int:
        """Bytes, a multiple of 4096."""

    def close(self) -> None:
        """Give the memory back, as soon as nobody uses it. May be called again."""


class Pool(Region, Protocol):
    """A region in host memory, which is read and written through a view; the store only reads these."""

    @property
    def view(self) -> memoryview:
        """The whole region, writable, one byte per element. Slices of it share the memory; whoever holds one
        after `close` keeps the memory mapped, but must expect to be the only one who does."""

    def close(self) -> None:
        """Give the memory back as soon as the last slice of `view` is gone. May be called again."""
