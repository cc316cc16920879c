"""The paged cache: who has which block, and blocks as buffers of the host."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.client.buffers import as_views
from mooncaked.engines.reference.kv_cache import SCRATCH, BlockAllocator, PagedKV, blocks_for
from mooncaked.engines.reference.model_files import LoadedModel
from mooncaked.errors import IntegrityError


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_no_block_is_lost_or_given_twice(actions: list[tuple[bool, int]]) -> None:
    allocator, held = BlockAllocator(20), []
    for take, number in actions:
        if take:
            free = allocator.free_blocks
            blocks = allocator.allocate(number)
            assert (blocks is None) == (number > free)
            if blocks is not None:
                held.append(blocks)
        elif held:
            allocator.free(held.pop(number % len(held)))
        allocator.check_integrity()
        everything = [block for blocks in held for block in blocks]
        assert len(set(everything)) == len(everything) == 20 - allocator.free_blocks
        assert SCRATCH not in everything


def test_a_block_cannot_be_freed_twice() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.free(blocks)
    with pytest.raises(IntegrityError, match="freed, but not in use"):
        allocator.free(blocks[:1])


def make_cache(model: LoadedModel) -> PagedKV:
    cache = PagedKV(model.config, block_tokens=4, blocks=5, dtype=torch.float32, device="cpu")
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    return cache


def test_a_full_block_is_one_buffer_onto_the_cache_itself(tiny: LoadedModel) -> None:
    cache = make_cache(tiny)
    (parts,) = cache.window([3], [4]).buffers
    (view,) = as_views(parts, writable=True)
    assert bytes(view) == cache.data[3].numpy().tobytes()
    assert len(view) == cache.block_bytes
    view[:4] = b"\0\0\0\0"
    assert float(cache.data[3].flatten()[0]) == 0.0


def test_a_part_of_a_block_is_the_same_tokens_of_every_layer(tiny: LoadedModel) -> None:
    cache = make_cache(tiny)
    (parts,) = cache.window([2], [3]).buffers
    joined = b"".join(map(bytes, as_views(parts, writable=True)))
    assert joined == cache.data[2][:, :, :3].contiguous().numpy().tobytes()
    before = cache.data[2][:, :, 3].clone()
    for view in as_views(parts, writable=True):
        view[:] = bytes(len(view))
    assert not cache.data[2][:, :, :3].any()
    assert torch.equal(cache.data[2][:, :, 3], before)


def test_a_device_is_reached_through_a_copy(tiny: LoadedModel) -> None:
    """The path of other devices, here with the CPU's memory playing one."""
    cache, plain = make_cache(tiny), make_cache(tiny)
    cache.device = "not the host"
    window = cache.window([1, 4], [4, 2])
    window.pull()
    for parts, expected in zip(window.buffers, plain.window([1, 4], [4, 2]).buffers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    for part in window.buffers[0]:
        part.fill_(-1)
    assert torch.equal(cache.data, plain.data)  # nothing is written until it is complete
    window.push(1)
    assert (cache.data[1] == -1).all()
    assert torch.equal(cache.data[4], plain.data[4])


def test_memory_to_blocks(tiny: LoadedModel) -> None:
    block = tiny.config.kv_values_per_token() * 4 * 4
    assert blocks_for(block * 7 + 5, tiny.config, 4, torch.float32) == 7
    assert blocks_for(block * 7, tiny.config, 4, torch.bfloat16) == 14
