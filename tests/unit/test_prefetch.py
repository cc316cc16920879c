"""Which blocks a decision has nodes bring up from their disks, by example."""

from __future__ import annotations

import msgspec

from mooncaked.conductor.messages import Prefetch
from mooncaked.keys import chain_keys
from mooncaked.types import Role, Tier
from tests.unit.conductors import FAMILY, STEP, Small, instance, text

PROMPT = text(0, 1000)
KEYS = chain_keys(FAMILY.namespace, PROMPT, STEP)


def prefetch(node_id: str, keys: list[bytes]) -> Prefetch:
    return Prefetch(node_id=node_id, namespace=FAMILY.namespace, keys=keys)


def test_what_the_chosen_nodes_have_on_disk_alone_root_first() -> None:
    small = Small(prefill=2)
    small.hold("np1", PROMPT[:100])
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    small.hold("np2", PROMPT[:200], tier=Tier.SSD)  # not chosen
    small.hold("nd1", PROMPT[:300], tier=Tier.SSD)
    decision = small.schedule(tokens=PROMPT)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert decision.prefetch == [prefetch("np1", KEYS[10:80]), prefetch("nd1", KEYS[:30])]


def test_nothing_when_all_is_in_memory() -> None:
    small = Small()
    small.hold("np1", PROMPT[:800])
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    assert small.schedule(tokens=PROMPT).prefetch == []


def test_nothing_beyond_a_gap_and_nothing_for_nodes_without_disks() -> None:
    small = Small(prefill=1)
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    small.forget("np1", KEYS[5])
    small.hold("nd1", PROMPT[:300])
    assert small.schedule(tokens=PROMPT).prefetch == [prefetch("np1", KEYS[:5])]


def test_one_order_for_two_instances_on_one_node() -> None:
    small = Small(prefill=0, decode=0)
    small.put(instance("p", Role.PREFILL, "n"))
    small.put(instance("d", Role.DECODE, "n"))
    small.hold("n", PROMPT[:800], tier=Tier.SSD)
    assert small.schedule(tokens=PROMPT).prefetch == [prefetch("n", KEYS[:80])]


def test_a_node_that_is_away_is_told_nothing() -> None:
    small = Small(prefill=1)
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    small.conductor.fleet.set_away(frozenset({"np1"}))
    assert small.schedule(tokens=PROMPT).prefetch == []


def test_who_decides_without_leading_orders_nothing() -> None:
    small = Small(prefill=1)
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    assert small.conductor.schedule(small.ask(tokens=PROMPT), 0, degraded=True).prefetch == []


def test_a_decode_that_moves_has_its_new_node_prefetch() -> None:
    small = Small(prefill=1, decode=2)
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    small.hold("nd1", PROMPT[:300], tier=Tier.SSD)
    small.hold("nd2", PROMPT[:300], tier=Tier.SSD)
    first = small.schedule(tokens=PROMPT)
    again = small.schedule(tokens=PROMPT, prefilled_on="p1")
    assert (again.decode, again.prefetch) == (first.decode, [])
    moved = small.schedule(tokens=PROMPT, prefilled_on="p1", avoid=frozenset({first.decode}))
    assert moved.decode != first.decode
    assert moved.prefetch == [prefetch(f"n{moved.decode}", KEYS[:30])]


def test_what_is_reserved_and_what_is_explained_name_no_blocks() -> None:
    small = Small(prefill=1)
    small.hold("np1", PROMPT[:800], tier=Tier.SSD)
    small.schedule("r", tokens=PROMPT)
    entry = small.conductor.ledger.get("r")
    assert entry is not None
    assert entry.decision.prefetch == []
    said = msgspec.to_builtins(small.conductor.explain(small.ask(tokens=PROMPT), 1).decision)
    assert "prefetch" not in said
