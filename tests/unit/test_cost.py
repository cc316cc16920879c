"""The estimators learn what they are shown, quickly, and survive nonsense."""

from __future__ import annotations

import math
import random

import pytest

from mooncaked.conductor.cost import Accuracy, Average, Estimators, PrefillModel, StepModel
from mooncaked.conductor.messages import PrefillSeen
from mooncaked.conductor.regression import Regression
from mooncaked.types import Role
from tests.unit.conductors import Small, instance, text


def a800(n: int, p: int) -> float:
    """A prefill of a 70B model on eight GPUs, in ms: a published fit."""
    return 43.9 + 0.1106 * (n - p) + 7.576e-7 * (n * n - p * p)


def laptop(n: int, p: int) -> float:
    """A small model on two slow cores."""
    return 150.0 + 7.0 * (n - p) + 1e-4 * (n * n - p * p)


@pytest.mark.parametrize("machine", [a800, laptop])
def test_prefill_is_learnt_from_thirty_noisy_samples(machine: object) -> None:
    rng, model = random.Random(1), PrefillModel()
    for _ in range(30):
        n = rng.randrange(50, 20_000)
        p = rng.randrange(0, n)
        model.learn(n, p, machine(n, p) * rng.uniform(0.9, 1.1))  # type: ignore[operator]
    for n, p in ((500, 0), (5000, 0), (5000, 4500), (15_000, 10_000)):
        assert model.predict(n, p) == pytest.approx(machine(n, p), rel=0.2)  # type: ignore[operator]
    assert model.fit.error < 0.25


def test_samples_of_one_length_scale_all_others_sanely() -> None:
    model = PrefillModel()
    for _ in range(10):
        model.learn(2100, 0, 16_000.0)
    assert model.predict(2100, 0) == pytest.approx(16_000, rel=0.05)
    assert 500 < model.predict(100, 0) < 2_000
    assert 25_000 < model.predict(4000, 0) < 45_000


def test_decode_steps_are_learnt() -> None:
    rng, model = random.Random(1), StepModel()
    for _ in range(100):
        batch = rng.randrange(1, 32)
        kv = batch * rng.randrange(100, 4000)
        model.learn(batch, kv, (26.0 + 0.2 * batch + 0.0355 * kv / 1000) * rng.uniform(0.95, 1.05))
    assert model.predict(16, 40_000) == pytest.approx(26 + 3.2 + 1.42, rel=0.1)


def test_a_machine_that_changes_is_followed() -> None:
    model = PrefillModel()
    for _ in range(100):
        model.learn(1000, 0, 100.0)
    for _ in range(60):
        model.learn(1000, 0, 300.0)
    assert model.predict(1000, 0) == pytest.approx(300, rel=0.15)


def test_one_stall_does_not_spoil_a_settled_estimate() -> None:
    model = PrefillModel()
    for _ in range(50):
        model.learn(1000, 0, 100.0)
    model.learn(1000, 0, 60_000.0)
    assert model.predict(1000, 0) < 150


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -5.0, 0.0, 1e300])
def test_nonsense_is_left_out(nonsense: float) -> None:
    model = Regression((1.0, 1.0))
    before = model.predict((1.0, 1.0))
    model.learn((1.0, 1.0), nonsense)
    assert model.predict((1.0, 1.0)) == before
    assert model.samples == 0


def test_predictions_are_never_negative_and_stay_finite() -> None:
    rng, model = random.Random(3), PrefillModel()
    for _ in range(3000):
        n = rng.randrange(1, 100_000)
        model.learn(n, rng.randrange(0, n), rng.choice([0.001, 1.0, 1e5, 1e9]))
        value = model.predict(rng.randrange(1, 100_000), 0)
        assert value >= 0.0
        assert math.isfinite(value)


def test_a_new_instance_is_judged_by_its_group_and_later_by_itself() -> None:
    estimators = Estimators()
    old = estimators.of(instance("p1", Role.PREFILL, "n1"))
    new = estimators.of(instance("p2", Role.PREFILL, "n2"))
    for _ in range(20):
        old.learn_prefill(1000, 0, 70.0)
    assert new.prefill.predict(1000, 0) == pytest.approx(70, rel=0.05)
    for _ in range(8):
        new.learn_prefill(1000, 0, 700.0)
    assert new.prefill.predict(1000, 0) == pytest.approx(700, rel=0.05)
    assert old.prefill.predict(1000, 0) == pytest.approx(70, rel=0.05)


def test_links_are_learnt_one_by_one_and_new_ones_take_the_mean() -> None:
    estimators = Estimators()
    size = 100 << 20
    for _ in range(20):
        estimators.saw_pull("a", "b", size, 102.0)
        estimators.saw_pull("a", "c", size, 1002.0)
    assert estimators.pull_ms("a", "b", size, 0) == pytest.approx(102, rel=0.05)
    assert estimators.pull_ms("a", "c", size, 0) == pytest.approx(1002, rel=0.05)
    assert 102 < estimators.pull_ms("x", "y", size, 0) < 1002
    assert estimators.pull_ms("a", "b", size, 3) == pytest.approx(4 * 100 + 2, rel=0.05)


def test_small_transfers_say_nothing_about_bandwidth() -> None:
    estimators = Estimators()
    before = estimators.pull_ms("a", "b", 1 << 20, 0)
    estimators.saw_pull("a", "b", 1000, 50.0)
    assert estimators.pull_ms("a", "b", 1 << 20, 0) == before


def test_what_is_gone_is_forgotten() -> None:
    estimators = Estimators()
    estimators.saw_pull("a", "b", 1 << 20, 1000.0)
    estimators.saw_load("a", 1 << 20, 1000.0)
    first = estimators.of(instance("p1", Role.PREFILL, "a"))
    estimators.retain(["p1"], ["a", "b"])
    assert estimators.of(instance("p1", Role.PREFILL, "a")) is first
    assert estimators.link_rates
    estimators.retain([], [])
    assert estimators.of(instance("p1", Role.PREFILL, "a")) is not first
    assert not estimators.link_rates
    assert not estimators.dram_rates


def test_trust_needs_samples_and_accuracy() -> None:
    right, wrong = Accuracy(), Accuracy()
    for _ in range(15):
        right.add(100, 90)
    assert not right.trusted
    right.add(100, 90)
    assert right.trusted
    for _ in range(50):
        wrong.add(1000, 90)
    assert not wrong.trusted


def test_answers_are_as_long_as_they_used_to_be_but_no_longer_than_allowed() -> None:
    estimators = Estimators()
    for _ in range(20):
        estimators.saw_output("m", 40)
    assert estimators.output_tokens("m", 1000) == 40
    assert estimators.output_tokens("m", 10) == 10
    assert estimators.output_tokens("new", 10_000) == 256


def test_an_average_begins_with_its_first_sample() -> None:
    average = Average(5.0)
    average.add(100.0)
    assert average.value == 100.0


# --- what an observation teaches -----------------------------------------------------------------------


def test_a_pull_teaches_the_link_and_a_local_read_the_node() -> None:
    prompt = text(0, 1000)
    small = Small(prefill=1)
    small.hold("nd1", prompt)
    decision = small.schedule("a", tokens=prompt)
    assert decision.prefill_terms.pull_from == "nd1"
    seen = PrefillSeen(reused_tokens=999, wall_ms=600, prefill_ms=90.0, load_ms=502.0)
    small.conductor._lessons.prefill(decision, seen)
    estimators = small.conductor.estimators
    assert estimators.link_rates["nd1"]["np1"] == pytest.approx(999_000 / 500, rel=0.01)
    assert not estimators.dram_rates

    other = Small(prefill=1)
    other.hold("np1", prompt)
    decision = other.schedule("a", tokens=prompt)
    other.conductor._lessons.prefill(decision, seen)
    assert other.conductor.estimators.dram_rates["np1"] == pytest.approx(999_000 / 502, rel=0.01)


def test_an_engine_that_tells_no_times_is_measured_when_it_was_idle() -> None:
    small = Small(prefill=1)
    first = small.schedule("a", tokens=1000)
    second = small.schedule("b", tokens=1000)
    seen = PrefillSeen(reused_tokens=0, wall_ms=123.0)
    small.conductor._lessons.prefill(second, seen)
    fit = small.conductor.fleet.sites["p1"].models.prefill.fit
    assert fit.samples == 0, "part of the wall time was the queue"
    small.conductor._lessons.prefill(first, seen)
    assert fit.samples == 1


def test_a_slow_read_makes_pulling_no_more_attractive() -> None:
    """What is pulled is read as well; and a node that nothing was read from yet counts as the others."""
    prompt = text(0, 1000)
    small = Small(prefill=2)
    small.hold("np1", prompt)
    for _ in range(5):  # engines that take a second for a megabyte
        small.conductor.estimators.saw_load("np1", 1_000_000, 1_000.0)
    terms = {t.instance_id: t for t in small.conductor.explain(small.ask(tokens=prompt), 1).prefill}
    assert terms["p2"].pull_from == "np1"
    assert terms["p2"].load_ms == pytest.approx(terms["p1"].load_ms)
    assert small.schedule(tokens=prompt).prefill == "p1"
