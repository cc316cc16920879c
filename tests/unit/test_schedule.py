"""Where requests go, by example."""

from __future__ import annotations

import pytest

from mooncaked.conductor.policies import POLICIES
from mooncaked.errors import ContextLengthExceeded, NoInstance
from mooncaked.types import NodePhase, Role, Tier
from tests.fakes.cluster_view import node_record
from tests.unit.conductors import Small, instance, text

PROMPT = text(0, 1000)


# --- algorithm 1 ---------------------------------------------------------------------------------------


def test_the_prefix_attracts_the_request() -> None:
    small = Small(prefill=3)
    small.hold("np2", PROMPT[:800])
    decision = small.schedule(tokens=PROMPT)
    assert decision.prefill == "p2"
    terms = decision.prefill_terms
    assert (terms.own_tokens, terms.reused_tokens, terms.pull_from) == (800, 800, "")
    assert decision.prefill_sources == []


def test_the_last_token_is_always_computed() -> None:
    small = Small()
    small.hold("np1", PROMPT)
    assert small.schedule(tokens=PROMPT).prefill_terms.reused_tokens == 999


def test_a_queue_outweighs_a_prefix_and_then_the_prefix_is_pulled() -> None:
    small = Small(prefill=2)
    small.hold("np1", PROMPT[:800])
    small.schedule("long", tokens=PROMPT[:800] + text(5000, 4000))
    decision = small.schedule("short", tokens=PROMPT)
    assert decision.prefill == "p2"
    terms = decision.prefill_terms
    assert (terms.own_tokens, terms.reused_tokens, terms.pull_from) == (0, 800, "np1")
    assert terms.transfer_ms > 0
    assert decision.prefill_sources == ["np1"]


@pytest.mark.parametrize(
    ("own", "best", "pulls"),
    [
        (0, 10, True),  # nothing here: the ratio counts as infinite
        (100, 400, False),  # 4 is not more than 4
        (100, 410, True),
        (400, 800, False),  # recomputed, although it could be pulled: that is the algorithm
        (800, 800, False),
    ],
)
def test_the_ratio_decides_whether_to_pull(own: int, best: int, pulls: bool) -> None:
    small = Small(prefill=2, threshold=4.0)
    small.hold("np1", PROMPT[:own])
    small.hold("nd1", PROMPT[:best])  # the decode node can be pulled from as well as any
    [terms] = [
        t for t in small.conductor.explain(small.ask(tokens=PROMPT), 1).prefill if t.instance_id == "p1"
    ]
    assert terms.pull_from == ("nd1" if pulls else "")
    assert terms.reused_tokens == (best if pulls else own)


def test_hot_prefixes_spread_by_being_used() -> None:
    """The one that pulled holds the blocks from then on, and serves them to others."""
    small = Small(prefill=3)
    small.hold("np1", PROMPT[:800])
    small.schedule("a", tokens=PROMPT[:800] + text(5000, 4000))
    assert small.schedule("b", tokens=PROMPT[:800] + text(9000, 4000)).prefill_sources == ["np1"]
    small.hold("np2", PROMPT[:800])
    decision = small.schedule("c", tokens=PROMPT)
    assert decision.prefill == "p3"
    assert sorted(decision.prefill_sources) == ["np1", "np2"]


def test_a_source_that_is_busy_sending_costs_more() -> None:
    small = Small(prefill=3)
    small.hold("nd1", PROMPT)
    first = small.schedule("a", tokens=PROMPT).prefill_terms
    second = small.schedule("b", tokens=PROMPT).prefill_terms
    assert second.transfer_ms > first.transfer_ms
    assert small.conductor.ledger.pulls == {"nd1": 2}
    for request in ("a", "b"):
        small.conductor.release(request)
    assert small.conductor.ledger.pulls == {}


def test_blocks_on_ssd_take_longer_to_load() -> None:
    in_dram, on_ssd = Small(), Small()
    in_dram.hold("np1", PROMPT[:800])
    on_ssd.hold("np1", PROMPT[:400])
    on_ssd.hold("np1", PROMPT[:800], Tier.SSD)
    fast = in_dram.schedule(tokens=PROMPT).prefill_terms
    slow = on_ssd.schedule(tokens=PROMPT).prefill_terms
    assert slow.own_tokens == fast.own_tokens
    assert slow.load_ms > fast.load_ms


def test_requests_that_come_at_once_see_each_other() -> None:
    small = Small(prefill=4)
    chosen = [small.schedule(f"r{i}").prefill for i in range(8)]
    assert sorted(chosen) == sorted(["p1", "p2", "p3", "p4"] * 2)


def test_a_faster_instance_gets_more() -> None:
    small = Small(prefill=2)
    small.learn_prefill("p1", 1.0)
    small.learn_prefill("p2", 0.25)
    chosen = [small.schedule(f"r{i}", tokens=1000).prefill for i in range(10)]
    assert chosen.count("p2") == 8


# --- decode --------------------------------------------------------------------------------------------


def test_decodes_spread_over_the_instances() -> None:
    small = Small(decode=3)
    chosen = [small.schedule(f"r{i}").decode for i in range(6)]
    assert sorted(chosen) == ["d1", "d1", "d2", "d2", "d3", "d3"]


def test_an_instance_without_kv_room_is_passed_over() -> None:
    small = Small(decode=1)
    small.put(instance("d0", Role.DECODE, "nd0", kv_capacity_tokens=150))
    assert small.schedule("a", tokens=100).decode == "d0"
    assert small.schedule("b", tokens=100).decode == "d1", (
        "10 expected tokens on top of 110 are too many for d0"
    )


def test_the_decode_node_needs_only_what_it_lacks() -> None:
    small = Small(decode=2)
    small.hold("nd2", PROMPT[:800])
    decision = small.schedule(tokens=PROMPT)
    assert decision.decode == "d2"


def test_decode_sources_begin_with_the_prefill_node() -> None:
    small = Small(prefill=2)
    small.hold("np2", PROMPT)
    small.schedule("a", tokens=PROMPT + text(5000, 4000))
    decision = small.schedule("b", tokens=PROMPT)
    assert decision.prefill == "p1"
    assert decision.decode_sources == ["np1", "np2"]


def test_the_second_look_keeps_the_instance() -> None:
    small = Small(decode=2)
    before = small.schedule("a")
    after = small.schedule("a", prefilled_on=before.prefill)
    assert after.decode == before.decode
    assert len(small.conductor.ledger) == 1


def test_a_decode_instance_that_failed_is_replaced_and_the_kv_stays_where_it_is() -> None:
    small = Small(decode=2)
    before = small.schedule("a")
    after = small.schedule("a", prefilled_on=before.prefill, avoid=frozenset({before.decode}))
    assert {before.decode, after.decode} == {"d1", "d2"}
    assert after.prefill == before.prefill
    assert after.decode_sources == [before.prefill_terms.node_id]


# --- aggregated instances ------------------------------------------------------------------------------


def test_an_aggregated_instance_competes_with_prefill_instances() -> None:
    small = Small(prefill=1, decode=1)
    small.put(instance("b1", Role.BOTH, "nb1"))
    small.hold("nb1", PROMPT)
    decision = small.schedule(tokens=PROMPT)
    assert decision.single
    assert decision.prefill == decision.decode == "b1"
    assert decision.decode_terms.handoff_ms == 0
    other = small.schedule("busy", tokens=text(9000, 1000))
    assert not other.single


def test_an_aggregated_instance_can_decode_for_others() -> None:
    small = Small(prefill=1, decode=0)
    small.put(instance("b1", Role.BOTH, "nb1"))
    small.hold("np1", PROMPT)
    decision = small.schedule(tokens=PROMPT)
    assert (decision.prefill, decision.decode) == ("p1", "b1")


# --- what is not fit -----------------------------------------------------------------------------------


def test_an_instance_whose_node_is_gone_is_the_last_choice_and_costs_the_recompute() -> None:
    small = Small(prefill=2)
    small.hold("np1", PROMPT)
    small.conductor.fleet.set_away(frozenset({"np1"}))
    assert small.schedule("a", tokens=PROMPT).prefill == "p2"
    del small.instances["p2"]
    small.conductor.update(small.instances, small.nodes)
    decision = small.schedule("b", tokens=PROMPT)
    assert decision.prefill == "p1"
    assert decision.prefill_terms.own_tokens == 0
    assert decision.prefill_terms.recompute_ms > 0


@pytest.mark.parametrize("phase", [NodePhase.STARTING, NodePhase.DRAINING])
def test_a_node_that_is_not_ready_is_passed_over(phase: NodePhase) -> None:
    small = Small(prefill=2)
    small.nodes["np1"] = node_record("np1", phase=phase)
    small.conductor.update(small.instances, small.nodes)
    assert [small.schedule(f"r{i}").prefill for i in range(3)] == ["p2"] * 3


def test_an_instance_without_a_store_serves_and_never_pulls() -> None:
    small = Small(prefill=0)
    small.put(instance("p1", Role.PREFILL, None))
    small.hold("nd1", PROMPT)
    terms = small.schedule(tokens=PROMPT).prefill_terms
    assert (terms.rank, terms.reused_tokens, terms.pull_from) == (0, 0, "")
    assert terms.recompute_ms > 0


def test_a_failed_instance_is_avoided_for_a_while() -> None:
    small = Small(prefill=2)
    small.conductor.failed("p1")
    assert [small.schedule(f"r{i}").prefill for i in range(3)] == ["p2"] * 3
    small.clock.now += 6
    assert small.schedule("later").prefill == "p1"


def test_the_only_instance_is_used_even_if_it_failed() -> None:
    small = Small(prefill=1)
    small.conductor.failed("p1")
    assert small.schedule(avoid=frozenset({"p1"})).prefill == "p1"


def test_instances_that_cannot_read_each_others_kv_are_not_paired() -> None:
    small = Small(prefill=1, decode=1)
    small.put(instance("p9", Role.PREFILL, "np9", namespace="other"))
    assert [small.schedule(f"r{i}").prefill for i in range(3)] == ["p1"] * 3


def test_what_cannot_be_served_says_why() -> None:
    with pytest.raises(NoInstance, match="none is registered"):
        Small(prefill=0, decode=0).schedule()
    with pytest.raises(NoInstance, match="1 for prefill, 0 for decode"):
        Small(prefill=1, decode=0).schedule()
    with pytest.raises(ContextLengthExceeded, match=r"10005.*10000"):
        Small().schedule(tokens=9_995)


def test_a_prompt_that_fits_only_one_instance_goes_there() -> None:
    small = Small(prefill=1, decode=1)
    small.put(instance("p2", Role.PREFILL, "np2", context_tokens=50_000))
    small.put(instance("d2", Role.DECODE, "nd2", context_tokens=50_000))
    decision = small.schedule(tokens=20_000)
    assert (decision.prefill, decision.decode) == ("p2", "d2")


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    assert Small().schedule(tokens=9_000, max_tokens=None).max_tokens == 1_000


# --- other policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves(policy: str) -> None:
    small = Small(prefill=3, decode=2, policy=policy)
    small.hold("np2", PROMPT)
    chosen = {small.schedule(f"r{i}", tokens=PROMPT).prefill for i in range(20)}
    assert chosen <= {"p1", "p2", "p3"}
    assert len(small.conductor.ledger) == 20


def test_only_algorithm1_pulls() -> None:
    for policy in set(POLICIES) - {"algorithm1"}:
        small = Small(prefill=2, policy=policy)
        small.hold("nd1", PROMPT)
        assert small.schedule(tokens=PROMPT).prefill_sources == []


def test_round_robin_takes_turns() -> None:
    small = Small(prefill=3, decode=2, policy="round-robin")
    decisions = [small.schedule(f"r{i}") for i in range(4)]
    assert [d.prefill for d in decisions] == ["p1", "p2", "p3", "p1"]
    assert [d.decode for d in decisions] == ["d1", "d2", "d1", "d2"]


def test_prefix_only_ignores_the_queue_and_least_load_the_prefix() -> None:
    for policy, expected in (("prefix-only", "p1"), ("least-load", "p2")):
        small = Small(prefill=2, policy=policy)
        small.hold("np1", PROMPT)
        small.schedule("a", tokens=PROMPT + text(5000, 4000))
        first = small.conductor.ledger.get("a")
        assert first is not None
        assert first.decision.prefill == "p1"
        assert small.schedule("b", tokens=PROMPT).prefill == expected


def test_random_is_repeatable() -> None:
    def run() -> list[str]:
        small = Small(prefill=3, policy="random")
        return [small.schedule(f"r{i}").prefill for i in range(10)]

    assert run() == run()
    assert len(set(run())) > 1
