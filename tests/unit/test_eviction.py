"""The eviction order by examples; tests/property has it against a naive model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mooncaked.errors import IntegrityError, InvalidRequest
from mooncaked.eviction import LruPolicy, Watermarks


@dataclass(eq=False)
class Leaf:
    """The least that a policy needs of a block."""

    name: str
    pins: int = 0
    children: int = 0
    touched: int = 0
    namespace: str = ""
    parent: bytes | None = None
    size: int = 1
    policy: object | None = None
    key: bytes = b""

    def __post_init__(self) -> None:
        self.key = self.key or self.name.encode()


def blocks(names: str) -> list[Leaf]:
    return [Leaf(name) for name in names]


def drain(policy: LruPolicy[Leaf]) -> str:
    """The order in which everything that may go would go."""
    names = ""
    while (block := policy.victim()) is not None:
        names += block.name
        policy.discard(block)
    return names


def test_the_least_recently_touched_goes_first() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    a, b, c = blocks("abc")
    for block in (a, b, c, a):
        policy.touch([block])
    assert drain(policy) == "bca"


def test_touching_a_prefix_makes_its_root_the_most_recent() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    policy.touch(blocks("rst"))
    assert drain(policy) == "tsr"


def test_naming_a_victim_does_not_take_it() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    policy.touch(blocks("a"))
    assert policy.victim() is policy.victim()
    assert len(policy) == 1


def test_a_block_with_a_child_waits_for_it_and_keeps_its_place() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    root, child, other = blocks("rco")
    root.children = 1
    for block in (root, other, child):
        policy.touch([block])
    assert policy.victim() is other
    policy.discard(child)
    root.children = 0
    policy.released(root)
    assert drain(policy) == "ro", "the root was touched before the other"


def test_a_pinned_block_waits_for_its_readers_and_keeps_its_place() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    a, b = blocks("ab")
    policy.touch([a])
    policy.touch([b])
    a.pins = 1
    assert policy.victim() is b
    a.pins = 0
    policy.released(a)
    assert drain(policy) == "ab"


def test_blocks_that_come_back_keep_their_order_among_each_other() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    a, b, c = blocks("abc")
    for block in (a, b, c):
        policy.touch([block])
        block.pins = 1
    assert policy.victim() is None
    for block in (c, a, b):
        block.pins = 0
        policy.released(block)
    assert drain(policy) == "abc"


def test_without_a_leaf_the_oldest_inner_block_is_offered() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    old, new = blocks("on")
    old.children = new.children = 1
    policy.touch([old])
    policy.touch([new])
    assert policy.victim() is None
    assert policy.inner_victim() is old
    policy.touch([old])
    assert policy.victim() is None
    assert policy.inner_victim() is new


def test_pinned_blocks_are_never_offered() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    (a,) = blocks("a")
    a.pins = a.children = 1
    policy.touch([a])
    assert policy.victim() is None
    assert policy.inner_victim() is None


def test_an_empty_policy_has_no_victim() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    assert policy.victim() is None
    assert policy.inner_victim() is None
    assert len(policy) == 0


def test_a_broken_order_is_found() -> None:
    policy: LruPolicy[Leaf] = LruPolicy()
    a, b = blocks("ab")
    policy.touch([a, b])
    policy.check_integrity()
    a.touched, b.touched = b.touched, a.touched
    with pytest.raises(IntegrityError, match="not in order"):
        policy.check_integrity()


@pytest.mark.parametrize(("used", "excess"), [(0, 0), (95, 0), (96, 6), (100, 10)])
def test_watermarks_say_how_much_is_too_much(used: int, excess: int) -> None:
    assert Watermarks(high=0.95, low=0.90).excess(used, 100) == excess


@pytest.mark.parametrize(
    ("high", "low"), [(0.9, 0.95), (1.1, 0.5), (0.5, 0.0), (0.5, -0.1), (float("nan"), 0.5)]
)
def test_senseless_watermarks_are_refused(high: float, low: float) -> None:
    with pytest.raises(InvalidRequest, match="low <= high"):
        Watermarks(high, low)
