"""From logits to a token."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.engines.reference.sampling import SamplingParams, choose, draw

LOGITS = torch.tensor([0.0, 1.0, 3.0, 2.0, -1.0])


def shares(params: SamplingParams, count: int = 3000) -> dict[int, float]:
    drawn = Counter(choose(LOGITS, params, index) for index in range(count))
    return {token: n / count for token, n in drawn.items()}


def test_temperature_zero_takes_the_likeliest() -> None:
    assert {choose(LOGITS, SamplingParams(temperature=0.0, seed=s), s) for s in range(20)} == {2}


def test_draws_follow_the_probabilities() -> None:
    found = shares(SamplingParams(seed=3))
    expected = torch.softmax(LOGITS, 0)
    for token in range(5):
        assert found.get(token, 0.0) == pytest.approx(float(expected[token]), abs=0.03)


def test_temperature_flattens() -> None:
    hot, cold = shares(SamplingParams(temperature=5.0)), shares(SamplingParams(temperature=0.2))
    assert hot[2] < 0.4 < 0.95 < cold[2]


def test_top_k_and_top_p_leave_the_likeliest() -> None:
    assert set(shares(SamplingParams(top_k=2))) == {2, 3}
    assert set(shares(SamplingParams(top_p=0.6))) == {2}  # the token that reaches the share is the last
    assert set(shares(SamplingParams(top_p=0.8))) == {2, 3}
    assert set(shares(SamplingParams(top_k=3, top_p=0.7))) == {2, 3}
    assert set(shares(SamplingParams(top_k=1, temperature=9.0))) == {2}


def test_top_p_of_a_flat_distribution_needs_many_tokens() -> None:
    flat = torch.zeros(5000)
    drawn = {choose(flat, SamplingParams(top_p=0.9, seed=1), i) for i in range(300)}
    assert len(drawn) > 250


def test_a_draw_depends_on_seed_and_index_only() -> None:
    params = SamplingParams(seed=11)
    tokens = [choose(LOGITS, params, index) for index in range(30)]
    assert tokens == [choose(LOGITS, params, index) for index in range(30)]
    assert tokens != [choose(LOGITS, SamplingParams(seed=12), index) for index in range(30)]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**32))
def test_draws_are_in_range(seed: int, index: int) -> None:
    assert 0.0 <= draw(seed, index) < 1.0


def test_logits_that_are_no_numbers_still_give_a_token() -> None:
    """A model gone wrong must not end the engine."""
    broken = torch.full((5,), float("nan"))
    assert 0 <= choose(broken, SamplingParams(), 0) < 5
    assert 0 <= choose(broken, SamplingParams(top_p=0.5, top_k=3), 0) < 5
