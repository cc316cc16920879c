"""Which regions a pool is made of, and how it changes its size. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.pools.regions import Shape, adoptable, plan_resize, split

PAGE = 4096


@pytest.mark.parametrize(
    ("size", "step", "sizes"),
    [
        (0, 100 * PAGE, []),
        (10 * PAGE, 100 * PAGE, [10 * PAGE]),
        (100 * PAGE + 1, 100 * PAGE, [51 * PAGE, 50 * PAGE]),
        (300 * PAGE, 100 * PAGE, [100 * PAGE] * 3),
    ],
)
def test_a_pool_is_cut_into_about_equal_pieces(size: int, step: int, sizes: list[int]) -> None:
    assert split(size, step, "off") == sizes


def test_huge_pages_are_not_cut() -> None:
    assert split(5 << 20, 4 << 20, "2MiB") == [4 << 20, 2 << 20]


SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=8).map(
    lambda pages: [Shape(i, n * PAGE) for i, n in enumerate(pages)]
)


@given(SHAPES, st.integers(1, 300), st.integers(1, 50))
def test_a_plan_leads_to_the_size_that_was_asked_for(regions: list[Shape], pages: int, step: int) -> None:
    wanted = pages * PAGE
    plan = plan_resize(regions, wanted, step * PAGE, "off")
    left = [shape for shape in regions if shape.region not in plan.retire]
    assert sum(shape.size for shape in left) + sum(plan.add) == wanted
    if wanted >= sum(shape.size for shape in regions):
        assert not plan.retire, "a pool that grows loses nothing"
    else:
        assert len(plan.add) <= 1
        assert plan.retire == sorted(plan.retire, reverse=True), "the newest go first"


def test_a_pool_shrinks_by_whole_regions_where_it_can() -> None:
    regions = [Shape(0, 4 * PAGE), Shape(1, 4 * PAGE), Shape(2, 4 * PAGE)]
    plan = plan_resize(regions, 8 * PAGE, 4 * PAGE, "off")
    assert (plan.add, plan.retire) == ([], [2])
    plan = plan_resize(regions, 7 * PAGE, 4 * PAGE, "off")
    assert (plan.add, plan.retire) == ([3 * PAGE], [2, 1]), "one region is replaced by a smaller one"


def test_a_start_begins_with_the_oldest_regions_that_fit() -> None:
    kept = [Shape(3, 2 * PAGE), Shape(0, 4 * PAGE), Shape(7, PAGE)]
    assert adoptable(kept, 7 * PAGE) == [kept[1], kept[0], kept[2]]
    assert adoptable(kept, 5 * PAGE) == [kept[1], kept[2]]
    assert adoptable(kept, 3 * PAGE) == [kept[0], kept[2]]
    assert adoptable([Shape(0, 4 * PAGE)], 3 * PAGE) == []
