"""The fast sums over many candidates are those that the terms of one candidate give."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncaked.conductor.policies import PrefillCosts
from mooncaked.types import Role
from tests.unit.conductors import STEP, Small, instance, text

PROMPT = text(0, 8 * STEP + 3)
depths = st.integers(0, 8)


@st.composite
def clusters(draw: st.DrawFn) -> Small:
    """A few instances with prefixes, queues and measured speeds."""
    small = Small(prefill=4, decode=4, threshold=draw(st.sampled_from([1.0, 2.0, 4.0])))
    small.put(instance("d5", Role.DECODE, "np1", kv_capacity_tokens=draw(st.sampled_from([50, 300, 0]))))
    nodes = sorted(small.nodes)
    for node_id in nodes:
        if depth := draw(depths):
            small.hold(node_id, PROMPT[: depth * STEP])
    estimators = small.conductor.estimators
    for _ in range(draw(st.integers(0, 4))):
        source, target = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        estimators.saw_pull(source, target, 1 << 20, draw(st.floats(0.1, 1000)))
        estimators.saw_load(target, 1 << 20, draw(st.floats(0.1, 1000)))
    for name in ("p1", "p2", "d1", "d2"):
        small.learn_prefill(name, draw(st.floats(0.01, 20)), samples=draw(st.integers(0, 12)))
        for i in range(draw(st.integers(0, 10))):
            small.conductor.fleet.sites[name].models.learn_step(i + 1, 50 * i, draw(st.floats(0.1, 200)))
    for i in range(draw(st.integers(0, 8))):
        small.schedule(f"r{i}", tokens=draw(st.sampled_from([PROMPT, text(9000, 200)])))
        small.clock.now += draw(st.floats(0, 1))
        if draw(st.booleans()):
            small.conductor.prefill_done(f"r{i}")
    return small


@settings(max_examples=100, deadline=None)
@given(small=clusters())
def test_prefill_sums(small: Small) -> None:
    scheduler, now_ms = small.conductor.scheduler, small.clock.now * 1000
    sites = [s for s in small.conductor.fleet.sites.values() if s.record.role is Role.PREFILL]
    ask = small.ask("new", tokens=PROMPT)
    found = scheduler.find(ask, sites[0].family)
    costs = PrefillCosts()
    scheduler._prefill_sums(ask.prompt_tokens, sites, found, now_ms, costs)
    for i, site in enumerate(sites):
        terms = scheduler.prefill_terms(ask, site, found, now_ms)
        assert costs.own_tokens[i] == terms.own_tokens
        assert costs.queue_ms[i] == pytest.approx(terms.queue_ms)
        assert costs.ttft_ms[i] == pytest.approx(terms.ttft_ms)


@settings(max_examples=100, deadline=None)
@given(small=clusters(), expected=st.integers(1, 100), known=st.booleans())
def test_decode_sums(small: Small, expected: int, known: bool) -> None:
    scheduler, now_ms = small.conductor.scheduler, small.clock.now * 1000
    fleet = small.conductor.fleet
    sites = [s for s in fleet.sites.values() if s.record.role is Role.DECODE]
    ask = small.ask("r0" if known else "new", tokens=PROMPT)
    found = scheduler.find(ask, sites[0].family)
    prefill = scheduler.prefill_terms(ask, fleet.sites["p1"], found, now_ms)
    sums = scheduler._decode_sums(ask, sites, "np1", found, expected)
    for total_ms, site in zip(sums, sites, strict=True):
        terms = scheduler.decode_terms(ask, site, prefill, found, expected, now_ms)
        assert total_ms == pytest.approx(terms.total_ms if terms.room else math.inf)
