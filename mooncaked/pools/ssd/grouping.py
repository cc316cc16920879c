"""What fits into the next group. Pure."""

from __future__ import annotations

from mooncaked.pools.ssd.aligned import PAGE, pages_up
from mooncaked.pools.ssd.footer import footer_bound
from mooncaked.pools.ssd.layout import GROUP_BLOCKS_MAX, HEAD_BYTES, TABLE_BYTES_MAX, payload_bound, row_bound
from mooncaked.pools.ssd.model import SsdItem

REMOVALS_MAX = 8192  # in one group


class GroupRoom:
    """Room for one group in a segment that ends at `end` and whose table needs at most `rows_bound` so
    far."""

    def __init__(self, segment_bytes: int, end: int, rows_bound: int, group_bytes: int) -> None:
        self._room = segment_bytes - end
        self._rows_before = rows_bound
        self._group_bytes = group_bytes
        self.rows = 0  # bytes that the group's own rows need at most
        self.blocks = 0
        self.removals = 0
        self.payload = 0

    def take(self, item: SsdItem) -> bool:
        """Take the block into account; False when it does not fit. A group's first block may be longer than
        `group_bytes`."""
        rows = self.rows + row_bound(item.namespace, item.key, item.parent, item.meta)
        payload = self.payload + payload_bound(item.data.nbytes)
        if self.blocks and (payload > self._group_bytes or self.blocks >= GROUP_BLOCKS_MAX):
            return False
        if not self._fits(rows, payload):
            return False
        self.rows, self.payload, self.blocks = rows, payload, self.blocks + 1
        return True

    def take_removal(self, namespace: str, key: bytes) -> bool:
        """Take a removal into account; False when it does not fit."""
        rows = self.rows + row_bound(namespace, key, None, b"")
        if self.removals >= REMOVALS_MAX or not self._fits(rows, self.payload):
            return False
        self.rows, self.removals = rows, self.removals + 1
        return True

    def _fits(self, rows: int, payload: int) -> bool:
        if rows > TABLE_BYTES_MAX:
            return False
        group = 2 * pages_up(HEAD_BYTES + rows) + pages_up(payload) + PAGE
        return group + footer_bound(self._rows_before + rows) <= self._room


def bytes_needed(item: SsdItem) -> int:
    """Bytes that a segment needs to have left so that the block fits for certain."""
    rows = row_bound(item.namespace, item.key, item.parent, item.meta)
    return payload_bound(item.data.nbytes) + 3 * rows + 6 * PAGE
