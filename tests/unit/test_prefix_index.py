"""The prefix index by example; its invariants are in tests/property/test_index_machine.py."""

from __future__ import annotations

import time

import pytest

from mooncaked.conductor.index import Holder, PrefixIndex
from mooncaked.errors import IntegrityError
from mooncaked.types import BlockEvent, Tier

KEYS = [bytes([i]) * 16 for i in range(10)]


def events(*positions: int, stored: bool = True, tier: Tier = Tier.DRAM, size: int = 100) -> list[BlockEvent]:
    return [BlockEvent(stored, "ns", KEYS[i], None, size, tier) for i in positions]


def joined(index: PrefixIndex, node_id: str, *positions: int, tier: Tier = Tier.DRAM) -> int:
    source = index.begin(node_id)
    index.apply(source, events(*positions, tier=tier))
    index.publish(source)
    return source


def depths(index: PrefixIndex, n: int = 10) -> dict[str, int]:
    return index.depths(index.lookup("ns", KEYS[:n]))


def test_depth_groups() -> None:
    index = PrefixIndex(100)
    joined(index, "a", 0, 1, 2)
    joined(index, "b", 0, 1, 2)
    joined(index, "c", 0)
    joined(index, "d", 1, 2, 3)  # without the first block the others are worth nothing
    match = index.lookup("ns", KEYS)
    assert [depth for depth, _ in match.groups] == [1, 3]
    assert index.depths(match) == {"c": 1, "a": 3, "b": 3}
    assert match.deepest() == 3


def test_a_hole_ends_the_match() -> None:
    index = PrefixIndex(100)
    joined(index, "a", 0, 1, 3, 4)
    assert depths(index) == {"a": 2}


def test_namespaces_are_apart() -> None:
    index = PrefixIndex(100)
    joined(index, "a", 0, 1)
    assert index.lookup("other", KEYS).groups == []


def test_a_source_is_invisible_until_it_is_published() -> None:
    index = PrefixIndex(100)
    old = joined(index, "a", 0)
    new = index.begin("a")
    index.apply(new, events(0, 1, 2))
    assert depths(index) == {"a": 1}
    index.publish(new)
    assert depths(index) == {"a": 3}
    assert [s.source for s in index.sources()] == [new]
    assert old != new


def test_hiding_is_undone_by_publishing() -> None:
    index = PrefixIndex(100)
    source = joined(index, "a", 0, 1)
    index.hide(source)
    assert depths(index) == {}
    assert index.holders("ns", KEYS[0]) == []
    index.publish(source)
    assert depths(index) == {"a": 2}


def test_dropping_a_node_is_at_once_and_sweeping_frees_the_memory() -> None:
    index = PrefixIndex(100)
    joined(index, "a", *range(10))
    joined(index, "b", 0)
    index.drop_node("a")
    assert depths(index) == {"b": 1}
    steps = 1
    while index.sweep(3):
        steps += 1
        assert depths(index) == {"b": 1}
    assert steps >= 3
    assert index.blocks == 1
    index.check_integrity()


def test_dropping_a_node_with_many_blocks_takes_no_time() -> None:
    index = PrefixIndex(100_000)
    source = index.begin("a")
    index.apply(source, [BlockEvent(True, "ns", i.to_bytes(16), None, 1, Tier.DRAM) for i in range(50_000)])
    index.publish(source)
    begin = time.perf_counter()
    index.drop_node("a")
    assert time.perf_counter() - begin < 0.005
    assert index.blocks == 50_000


def test_slots_are_used_again_after_a_sweep() -> None:
    index = PrefixIndex(100)
    for _ in range(20):
        joined(index, "a", 0, 1)
        while index.sweep(100):
            pass
    assert len(index._node_of) <= 3
    index.check_integrity()


def test_tiers() -> None:
    index = PrefixIndex(100)
    source = joined(index, "a", 0)
    index.apply(source, events(1, tier=Tier.SSD) + events(2, tier=Tier.GPU) + events(2, tier=Tier.SSD))
    match = index.lookup("ns", KEYS)
    assert index.depths(match) == {"a": 3}
    assert index.slow_blocks(match, "a", 3) == 1
    assert index.slow_blocks(match, "a", 1) == 0
    assert index.holders("ns", KEYS[2]) == [Holder("a", Tier.GPU, 100), Holder("a", Tier.SSD, 100)]
    index.apply(source, events(2, stored=False, tier=Tier.GPU))
    assert depths(index) == {"a": 3}


def test_sizes_that_differ_are_remembered() -> None:
    index = PrefixIndex(100)
    source = joined(index, "a", 0)
    index.apply(source, events(1, size=7))
    assert index.holders("ns", KEYS[1]) == [Holder("a", Tier.DRAM, 7)]


def test_repeats_and_removals_of_the_unknown_change_nothing() -> None:
    index = PrefixIndex(100)
    source = joined(index, "a", 0, 0, 0)
    index.apply(source, events(5, stored=False))
    assert index.blocks == index.copies(source) == 1
    index.check_integrity()


def test_a_full_index_counts_what_it_turns_away() -> None:
    index = PrefixIndex(3)
    joined(index, "a", 0, 1, 2, 3, 4)
    assert (index.blocks, index.refused) == (3, 2)
    assert depths(index) == {"a": 3}
    joined(index, "b", 0, 1)  # a known block has room for another holder
    assert depths(index)["b"] == 2
    assert index.refused == 2


def test_damage_is_found() -> None:
    index = PrefixIndex(100)
    joined(index, "a", 0, 1)
    index.blocks = 5
    with pytest.raises(IntegrityError, match="5 blocks counted, 2 held"):
        index.check_integrity()
