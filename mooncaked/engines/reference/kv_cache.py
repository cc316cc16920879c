"""The paged KV cache: one array of blocks, and which of them are free.

A block holds `block_tokens` tokens of one sequence, for all layers: [layers, 2 (key, value), block_tokens,
kv_heads, head_dim]. It lies in one piece, so that it moves to and from the store in one copy. The order
inside a token's row is the model's business alone; to the store a block is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mooncaked.engines.reference.model_config import ModelConfig
from mooncaked.errors import IntegrityError

SCRATCH = 0
"""The block that padding is written to. It belongs to nobody and is read only where a mask gives weight 0."""


class BlockAllocator:
    """Which blocks are free. Pure; block numbers are 1 to `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._used: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """How many can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None when there are fewer."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; raises `IntegrityError` for one that is not in use."""
        for block in blocks:
            if block not in self._used:
                raise IntegrityError(what="the KV cache", detail=f"block {block} freed, but not in use")
            self._used.remove(block)
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when a block is neither free nor in use, or both."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._used or len(free) + len(self._used) != self.total:
            detail = f"{len(self._free)} free and {len(self._used)} used blocks of {self.total}"
            raise IntegrityError(what="the KV cache", detail=detail)


class PagedKV:
    """The blocks' memory. Threads may use different blocks at the same time; who has which is up to the
    allocator's user."""

    def __init__(
        self, config: ModelConfig, *, block_tokens: int, blocks: int, dtype: torch.dtype, device: str
    ) -> None:
        """`blocks` beside the scratch block; see `blocks_for`."""
        self.block_tokens = block_tokens
        self.blocks = blocks
        self.device = device
        self._shape = (config.layers, 2, block_tokens, config.kv_heads, config.head_dim)
        self.data = _lazy_zeros((blocks + 1, *self._shape), dtype, device)

    @property
    def block_bytes(self) -> int:
        """Bytes of a full block."""
        return int(self.data[0].numel() * self.data.element_size())

    # --- for the model -----------------------------------------------------------------------------

    def write(
        self,
        layer: int,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store rows of [kv_heads, head_dim], row i at token `offsets[i]` of block `blocks[i]`."""
        self.data[:, layer, 0][blocks, offsets] = keys
        self.data[:, layer, 1][blocks, offsets] = values

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's blocks, each [len(blocks) * block_tokens, kv_heads, head_dim]."""
        page = self.data[:, layer]
        keys = page[:, 0].index_select(0, blocks)
        values = page[:, 1].index_select(0, blocks)
        return keys.flatten(0, 1), values.flatten(0, 1)

    # --- for the store -----------------------------------------------------------------------------

    def window(self, blocks: Sequence[int], tokens: Sequence[int]) -> HostWindow:
        """`blocks` as memory of the host, the first `tokens[i]` tokens of each."""
        return HostWindow(self, blocks, tokens)


class HostWindow:
    """Some blocks of the cache as buffers of the host. On the CPU that is the cache itself; for a device
    it is a copy, read with `pull` and written back with `push`."""

    def __init__(self, cache: PagedKV, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        self._data, self._blocks = cache.data, list(blocks)
        if cache.device == "cpu":
            self._staging = None
            pages = [cache.data[block] for block in blocks]
        else:
            self._staging = torch.empty((len(blocks), *cache.data.shape[1:]), dtype=cache.data.dtype)
            pages = list(self._staging)
        # Part of a block is several pieces, one for each layer's keys and values.
        self.buffers: list[list[torch.Tensor]] = [
            [page] if count == cache.block_tokens else list(page.view(-1, *page.shape[2:])[:, :count])
            for page, count in zip(pages, tokens, strict=True)
        ]

    def pull(self) -> None:
        """Bring the cache's content into the buffers."""
        if self._staging is not None:
            self._staging.copy_(self._data[self._blocks])

    def push(self, count: int) -> None:
        """Bring the first `count` blocks' buffers into the cache."""
        if self._staging is not None and count:
            self._data[self._blocks[:count]] = self._staging[:count].to(self._data.device)


def blocks_for(memory_bytes: int, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
    """How many blocks `memory_bytes` hold."""
    return memory_bytes // (config.kv_values_per_token() * block_tokens * int(dtype.itemsize))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros; on the CPU, memory that the system hands out only when it is first written."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(shape)
