"""What runs next, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.engines.reference.kv_cache import BlockAllocator
from mooncaked.engines.reference.scheduler import Scheduler
from mooncaked.engines.reference.sequence import GenerationRequest, Sequence, State, kv_tokens
from mooncaked.errors import IntegrityError

UNIT, CHUNK = 4, 8


def make(blocks: int = 20, running_max: int = 4) -> Scheduler:
    return Scheduler(BlockAllocator(blocks), block_tokens=UNIT, chunk_tokens=CHUNK, running_max=running_max)


def sequence(prompt: int, max_tokens: int = 1, **fields: object) -> Sequence:
    request = GenerationRequest(request_id="r", prompt=[1] * prompt, max_tokens=max_tokens, **fields)
    return Sequence(request=request, sink=lambda _: None, arrived_s=0.0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "handover", "blocks"),
    [
        (1, 1, False, 1),
        (4, 1, False, 1),
        (4, 2, False, 2),
        (5, 4, False, 2),
        (5, 1, True, 2),
        (4, 1, True, 1),
    ],
)
def test_blocks_for_a_whole_life(prompt: int, max_tokens: int, handover: bool, blocks: int) -> None:
    """The token generated last is never computed, so it needs no room."""
    assert make().blocks_needed(sequence(prompt, max_tokens, handover=handover)) == blocks


def test_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    scheduler = make(blocks=5)
    large, larger, small = sequence(12), sequence(16), sequence(1)
    for one in (large, larger, small):
        scheduler.add(one)
    assert scheduler.admit() == [large]
    assert list(scheduler.waiting) == [larger, small]
    scheduler.release(large)
    assert scheduler.admit() == [larger, small]
    scheduler.check_integrity()


def test_no_more_run_than_may() -> None:
    scheduler = make(running_max=2)
    for _ in range(3):
        scheduler.add(sequence(1))
    assert len(scheduler.admit()) == 2
    assert scheduler.admit() == []


@pytest.mark.parametrize(
    ("prompt", "loaded", "first_token", "computed", "state"),
    [
        (20, 0, None, 0, State.PREFILL),
        (20, 7, None, 0, State.PREFILL),  # less than a chunk is of no use
        (20, 12, None, 8, State.PREFILL),
        (20, 20, None, 16, State.PREFILL),  # the last token's logits are needed
        (16, 16, None, 8, State.PREFILL),
        (20, 20, 5, 20, State.DECODE),
        (20, 16, 5, 16, State.PREFILL),  # the tail is gone: its chunk is computed
        (16, 16, 5, 16, State.DECODE),
    ],
)
def test_where_computing_goes_on(
    prompt: int, loaded: int, first_token: int | None, computed: int, state: State
) -> None:
    scheduler, one = make(), sequence(prompt, first_token=first_token)
    scheduler.add(one)
    scheduler.admit()
    scheduler.loaded(one, loaded)
    assert (one.computed, one.cached_tokens, one.state) == (computed, computed, state)


def test_each_step_has_one_chunk_of_the_oldest_prompt_and_all_that_decode() -> None:
    scheduler = make(running_max=4)
    first, second, third = sequence(20), sequence(30), sequence(4)
    for one in (first, second, third):
        scheduler.add(one)
    scheduler.admit()
    third.state = State.DECODE
    scheduler.loaded(second, 0)
    step = scheduler.next_step()
    assert step.decode == [third]
    assert step.chunk is not None
    assert (step.chunk.sequence, step.chunk.number, step.chunk.end, step.chunk.last) == (second, 0, 8, False)
    scheduler.loaded(first, 16)  # it is older, but was loading until now
    step = scheduler.next_step()
    assert step.chunk is not None
    assert (step.chunk.sequence, step.chunk.number, step.chunk.end, step.chunk.last) == (first, 2, 20, True)


def test_a_sequence_that_never_began_can_end() -> None:
    scheduler, waiting, unknown = make(), sequence(1), sequence(1)
    scheduler.add(waiting)
    scheduler.release(waiting)
    scheduler.release(unknown)
    assert not scheduler.waiting
    assert scheduler.next_step().chunk is None


def test_integrity_tells_shared_blocks() -> None:
    scheduler, one, other = make(), sequence(8), sequence(8)
    scheduler.add(one)
    scheduler.add(other)
    scheduler.admit()
    scheduler.check_integrity()
    other.table[0] = one.table[0]
    with pytest.raises(IntegrityError, match="2 sequences"):
        scheduler.check_integrity()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=30))
def test_everything_that_fits_is_served_in_the_end(sizes: list[tuple[int, int]]) -> None:
    scheduler = make(blocks=16, running_max=3)
    fitting = [sequence(p, m) for p, m in sizes if kv_tokens(sequence(p, m).request) <= 64]
    for one in fitting:
        scheduler.add(one)
    served = []
    while scheduler.waiting or scheduler.running:
        for one in scheduler.admit():
            scheduler.loaded(one, 0)
        step = scheduler.next_step()
        assert step.chunk is not None or step.decode
        if step.chunk is not None:
            step.chunk.sequence.computed = step.chunk.end
            if step.chunk.last:
                step.chunk.sequence.state = State.DECODE
        for one in step.decode:
            one.output.append(0)
            if len(one.output) == one.request.max_tokens:
                scheduler.release(one)
                served.append(one)
        scheduler.check_integrity()
    assert sorted(map(id, served)) == sorted(map(id, fitting))
