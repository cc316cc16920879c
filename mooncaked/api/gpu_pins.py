"""What one connection reads in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncaked.api.protocol import PinnedBlock
from mooncaked.errors import InvalidRequest
from mooncaked.tiers.gpus import Gpus


class GpuPins:
    """Pins of one connection; their numbers are below 0, so that they are told from those of the store. A
    block has a copy only as long as the store has it, so whoever looks for one pins it there first."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        self._owner: int | None = None

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> list[PinnedBlock | None]:
        """Pin the copies that there are; raises `InvalidRequest` where that would be too many."""
        tier = self._gpus.tier
        if tier is None:
            return [None] * len(keys)
        if self._owner is None:
            self._owner = tier.new_owner()
        found = tier.lookup(self._owner, namespace, keys)
        return [block and msgspec.structs.replace(block, pin=-block.pin) for block in found]

    def unpin(self, pins: Sequence[int]) -> None:
        """End some; raises `InvalidRequest` when one is not of this connection."""
        tier = self._gpus.tier
        if tier is None or self._owner is None:
            raise InvalidRequest(problem=f"pin {pins[0]} is not one of this connection")
        tier.unpin(self._owner, [-pin for pin in pins])

    def end(self) -> None:
        """End all."""
        if self._gpus.tier is not None and self._owner is not None:
            self._gpus.tier.end_owner(self._owner)
