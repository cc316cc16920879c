"""Every eviction policy by examples; tests/property has what must hold for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncaked.errors import InvalidRequest
from mooncaked.eviction import POLICIES, Policy, PrefixAwarePolicy, S3FifoPolicy, make_policy
from mooncaked.eviction.prefix_density import Density
from mooncaked.eviction.prefix_units import Kind, Unit, age_bin
from mooncaked.sim.evict import SimBlock, SimPool, count_hits
from mooncaked.sim.workloads import make_workload


def chain(names: str, parent: SimBlock | None = None) -> list[SimBlock]:
    """A block per letter, each below the one before it."""
    blocks: list[SimBlock] = []
    for name in names:
        above = blocks[-1] if blocks else parent
        if above is not None:
            above.children += 1
        key = name.encode()
        blocks.append(SimBlock(ord(name), key, above.key if above else None, above))
    return blocks


def evict(policy: Policy[SimBlock], count: int = 100) -> str:
    """Up to `count` blocks in the order in which they go."""
    names = ""
    while len(names) < count and (block := policy.victim()) is not None:
        names += chr(block.number)
        policy.discard(block)
        if block.above is not None:
            block.above.children -= 1
            policy.released(block.above)
    return names


def loose(policy: Policy[SimBlock], names: str) -> dict[str, SimBlock]:
    """Blocks without parents, stored one after the other."""
    blocks = {name: chain(name)[0] for name in names}
    for block in blocks.values():
        policy.touch([block])
    return blocks


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"no eviction policy 'mru'.*prefix-aware, lru, lfu"):
        make_policy("mru")


@pytest.mark.parametrize("name", POLICIES)
class TestAll:
    def test_a_chain_goes_from_its_end_to_its_root(self, name: str) -> None:
        policy: Policy[SimBlock] = make_policy(name)
        policy.touch(chain("rst"))
        assert evict(policy) == "tsr"
        assert len(policy) == 0

    def test_a_fork_goes_after_both_of_its_branches(self, name: str) -> None:
        policy: Policy[SimBlock] = make_policy(name)
        stem = chain("ab")
        policy.touch([*stem, *chain("cd", stem[-1])])
        policy.touch(stem)
        policy.touch(chain("xy", stem[-1]))
        order = evict(policy)
        assert sorted(order[:4]) == ["c", "d", "x", "y"]
        assert order[4:] == "ba"

    def test_what_is_pinned_stays_until_it_is_released(self, name: str) -> None:
        policy: Policy[SimBlock] = make_policy(name)
        blocks = loose(policy, "abc")
        blocks["a"].pins = blocks["c"].pins = 1
        assert evict(policy) == "b"
        assert policy.inner_victim() is None, "all that is left is pinned"
        blocks["a"].pins = 0
        policy.released(blocks["a"])
        assert evict(policy) == "a"
        policy.check_integrity()

    def test_an_inner_block_is_offered_when_nothing_else_is_left(self, name: str) -> None:
        policy: Policy[SimBlock] = make_policy(name)
        (block,) = chain("a")
        block.children = 1  # is being written
        policy.touch([block])
        assert policy.victim() is None
        assert policy.inner_victim() is block

    def test_blocks_that_are_removed_from_the_middle_are_forgotten(self, name: str) -> None:
        policy: Policy[SimBlock] = make_policy(name)
        blocks = chain("abcde")
        policy.touch(blocks)
        policy.discard(blocks[2])
        blocks[1].children = 0
        policy.released(blocks[1])
        policy.check_integrity()
        assert len(policy) == 4
        assert blocks[2].touched == 0
        assert sorted(evict(policy)) == ["a", "b", "d", "e"]

    def test_equal_seeds_and_calls_give_equal_victims(self, name: str) -> None:
        requests = make_workload("mixed", 5, 600)
        first, second = (count_hits(make_policy(name, 3), requests, 700) for _ in range(2))
        assert first == second > 0


def test_lfu_evicts_what_was_used_least_often() -> None:
    policy: Policy[SimBlock] = make_policy("lfu")
    blocks = loose(policy, "abc")
    for name in "aab":
        policy.touch([blocks[name]])
    assert evict(policy) == "cba"


def test_lfu_forgets_the_popularity_of_long_ago() -> None:
    policy: Policy[SimBlock] = make_policy("lfu")
    blocks = loose(policy, "a")
    for _ in range(3):
        policy.touch([blocks["a"]])
    for name in "bcde":  # each victim raises the credit with which others come
        policy.touch([loose(policy, name)[name]])
        evict(policy, 1)
    assert "a" not in {chr(block.number) for block in policy._known}  # type: ignore[attr-defined]


def test_length_aware_evicts_what_is_late_in_its_requests() -> None:
    policy: Policy[SimBlock] = make_policy("length-aware")
    policy.touch(chain("abcd"))
    policy.touch(chain("xy"))
    policy.touch(chain("z"))
    assert evict(policy) == "dcbyaxz"


def test_s3fifo_evicts_first_what_is_used_once() -> None:
    policy: Policy[SimBlock] = make_policy("s3fifo")
    blocks = loose(policy, "abcd")
    policy.touch([blocks["a"]])
    policy.touch([blocks["c"]])
    assert evict(policy) == "bdac"


def test_s3fifo_knows_what_comes_back_soon() -> None:
    policy: S3FifoPolicy[SimBlock] = S3FifoPolicy()
    loose(policy, "abcd")
    assert evict(policy, 1) == "a"
    loose(policy, "ae")
    assert evict(policy) == "bcdea", "it went to the main queue at once"
    assert len(policy._ghosts) == 0, "never more than there are blocks"


def test_sieve_spares_what_was_used_since_the_hand_came_by() -> None:
    policy: Policy[SimBlock] = make_policy("sieve")
    blocks = loose(policy, "abcd")
    policy.touch([blocks["a"]])
    policy.touch([blocks["c"]])
    assert evict(policy) == "bdac"


class TestPrefixAware:
    def test_until_something_can_be_won_it_is_lru(self) -> None:
        requests = make_workload("flips", 1, 1500)
        assert count_hits(make_policy("prefix-aware"), requests, 20_000) == count_hits(
            make_policy("lru"), requests, 20_000
        )

    def test_what_comes_round_and_round_is_kept_in_part(self) -> None:
        requests = make_workload("cyclic", 1, 2000)
        assert count_hits(make_policy("lru"), requests, 2000) == 0
        blocks = sum(len(request.chain) for request in requests)
        assert count_hits(make_policy("prefix-aware"), requests, 2000) > blocks / 5

    def test_long_prompts_that_never_come_back_do_less_harm(self) -> None:
        requests = make_workload("scans", 1, 1800)
        lru, ours = (count_hits(make_policy(name), requests, 3000) for name in ("lru", "prefix-aware"))
        assert ours > 1.3 * lru

    @pytest.mark.parametrize("name", ["conversations", "tool-loops", "recent", "flips", "phases"])
    def test_it_loses_next_to_nothing_where_lru_is_best(self, name: str) -> None:
        requests = make_workload(name, 4, 1500)
        lru, ours = (count_hits(make_policy(policy), requests, 2000) for policy in ("lru", "prefix-aware"))
        assert ours >= 0.997 * lru

    def test_a_chain_that_is_stored_and_read_in_pieces_is_one_unit(self) -> None:
        policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
        blocks = chain("abcdef")
        for i in range(0, 6, 2):
            policy.touch(blocks[i : i + 2])
        for block in blocks:
            policy.touch([block])
        assert {id(block.policy) for block in blocks} == {id(policy._units[0])}
        assert (policy._units[0].uses, policy._units[0].open) == (2, False)

    def test_evicted_blocks_that_come_back_count_as_a_use(self) -> None:
        policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
        policy.touch(chain("abcd"))
        assert evict(policy) == "dcba"
        policy.touch(chain("abcd"))
        (unit,) = policy._units
        assert (unit.uses, len(unit.blocks), len(unit.marks)) == (2, 4, 0)
        policy.check_integrity()

    def test_a_use_that_ends_early_makes_a_fork(self) -> None:
        policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
        blocks = chain("abcdef")
        policy.touch(blocks)
        policy.touch(blocks[:2])
        policy.touch(chain("x", blocks[1]))
        kinds = [block.policy.kind for block in blocks if isinstance(block.policy, Unit)]
        assert kinds == [Kind.STEM] * 2 + [Kind.REST] * 4

    def test_ghosts_are_about_as_many_as_blocks_at_most(self) -> None:
        policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
        pool = SimPool(policy, 200)
        for request in make_workload("documents", 1, 500):
            pool.request(request.chain)
            assert len(policy._ghosts) <= 264
        assert len(policy._ghosts) > 50
        policy.check_integrity()

    def test_the_order_is_checked_after_each_request(self) -> None:
        for name, capacity in (("edits", 300), ("mixed", 500), ("documents", 400)):
            policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
            pool = SimPool(policy, capacity)
            for request in make_workload(name, 2, 400):
                pool.request(request.chain)
                policy.check_integrity()
                assert len(policy) <= capacity

    def test_blocks_that_are_written_without_a_read_before(self) -> None:
        policy: PrefixAwarePolicy[SimBlock] = PrefixAwarePolicy()
        blocks = chain("abcd")
        policy.touch(blocks)
        evict(policy, 2)
        again = chain("cz", blocks[1])
        policy.touch(again)
        policy.check_integrity()
        assert len(policy) == 4


class TestDensity:
    def learnt(self, ages: Sequence[int | None]) -> tuple[Density, Unit[SimBlock]]:
        """What was learnt from units that were used at these ages, or never (None)."""
        density = Density()
        unit: Unit[SimBlock] = Unit(Kind.WHOLE, 0, 0, 0, ("", b""))
        density.place(unit)
        for age in ages:
            unit.credited = 0
            if age is None:
                density.saw_unused(unit, 1 << 20)
            else:
                density.saw_use(unit, age)
        density.learn(1.0)
        return density, unit

    def test_what_is_used_more_often_is_worth_more(self) -> None:
        often, unit = self.learnt([100] * 80 + [None] * 20)
        seldom, other = self.learnt([100] * 20 + [None] * 80)
        assert often.worth(unit, 10) > 2 * seldom.worth(other, 10)

    def test_worth_rises_towards_the_time_of_use_and_falls_after_it(self) -> None:
        density, unit = self.learnt([1000] * 60 + [None] * 40)
        assert density.worth(unit, 10) < density.worth(unit, 800) > 10 * density.worth(unit, 5000)

    def test_what_was_seen_fades(self) -> None:
        density, unit = self.learnt([100] * 100)
        before = density.worth(unit, 50)
        density.learn(0.0)
        density.learn(0.0)
        assert density.worth(unit, 50) < before

    def test_ages_fall_into_two_bins_for_each_doubling(self) -> None:
        assert [age_bin(age) for age in (1, 2, 3, 4, 5, 6, 7, 8, 1 << 60)] == [2, 4, 5, 6, 6, 7, 7, 8, 81]
