"""The mapping of a daemon's memory, and what a client does not believe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from mooncaked.api.protocol import HelloReply, RegionInfo
from mooncaked.client.mapping import Mapping
from mooncaked.errors import IntegrityError

SIZE = 5 << 20  # no multiple of the step in which page tables are made


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def hello(*sizes: int) -> HelloReply:
    regions = [RegionInfo(region=number, size=size) for number, size in enumerate(sizes)]
    return HelloReply(version=1, node_id="n", epoch=3, regions=regions)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (SIZE - 1, 1), (0, SIZE), (1 << 20, 3 << 20), (SIZE - 70_000, 70_000), (9, 0)],
)
def test_a_view_is_the_memory_of_the_descriptor(fd: int, offset: int, size: int) -> None:
    mapping = Mapping(hello(SIZE), [fd])
    assert (mapping.epoch, mapping.capacity()) == (3, SIZE)
    os.pwrite(fd, b"x" * size, offset)
    view = mapping.view(0, offset, size)
    assert view == b"x" * size
    view[:] = b"y" * size
    assert os.pread(fd, size, offset) == b"y" * size


@pytest.mark.parametrize(
    ("region", "offset", "size"), [(1, 0, 1), (0, -1, 2), (0, 0, SIZE + 1), (0, SIZE, 1), (0, 0, -1)]
)
def test_a_place_outside_is_an_error(fd: int, region: int, offset: int, size: int) -> None:
    with pytest.raises(IntegrityError, match=f"no bytes {offset}"):
        Mapping(hello(SIZE), [fd]).view(region, offset, size)


def test_a_greeting_that_does_not_fit_its_descriptors_is_an_error(fd: int) -> None:
    with pytest.raises(IntegrityError, match="2 regions came with 1"):
        Mapping(hello(SIZE, SIZE), [fd])
    with pytest.raises(IntegrityError, match="does not have"):
        Mapping(hello(SIZE + 4096), [fd])  # reading behind the end of it would kill the process


def test_views_outlive_the_mapping(fd: int) -> None:
    view = Mapping(hello(SIZE), [fd]).view(0, 0, 100_000)
    os.pwrite(fd, b"still here", 0)
    assert view[:10] == b"still here"


def test_the_largest_region_bounds_a_value(fd: int) -> None:
    mapping = Mapping(hello(SIZE), [fd])
    assert mapping.largest() == mapping.capacity() == SIZE
