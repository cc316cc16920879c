"""Receiving the payload of a fetch: straight into the memory of its blocks, checked there."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from mooncaked.api.frames import FrameSocket
from mooncaked.api.protocol import FetchedBlock
from mooncaked.clock import Deadline
from mooncaked.errors import MooncakeError, ProtocolError
from mooncaked.transports.base import Outcome

_BATCH_BYTES = 1 << 20  # received, then hashed while the cache still has it
_BATCH_VIEWS = 256


class Landing:
    """One fetch reply's blocks on their way in."""

    def __init__(
        self, blocks: Sequence[FetchedBlock | None], views: Sequence[memoryview | None], peer: str
    ) -> None:
        self._blocks = blocks
        self._views = views
        self._peer = peer
        self._landed = [False] * len(blocks)
        self.damaged: list[int] = []  # places of blocks whose bytes do not match their checksum

    def receive(self, frames: FrameSocket, deadline: Deadline) -> Outcome:
        """Receive them all, or up to the first error; after one, the connection is unusable."""
        try:
            self._receive(frames, deadline)
        except MooncakeError as error:
            return Outcome(self._landed, error)
        return Outcome(self._landed)

    def _receive(self, frames: FrameSocket, deadline: Deadline) -> None:
        batch: dict[int, memoryview] = {}
        size = 0
        for index, (block, view) in enumerate(zip(self._blocks, self._views, strict=True)):
            if block is None:
                continue
            if view is None:  # not wanted, but its bytes come
                self._flush(frames, batch, deadline)
                frames.drain(block.size, deadline.left())
                continue
            if len(view) != block.size:
                problem = f"{len(view)} bytes of memory for a block of {block.size}"
                raise ProtocolError(peer=self._peer, problem=problem)
            batch[index] = view
            size += block.size
            if size >= _BATCH_BYTES or len(batch) == _BATCH_VIEWS:
                self._flush(frames, batch, deadline)
                size = 0
        self._flush(frames, batch, deadline)

    def _flush(self, frames: FrameSocket, batch: dict[int, memoryview], deadline: Deadline) -> None:
        frames.receive_into(list(batch.values()), deadline.left())
        for index in batch:
            self._check(index)
        batch.clear()

    def _check(self, index: int) -> None:
        block, view = self._blocks[index], self._views[index]
        if block is None or view is None:
            return
        self._landed[index] = xxhash.xxh3_64_intdigest(view) == block.checksum
        if not self._landed[index]:
            self.damaged.append(index)
