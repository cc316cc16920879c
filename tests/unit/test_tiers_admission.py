"""What is worth a place on a disk, and how fast it may be written there."""

from __future__ import annotations

from mooncaked.block import Block
from mooncaked.tiers.admission import ALL, Admission
from mooncaked.tiers.rate import BURST_S, Rate


def block(key: bytes = b"k", uses: int = 0, **fields: float) -> Block:
    return Block("ns", key, 1, None, b"", 0, uses=uses, **fields)  # type: ignore[arg-type]


def test_a_block_that_was_not_used_again_is_not_worth_it() -> None:
    assert not Admission().admits(block())
    assert Admission().admits(block(uses=1))
    assert Admission(ALL).admits(block())


def test_a_block_that_had_to_go_and_came_again_is() -> None:
    admission = Admission()
    admission.evicted("ns", b"k")
    assert admission.admits(block())
    assert not admission.admits(block(b"other"))
    admission.evicted("elsewhere", b"other")
    assert not admission.admits(block(b"other")), "namespaces have nothing to do with each other"


def test_it_is_remembered_for_a_while_and_takes_a_bounded_memory() -> None:
    admission = Admission(kept_max=100)
    admission.evicted("ns", b"k")
    for number in range(99):
        admission.evicted("ns", b"%d" % number)
    assert admission.admits(block())
    for number in range(10_000):
        admission.evicted("ns", b"more %d" % number)
        assert len(admission) <= 200
    assert not admission.admits(block())


def test_a_block_with_a_time_to_live_stays_off_the_disk() -> None:
    assert not Admission(ALL).admits(block(uses=3, expires_at_s=5.0))


def test_a_rate_lets_so_many_bytes_pass_in_a_second() -> None:
    rate, now, passed = Rate(1000.0), 50.0, 0
    while now < 60.0:
        now += 0.01
        if rate.free(now):
            rate.take(70)
            passed += 70
    assert 10_000 <= passed <= 10_000 + 1000 * BURST_S + 70


def test_a_rate_makes_up_for_no_more_than_a_moment() -> None:
    rate = Rate(1000.0)
    assert rate.free(1.0)
    assert rate.free(1000.0)
    rate.take(round(1000 * BURST_S))
    assert not rate.free(1000.0)


def test_without_a_rate_everything_passes() -> None:
    rate = Rate(0.0)
    rate.take(1 << 60)
    assert rate.free(1.0)
    rate.set(10.0)
    rate.take(1000)
    assert not rate.free(1.0)
