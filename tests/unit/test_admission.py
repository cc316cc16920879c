"""What is refused, when, and with which reason; and that wrong predictions do no harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mooncaked.conductor.admission import MODES, Forecast, Limits, admit_arrival, admit_decode
from mooncaked.conductor.messages import DecodeSeen, Observation, PrefillSeen
from mooncaked.errors import AdmissionRefused
from tests.unit.conductors import Small

LIMITS = Limits(slo_ttft_ms=1000, slo_tbt_ms=100, prefill_queue_max=10, decode_queue_batches=2)


def forecast(**changes: Any) -> Forecast:
    """A request that every mode takes, on a busy cluster whose predictions are trusted."""
    fine: dict[str, Any] = {
        "ttft_ms": 500.0,
        "ttft_trusted": True,
        "queued": 3,
        "wait_ms": 0.0,
        "tbt_now_ms": 50.0,
        "tbt_then_ms": 50.0,
        "tbt_trusted": True,
        "batch": 4,
        "batch_max": 8,
    }
    return Forecast(**(fine | changes))


@pytest.mark.parametrize("mode", MODES)
def test_what_meets_its_slos_is_taken(mode: str) -> None:
    assert admit_arrival(mode, forecast(), LIMITS) is None
    assert admit_decode(mode, forecast(), LIMITS) is None


@pytest.mark.parametrize(
    ("changes", "arrival", "decode"),
    [
        # the modes in the order off, baseline, early, predicted; the reason, or nothing
        ({"ttft_ms": 2000.0}, ["", "ttft", "ttft", "ttft"], ["", "", "", ""]),
        ({"tbt_now_ms": 200.0}, ["", "", "tbt", ""], ["", "tbt", "", "tbt"]),
        ({"tbt_then_ms": 200.0}, ["", "", "", "tbt"], ["", "", "", ""]),
        ({"queued": 10}, ["", "prefill_queue", "prefill_queue", "prefill_queue"], ["", "", "", ""]),
        ({"batch": 16}, ["", "", "decode_queue", "decode_queue"], ["", "decode_queue", "", "decode_queue"]),
        ({"ttft_ms": 2000.0, "wait_ms": 1600.0}, ["", "kv_room", "kv_room", "kv_room"], ["", "", "", ""]),
    ],
)
def test_who_refuses_what(changes: dict[str, Any], arrival: list[str], decode: list[str]) -> None:
    for mode, at_arrival, at_decode in zip(MODES, arrival, decode, strict=True):
        first, second = (judge(mode, forecast(**changes), LIMITS) for judge in (admit_arrival, admit_decode))
        assert (first.reason if first else "") == at_arrival, mode
        assert (second.reason if second else "") == at_decode, mode


def test_the_refusal_names_prediction_limit_and_when_to_come_back() -> None:
    refusal = admit_arrival("predicted", forecast(ttft_ms=3400.0), LIMITS)
    assert refusal is not None
    assert (refusal.predicted_ms, refusal.limit_ms, refusal.retry_after_s) == (3400.0, 1000.0, 3)
    far = admit_arrival("predicted", forecast(ttft_ms=1e9), LIMITS)
    assert far is not None
    assert far.retry_after_s == 60


def test_a_predictor_that_is_not_trusted_refuses_nothing() -> None:
    wrong = forecast(ttft_ms=1e6, tbt_now_ms=1e6, tbt_then_ms=1e6, ttft_trusted=False, tbt_trusted=False)
    for mode in MODES:
        assert admit_arrival(mode, wrong, LIMITS) is None
        assert admit_decode(mode, wrong, LIMITS) is None


def test_an_idle_instance_takes_any_request() -> None:
    """Refusing would protect nobody, and an estimator that refuses everything would never learn better."""
    idle = forecast(ttft_ms=1e6, tbt_now_ms=1e6, tbt_then_ms=1e6, queued=0, batch=0)
    for mode in MODES:
        assert admit_arrival(mode, idle, LIMITS) is None


# --- through the conductor -----------------------------------------------------------------------------


def serve(small: Small, request_id: str, prefill_ms: float, ttft_ms: float, tbt_ms: float) -> None:
    """One request from decision to end, as a gateway reports it."""
    decision = small.schedule(request_id)
    conductor = small.conductor
    seen = PrefillSeen(reused_tokens=0, wall_ms=prefill_ms, queue_ms=0, load_ms=0, prefill_ms=prefill_ms)
    conductor.observe(request_id, Observation(prefill=seen))
    conductor.schedule(small.ask(request_id, prefilled_on=decision.prefill), 1)
    conductor.observe(request_id, Observation(decode=DecodeSeen(tokens=10, tbt_ms=tbt_ms, ttft_ms=ttft_ms)))
    conductor.release(request_id)


def until_refused(take: Callable[[int], object]) -> tuple[int, AdmissionRefused]:
    """How many requests were taken before one was refused, and the refusal."""
    for i in range(50):
        try:
            take(i)
        except AdmissionRefused as refusal:
            return i, refusal
    raise AssertionError("nothing was refused")


def test_first_requests_are_not_refused_for_a_wrong_prior() -> None:
    small = Small(prefill=1, admission="predicted", slo_ttft_ms=1.0, slo_tbt_ms=0.001)
    for i in range(15):
        small.schedule(f"r{i}")


def test_after_enough_samples_the_queue_is_bounded_by_the_slo() -> None:
    small = Small(prefill=1, admission="predicted", slo_ttft_ms=1000.0)
    for i in range(30):
        serve(small, f"learn{i}", prefill_ms=200.0, ttft_ms=200.0, tbt_ms=5.0)
    taken, refusal = until_refused(lambda i: small.schedule(f"r{i}"))
    assert "first token would come too late" in str(refusal)
    assert taken in (4, 5), "five prefills of 200 ms fit into one second"
    assert len(small.conductor.ledger) == taken, "what was refused reserves nothing"


def test_a_predictor_measured_to_be_wrong_is_not_asked_any_more() -> None:
    small = Small(prefill=1, admission="predicted", slo_ttft_ms=1000.0)
    for i in range(30):  # the engine says 200 ms, the client waits for 2 s: something else takes the time
        serve(small, f"learn{i}", prefill_ms=200.0, ttft_ms=2000.0, tbt_ms=5.0)
    assert not small.conductor.estimators.ttft_trusted("m")
    for i in range(20):
        small.schedule(f"r{i}")


def test_a_decode_that_has_become_too_slow_is_refused_before_it_starts() -> None:
    small = Small(prefill=4, decode=1, admission="baseline", slo_tbt_ms=50.0)
    for i in range(30):
        serve(small, f"learn{i}", prefill_ms=10.0, ttft_ms=10.0, tbt_ms=30.0)
    for batch in range(1, 9):
        for _ in range(5):
            small.conductor.fleet.sites["d1"].models.learn_step(batch, 100 * batch, 30.0 + 10 * batch)
    decisions = [small.schedule(f"r{i}") for i in range(6)]
    _, refusal = until_refused(lambda i: small.schedule(f"r{i}", prefilled_on=decisions[i].prefill))
    assert "too slowly" in str(refusal)


def test_explain_tells_the_refusal() -> None:
    small = Small(prefill=1, admission="predicted", slo_ttft_ms=100.0)
    for i in range(30):
        serve(small, f"learn{i}", prefill_ms=200.0, ttft_ms=200.0, tbt_ms=5.0)
    small.schedule("busy")
    explanation = small.conductor.explain(small.ask("x"), 1)
    assert explanation.decision is None
    assert explanation.refusal is not None
    assert explanation.refusal.reason == "ttft"
