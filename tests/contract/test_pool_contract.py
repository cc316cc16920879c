"""What is relied on in a pool, for the real ones and for the fake that other tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mooncaked.pools.base import Pool, Region
from mooncaked.pools.dram import DramPool
from mooncaked.pools.gpu import GpuPool
from mooncaked.types import Tier
from tests.fakes.heap_pool import HeapPool

MakePool = Callable[[int, int], Pool]


@pytest.fixture(params=[DramPool, HeapPool])
def make_pool(request: pytest.FixtureRequest) -> Iterator[MakePool]:
    made: list[Pool] = []

    def make(size: int, region: int) -> Pool:
        pool: Pool = request.param(size, region)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.close()


def test_a_pool_says_what_it_is(make_pool: MakePool) -> None:
    pool = make_pool(1 << 20, 3)
    assert (pool.size, pool.region, pool.tier) == (1 << 20, 3, Tier.DRAM)


def test_a_size_is_rounded_up_to_pages(make_pool: MakePool) -> None:
    pool = make_pool(5000, 0)
    assert pool.size == 8192
    assert len(pool.view) == 8192


def test_the_view_is_writable_bytes_that_start_as_zeros(make_pool: MakePool) -> None:
    view = make_pool(8192, 0).view
    assert (view.format, view.itemsize, view.ndim, view.readonly, view.c_contiguous) == (
        "B",
        1,
        1,
        False,
        True,
    )
    assert bytes(view) == bytes(8192)


def test_slices_of_the_view_share_the_memory(make_pool: MakePool) -> None:
    pool = make_pool(8192, 0)
    pool.view[4096:4100] = b"abcd"
    assert bytes(pool.view[4098:4102]) == b"cd\0\0"


def test_a_slice_outlives_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(8192, 0)
    part = pool.view[10:14]
    part[:] = b"kept"
    pool.close()
    assert bytes(part) == b"kept"


def test_a_closed_pool_gives_no_memory_and_may_be_closed_again(make_pool: MakePool) -> None:
    pool = make_pool(8192, 0)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="released"):
        pool.view[0:1]


# --- a region of any tier ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "tier"),
    [
        (DramPool, Tier.DRAM),
        (HeapPool, Tier.DRAM),
        (lambda size, region: GpuPool("cpu", size, region), Tier.GPU),
    ],
    ids=["dram", "heap", "gpu"],
)
def test_a_region_says_what_it_is_and_may_be_closed_again(
    make: Callable[[int, int], Region], tier: Tier
) -> None:
    region = make(1 << 20, 3)
    assert (region.size, region.region, region.tier) == (1 << 20, 3, tier)
    region.close()
    region.close()


def test_the_view_of_a_gpu_that_is_a_stand_in_is_its_memory() -> None:
    pool = GpuPool("cpu", 8192, 0)
    assert pool.view is not None
    part = pool.view[10:14]
    pool.copy_in(10, b"kept").wait()
    pool.close()
    assert bytes(part) == b"kept", "a slice outlives the pool"
