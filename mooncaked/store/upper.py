"""The tier above: copies of blocks that are read often."""

from __future__ import annotations

from collections.abc import Sequence

from mooncaked.block import Block, BlockState
from mooncaked.store.books import BlockInfo, Books, UpperTier
from mooncaked.types import BlockEvent


class Upper(Books):
    """What the tier above is told and tells."""

    def attach_upper(self, upper: UpperTier, uses_min: int) -> None:
        """From now on, `upper` may have copies of readable blocks; those that were read `uses_min` times are
        offered by `take_hot`. Once, and before it has any."""
        with self._lock:
            self._upper, self._upper_uses = upper, uses_min

    def take_hot(self, owner: int, count_max: int) -> list[tuple[int, BlockInfo]]:
        """Pin blocks that were read often enough, and again since they were offered last, and that are not
        above yet: pin and block, first used first, of `count_max` that are looked at. That is no use of
        them."""
        with self._lock:
            if self._upper is None or not self._hot:
                return []
            self._table.check_owner(owner)
            blocks: list[Block] = []
            for _ in range(min(count_max, len(self._hot))):
                block = next(iter(self._hot))
                del self._hot[block]
                if block.state is BlockState.COMPLETE and not self._is_above(block.namespace, block.key):
                    blocks.append(block)
            pins = self._table.pin(owner, blocks)
            return [(pin, self._info(block)) for pin, block in zip(pins, blocks, strict=True)]

    def log_upper(self, events: Sequence[BlockEvent]) -> None:
        """Blocks came into the tier above, or went."""
        with self._lock:
            for event in events:
                self._log.append(event)
            self._logged.wake()

    def _is_above(self, namespace: str, key: bytes) -> bool:
        return self._upper is not None and self._upper.contains(namespace, (key,))[0]
