"""Reservations add up, end, and expire."""

from __future__ import annotations

import pytest

from tests.unit.conductors import Small, text


def test_a_queue_is_the_sum_of_what_waits_and_shrinks_with_time() -> None:
    small = Small(prefill=1)
    first = small.schedule("a", tokens=1000).prefill_terms.prefill_ms
    load = small.conductor.ledger.load("p1")
    assert load.queue_ms(small.clock.now * 1000) == pytest.approx(first)
    small.schedule("b", tokens=1000)
    small.clock.now += 0.2
    assert load.queue_ms(small.clock.now * 1000) == pytest.approx(2 * first - 200)


def test_a_prefill_that_takes_longer_than_predicted_hides_nothing_behind_it() -> None:
    small = Small(prefill=1)
    cost = small.schedule("a", tokens=1000).prefill_terms.prefill_ms
    small.schedule("b", tokens=1000)
    small.clock.now += 100
    load = small.conductor.ledger.load("p1")
    assert load.queue_ms(small.clock.now * 1000) == pytest.approx(cost), "b has not begun"
    small.conductor.prefill_done("a")
    assert load.queue_ms(small.clock.now * 1000) == pytest.approx(cost), "b begins now"


def test_one_that_gives_up_in_the_queue_shortens_it() -> None:
    small = Small(prefill=1)
    cost = small.schedule("a", tokens=1000).prefill_terms.prefill_ms
    small.schedule("b", tokens=1000)
    small.schedule("c", tokens=1000)
    small.conductor.release("b")
    load = small.conductor.ledger.load("p1")
    assert load.queue_ms(small.clock.now * 1000) == pytest.approx(2 * cost)


def test_when_all_is_done_nothing_is_left() -> None:
    small = Small(prefill=2, decode=2)
    for i in range(20):
        small.schedule(f"r{i}", tokens=text(100 * i, 95))
    for i in range(0, 20, 2):
        small.conductor.prefill_done(f"r{i}")
    for i in range(20):
        assert small.conductor.release(f"r{i}")
        small.conductor.ledger.check_integrity()
    for name in ("p1", "p2", "d1", "d2"):
        load = small.conductor.ledger.load(name)
        assert (load.prefill, load.decode, load.kv_tokens, load.prefill_tokens) == ({}, {}, 0, 0)
        assert (load.prefill_ms, load.free_at_ms, load.behind_ms) == (0.0, 0.0, 0.0)


def test_releasing_twice_or_what_never_was_changes_nothing() -> None:
    small = Small()
    small.schedule("a")
    assert small.conductor.release("a") is True
    assert small.conductor.release("a") is False
    assert small.conductor.release("never") is False
    small.conductor.prefill_done("never")
    small.conductor.ledger.check_integrity()


def test_scheduling_again_replaces_the_reservation() -> None:
    small = Small()
    small.schedule("a")
    small.schedule("a")
    assert len(small.conductor.ledger) == 1
    small.conductor.release("a")
    assert small.conductor.ledger.load("d1").kv_tokens == 0


def test_a_reservation_whose_gateway_died_expires() -> None:
    small = Small(prefill=1)
    small.schedule("lost")
    small.clock.now += 599
    small.schedule("a")
    assert len(small.conductor.ledger) == 2
    small.clock.now += 2
    small.schedule("b")
    assert small.conductor.ledger.get("lost") is None
    assert len(small.conductor.ledger) == 2


def test_what_will_be_decoding_when_a_prefill_ends() -> None:
    small = Small(prefill=2)
    ledger, now_ms = small.conductor.ledger, small.clock.now * 1000
    first = small.schedule("a", tokens=1000)
    assert ledger.decode_at("d1", now_ms) == (0, 0), "still in prefill"
    assert ledger.decode_at("d1", now_ms + first.ttft_ms) == (1, 1010)
    assert ledger.decode_at("d1", now_ms + first.ttft_ms, skip="a") == (0, 0)
    over_ms = first.ttft_ms + first.tbt_ms * first.expected_tokens
    assert ledger.decode_at("d1", now_ms + over_ms + 1) == (0, 0), "it has ended by then"


def test_waiting_for_kv_room() -> None:
    small = Small(prefill=2)
    ledger, now_ms = small.conductor.ledger, small.clock.now * 1000
    first = small.schedule("a", tokens=1000)
    ends_ms = now_ms + first.ttft_ms + first.tbt_ms * first.expected_tokens
    assert ledger.room_wait_ms("d1", 500, 2000, now_ms, "") == 0.0
    assert ledger.room_wait_ms("d1", 1500, 2000, now_ms, "") == pytest.approx(ends_ms - now_ms)
    assert ledger.room_wait_ms("d1", 1500, 2000, now_ms, skip="a") == 0.0


def test_an_instance_that_goes_keeps_its_load_until_its_requests_have_ended() -> None:
    small = Small(prefill=2)
    decision = small.schedule("a")
    del small.instances[decision.prefill]
    small.conductor.update(small.instances, small.nodes)
    small.conductor.release("a")
    small.conductor.ledger.check_integrity()
