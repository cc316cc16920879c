"""What the store needs of a pool of memory, whichever tier it is."""

from __future__ import annotations

from typing import Protocol

from mooncaked.types import Tier


class Pool(Protocol):
    """One region of memory that blocks lie in. It belongs to whoever built it; the store only reads these."""

    @property
    def region(self) -> int:
        """Number of the region, unique on its node."""

    @property
    def tier(self) -> Tier:
        """What the region is made of."""

    @property
    def size(self) -> int:
        """Bytes, a multiple of 4096."""

    @property
    def view(self) -> memoryview:
        """The whole region, writable, one byte per element. Slices of it share the memory; whoever holds one
        after `close` keeps the memory mapped, but must expect to be the only one who does."""

    def close(self) -> None:
        """Give the memory back as soon as the last slice of `view` is gone. May be called again."""
