"""Between the store and the GPU tier above it. GPU memory has copies: a block is there only as long as it can
be read from the pool too, and the store has its copy forgotten in the moment in which it no longer can.

    tier = GpuTier(pools, store.log_upper)
    link = GpuLink(store, tier, uses_min)
    link.promote()  # now and then

To be closed in the reverse order, the tier before the link.
"""

from __future__ import annotations

from functools import partial

from mooncaked.gpu import GpuTier, Source
from mooncaked.store import Store

BATCH_BLOCKS = 256  # looked at by one call of `promote`


class GpuLink:
    """What the node does with store and tier together. Any thread may call; never under the store's lock."""

    def __init__(self, store: Store, tier: GpuTier, uses_min: int) -> None:
        """Blocks go up when they were read `uses_min` times."""
        self._store = store
        self._tier = tier
        self._owner = store.new_owner()
        store.attach_upper(tier, uses_min)

    def promote(self) -> int:
        """Bring blocks that were read often enough, and again since the last call, into GPU memory, in the
        background; how many were queued. They are pinned meanwhile."""
        mark = (
            self._tier.mark()
        )  # before the bytes are looked up: what is forgotten after it does not come in
        hot = self._store.take_hot(self._owner, BATCH_BLOCKS)
        if not hot:
            return 0
        sources = [
            Source(
                namespace=info.namespace,
                key=info.key,
                parent=info.parent,
                view=self._store.view(info.region, info.offset, info.size),
                checksum=info.checksum,
                meta=info.meta,
                uses=info.uses,
            )
            for _, info in hot
        ]
        pins = [pin for pin, _ in hot]
        return self._tier.promote(mark, sources, partial(self._store.unpin, self._owner, pins))

    def close(self) -> None:
        """End what it holds of the store, when the tier is closed."""
        self._store.drop_owner(self._owner)
