"""The breaker of a peer."""

from __future__ import annotations

import random

from mooncaked.transports.breaker import FIRST_S, LONGEST_S, Breaker
from tests.fakes.manual_clock import ManualClock


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.breaker = Breaker(self.clock, random.Random(1))


async def test_a_peer_that_works_is_always_tried() -> None:
    breaker = Bench().breaker
    for _ in range(100):
        assert breaker.allow()
        breaker.succeeded()


async def test_after_a_failure_there_is_a_pause_then_one_try() -> None:
    bench = Bench()
    assert bench.breaker.allow()
    assert bench.breaker.failed()  # news
    assert not bench.breaker.allow()
    await bench.clock.advance(FIRST_S)
    assert bench.breaker.allow()
    assert not bench.breaker.allow()  # one at a time
    bench.breaker.succeeded()
    assert bench.breaker.allow()
    assert bench.breaker.allow()


async def test_pauses_grow_up_to_a_limit() -> None:
    bench = Bench()
    bench.breaker.failed()
    pauses = []
    for _ in range(12):
        pauses.append(bench.breaker.wait_s())
        await bench.clock.advance(pauses[-1])
        assert bench.breaker.allow()
        assert not bench.breaker.failed()  # no news any more
    assert pauses[0] <= FIRST_S
    assert pauses[3] > pauses[1] > pauses[0]
    assert max(pauses) <= LONGEST_S
    assert min(pauses[8:]) >= 0.75 * LONGEST_S
    assert len(set(pauses[8:])) > 1  # jitter


async def test_a_try_that_says_nothing_leaves_the_next_one() -> None:
    bench = Bench()
    bench.breaker.failed()
    await bench.clock.advance(FIRST_S)
    assert bench.breaker.allow()
    bench.breaker.undecided()
    assert bench.breaker.allow()
