"""The step thread: who waits, who is told what, and that nothing is left behind."""

from __future__ import annotations

import pytest

from mooncaked.engines.reference.model_files import LoadedModel
from mooncaked.engines.reference.sequence import State
from mooncaked.errors import ContextLengthExceeded, Draining, MooncakeError, Overloaded
from tests.engines.conftest import Start
from tests.engines.harness import Answer, Running
from tests.engines.memory_store import MemoryStore
from tests.engines.test_model import prompt_of
from tests.engines.tiny_model import EOS

PROMPT = prompt_of(20)


def until_running(engine: Running, answer: Answer) -> None:
    """Until it has its first token, so that it holds blocks."""
    assert answer.next().token is not None


def test_an_answer_ends_at_its_length_or_at_the_end_token(start: Start, tiny: LoadedModel) -> None:
    engine = start()
    free = engine.run(PROMPT, 200, ignore_eos=True)
    assert free.finish is not None
    assert (free.finish.reason, len(free.tokens)) == ("length", 200)
    assert EOS not in free.tokens[:5]
    tiny_eos = frozenset([free.tokens[4]])
    engine.engine._eos = tiny_eos
    ended = engine.run(PROMPT, 200)
    assert ended.finish is not None
    assert ended.finish.reason == "stop"
    assert ended.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_a_first_token_from_elsewhere_is_passed_on_before_anything_else(
    start: Start, store: MemoryStore
) -> None:
    engine = start(store)
    store.gate.clear()
    answer = engine.submit(PROMPT, 3, first_token=9, sources=["n"])
    assert answer.next().token == 9  # although the store does not answer
    store.gate.set()
    assert len(answer.wait().tokens) == 3


@pytest.mark.parametrize(("first", "max_tokens", "reason"), [(EOS, 9, "stop"), (7, 1, "length")])
def test_a_first_token_may_be_the_last(start: Start, first: int, max_tokens: int, reason: str) -> None:
    answer = start().run(PROMPT, max_tokens, first_token=first)
    assert answer.finish is not None
    assert (answer.tokens, answer.finish.reason) == ([first], reason)


def test_a_handover_ends_after_its_blocks_are_stored(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    store.gate.clear()
    answer = engine.submit(PROMPT[:7], 5, handover=True)  # too short to load anything
    answer.next()
    assert answer.news.empty()
    assert not store.values
    store.gate.set()
    assert answer.wait().finish is not None
    assert len(store.values) == 2  # a full block and the tail
    assert answer.finish is not None
    assert answer.finish.timing.store_ms > 0
    assert len(answer.tokens) == 1


def test_other_answers_do_not_wait_for_the_store(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    store.gate.clear()
    assert engine.run(PROMPT[:7], 3, ignore_eos=True).finish is not None
    assert not store.values
    store.gate.set()


def test_requests_wait_for_room_and_get_it(start: Start, tiny: LoadedModel) -> None:
    """A cache of three such requests serves ten, and all give what each gives alone."""
    block = tiny.config.kv_values_per_token() * 4 * 4
    engine = start(kv_memory=block * 3 * 10)
    alone = start().run(PROMPT, 20, ignore_eos=True).tokens
    answers = [engine.submit(PROMPT, 20, ignore_eos=True) for _ in range(10)]
    assert all(answer.wait().tokens == alone for answer in answers)
    queued = [a.finish.timing.queue_ms for a in answers if a.finish is not None]
    assert queued[-1] > queued[0]


def test_what_can_never_fit_is_refused(start: Start, tiny: LoadedModel) -> None:
    block = tiny.config.kv_values_per_token() * 4 * 4
    engine = start(kv_memory=block * 10)
    assert engine.engine.context_tokens == 40
    assert engine.run(PROMPT, 20, ignore_eos=True).finish is not None
    with pytest.raises(ContextLengthExceeded, match=r"41 tokens .* context of 40"):
        engine.submit(PROMPT, 21)
    assert start().engine.context_tokens == 512  # the model's own


def test_a_cancelled_request_frees_its_blocks(start: Start) -> None:
    engine = start()
    answer = engine.submit(PROMPT, 400, ignore_eos=True)
    until_running(engine, answer)
    assert answer.sequence is not None
    engine.engine.cancel(answer.sequence)
    answer.wait()
    assert answer.finish is not None
    assert answer.finish.reason == "cancelled"
    assert len(answer.tokens) < 400


def test_cancelled_while_it_waits(start: Start, tiny: LoadedModel) -> None:
    engine = start(batch_max=1)
    running = engine.submit(PROMPT, 300, ignore_eos=True)
    waiting = engine.submit(PROMPT, 5, ignore_eos=True)
    assert waiting.sequence is not None
    engine.engine.cancel(waiting.sequence)
    assert waiting.wait().tokens == []
    assert len(running.wait().tokens) == 300


def test_blocks_that_the_store_writes_to_are_kept_until_it_is_done(start: Start, store: MemoryStore) -> None:
    """Cancelled while loading: the store still fills the blocks, so nobody else may have them yet."""
    engine = start(store)
    store.gate.clear()
    answer = engine.submit(PROMPT, 5)
    sequence = answer.sequence
    assert sequence is not None
    while engine.on_step_thread(lambda: sequence.state) is State.WAITING:
        continue
    engine.engine.cancel(sequence)
    assert answer.wait().tokens == []
    held = engine.on_step_thread(lambda: (list(sequence.table), sequence.busy))
    assert held[0]
    assert held[1] == 1
    store.gate.set()
    engine.settle()
    assert engine.parts.scheduler.running == []


def test_one_bad_step_ends_one_request(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    good = engine.submit(PROMPT, 60, ignore_eos=True)
    until_running(engine, good)
    compute = engine.engine._model.prefill

    def fail(tokens: list[int], *arguments: object, **fields: object) -> object:
        if tokens[0] == 99:
            raise RuntimeError("out of memory")
        return compute(tokens, *arguments, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.engine._model, "prefill", fail)
    bad = engine.submit([99] * 20, 5).wait()
    assert isinstance(bad.error, MooncakeError)
    assert "RuntimeError" in str(bad.error)
    assert len(good.wait().tokens) == 60
    assert engine.run(PROMPT, 5, ignore_eos=True).finish is not None


def test_there_is_a_limit_to_open_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.engines.reference.engine.REQUESTS_MAX", 2)
    engine = start()
    answers = [engine.submit(PROMPT, 50, ignore_eos=True) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests"):
        engine.submit(PROMPT, 5)
    for answer in answers:
        answer.wait()
    engine.settle()
    assert engine.run(PROMPT, 5).finish is not None


def test_draining_finishes_what_runs_and_takes_nothing_new(start: Start) -> None:
    engine = start()
    answer = engine.submit(PROMPT, 40, ignore_eos=True)
    assert not engine.engine.drain(0.0)
    with pytest.raises(Draining):
        engine.submit(PROMPT, 5)
    assert len(answer.wait().tokens) == 40
    assert engine.engine.drain(60)


def test_closing_breaks_off_what_runs(start: Start) -> None:
    engine = start()
    answers = [engine.submit(PROMPT, 480, ignore_eos=True) for _ in range(2)]
    until_running(engine, answers[0])
    engine.engine.close()
    assert all(isinstance(answer.wait().error, Draining) for answer in answers)
    assert not engine.engine.alive
    with pytest.raises(Draining):
        engine.submit(PROMPT, 5)


def test_the_time_is_accounted_for(start: Start, store: MemoryStore) -> None:
    engine = start(store)
    finish = engine.run(PROMPT, 3).finish
    assert finish is not None
    assert finish.timing.prefill_ms > 0
    assert finish.timing.load_ms > 0
    assert finish.timing.store_ms == 0
