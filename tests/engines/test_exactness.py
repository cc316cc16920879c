"""The same answer, bit by bit, however its KV came about: see the text of `mooncaked.engines.reference`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncaked.engines.reference import libraries
from mooncaked.engines.reference.model import DECODE_ROWS
from mooncaked.engines.reference.model_files import LoadedModel
from mooncaked.engines.reference.sampling import SamplingParams
from tests.engines.conftest import Start
from tests.engines.harness import Answer, Running, load
from tests.engines.memory_store import MemoryStore
from tests.engines.test_model import make_llama, prompt_of
from tests.engines.tiny_model import write_hf

LENGTHS = [1, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 32, 33, 50]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7)
GREEDY = SamplingParams(temperature=0.0)


def disaggregated(
    prefill: Running, decode: Running, prompt: list[int], count: int, **fields: object
) -> Answer:
    """The tokens of a request whose prompt one instance computes, and whose answer another one generates."""
    first = prefill.run(prompt, 1, handover=True, **fields)
    assert first.finish is not None
    assert len(first.tokens) == 1
    return decode.run(prompt, count, first_token=first.tokens[0], sources=["node-1"], **fields)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", LENGTHS)
def test_store_on_off_and_two_instances_agree(
    start: Start, store: MemoryStore, length: int, sampling: SamplingParams
) -> None:
    prompt = prompt_of(length)
    alone, with_store = start(), start(store)
    expected = alone.run(prompt, 12, sampling=sampling, ignore_eos=True).tokens
    assert len(expected) == 12
    cold = with_store.run(prompt, 12, sampling=sampling, ignore_eos=True)
    with_store.settle()
    warm = with_store.run(prompt, 12, sampling=sampling, ignore_eos=True)
    assert cold.tokens == warm.tokens == expected
    assert cold.finish is not None
    assert warm.finish is not None
    assert cold.finish.cached_tokens == 0
    assert warm.finish.cached_tokens == (length - 1) // 8 * 8  # all but the last token's chunk
    shared = MemoryStore()
    prefill, decode = start(shared), start(shared)
    moved = disaggregated(prefill, decode, prompt, 12, sampling=sampling, ignore_eos=True)
    assert moved.tokens == expected
    assert moved.finish is not None
    assert moved.finish.cached_tokens == length  # nothing was computed twice


def test_stored_kv_is_bit_identical_however_it_was_computed(start: Start) -> None:
    """Blocks of a prompt are equal whether its beginning was computed in the same run or loaded before."""
    whole, pieces = MemoryStore(), MemoryStore()
    prompt = prompt_of(60)
    first = start(whole)
    first.run(prompt, 1)
    first.settle()
    engine = start(pieces)
    for length in (9, 17, 30, 60):
        engine.run(prompt[:length], 1)
        engine.settle()
    assert engine.parts.store is not None
    assert engine.parts.store.counts.loaded_blocks > 0
    assert whole.values == pieces.values
    assert whole.parents == pieces.parents


PROMPT = prompt_of(53, seed=3)


@pytest.fixture(scope="module")
def expected_tokens(tiny: LoadedModel) -> list[int]:
    engine = Running(tiny)
    tokens = engine.run(PROMPT, 10, ignore_eos=True).tokens
    engine.close()
    return tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lost=st.sets(st.integers(0, 13)), remote=st.booleans())
def test_any_blocks_may_be_lost(
    tiny: LoadedModel, expected_tokens: list[int], lost: set[int], remote: bool
) -> None:
    """Blocks 0 to 12 are full, 13 is the tail: whichever are gone when the other instance wants them."""
    shared = MemoryStore()
    prefill, second = Running(tiny, shared), Running(tiny, shared)
    try:
        first = prefill.run(PROMPT, 1, handover=True).tokens[0]
        keys = list(shared.values)
        assert len(keys) == 14
        for index in lost:
            del shared.values[keys[index]]
        fields = {"first_token": first, "sources": ["n"]} if remote else {}
        answer = second.run(PROMPT, 10, ignore_eos=True, **fields)
        assert answer.tokens == expected_tokens
        assert answer.finish is not None
        upto = min(lost, default=14) * 4
        whole = 53 if remote and upto > 52 else min(upto, 52) // 8 * 8
        assert answer.finish.cached_tokens == whole
    finally:
        prefill.close()
        second.close()


def test_what_else_runs_changes_nothing(start: Start, store: MemoryStore) -> None:
    """More requests than rows of a step, of many lengths, at the same time; the answers are those alone."""
    prompts = [prompt_of(3 + 5 * i, seed=i) for i in range(DECODE_ROWS + 4)]
    counts = [5 + (7 * i) % 11 for i in range(len(prompts))]
    quiet = start()
    alone = [
        quiet.run(p, n, ignore_eos=True, sampling=SAMPLED).tokens
        for p, n in zip(prompts, counts, strict=True)
    ]
    busy = start(store)
    answers = [
        busy.submit(p, n, ignore_eos=True, sampling=SAMPLED) for p, n in zip(prompts, counts, strict=True)
    ]
    assert [answer.wait().tokens for answer in answers] == alone


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_smaller_types_are_as_exact(start: Start, store: MemoryStore, tiny_dir: Path, dtype: str) -> None:
    model = load(tiny_dir, dtype)
    alone = start(model=model, dtype=dtype)
    expected = alone.run(PROMPT, 10, ignore_eos=True).tokens
    prefill, decode = start(store, model=model, dtype=dtype), start(store, model=model, dtype=dtype)
    assert disaggregated(prefill, decode, PROMPT, 10, ignore_eos=True).tokens == expected
    warm = decode.run(PROMPT, 10, ignore_eos=True)
    assert warm.tokens == expected
    assert warm.finish is not None
    assert warm.finish.cached_tokens == 48
    assert len(next(iter(store.values.values()))) == 4 * model.config.kv_values_per_token() * 2


def test_a_damaged_store_would_show(start: Start, store: MemoryStore, expected_tokens: list[int]) -> None:
    """The tests above would notice if loaded KV were not used: wrong KV gives a wrong answer."""
    engine = start(store)
    assert engine.run(PROMPT, 10, ignore_eos=True).tokens == expected_tokens
    engine.settle()
    for key in store.values:
        store.damage(key)
    assert engine.run(PROMPT, 10, ignore_eos=True).tokens != expected_tokens


# --- what it rests on ------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_wherever_it_is_in_the_batch(tiny: LoadedModel) -> None:
    llama = make_llama(tiny)
    prompt, table = prompt_of(21), [1, 2, 3, 4, 5, 6]
    with torch.inference_mode():
        for number in range(3):
            llama.prefill(prompt[number * 8 : (number + 1) * 8], number, table, last=False)
        rows = []
        for place in range(DECODE_ROWS):
            others = [prompt_of(1, seed=place * 10 + i)[0] for i in range(DECODE_ROWS)]
            tokens = [*others[:place], 77, *others[place + 1 :]]
            tables = [[20 + i] * 6 for i in range(DECODE_ROWS)]
            tables[place] = table
            positions = [5 + i for i in range(DECODE_ROWS)]
            positions[place] = 21
            rows.append(llama.decode(tokens, positions, tables)[place].numpy())
        for count in range(1, DECODE_ROWS):
            rows.append(llama.decode([77] * count, [21] * count, [table] * count)[0].numpy())
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_padding_and_foreign_blocks_change_no_bit(tiny: LoadedModel) -> None:
    """What is in blocks that are not the sequence's, and in the padding's, does not matter."""
    prompt = prompt_of(10)
    results = []
    for filling, table in ((0.0, [1, 2, 3]), (3.0, [5, 9, 4]), (-1e30, [50, 1, 2])):
        llama = make_llama(tiny)
        llama._cache.data.fill_(filling)
        with torch.inference_mode():
            llama.prefill(prompt[:8], 0, table, last=False)
            logits = llama.prefill(prompt[8:], 1, table, last=True)
        assert logits is not None
        results.append(logits.numpy())
    assert all(np.array_equal(result, results[0]) for result in results)


_SCRIPT = """
import sys
from pathlib import Path
from pathlib import Path
from tests.engines.harness import Running, load
from tests.engines.memory_store import MemoryStore
from tests.engines.test_model import prompt_of
import xxhash
store = MemoryStore()
engine = Running(load(Path(sys.argv[1])), store, threads=int(sys.argv[2]), block_tokens=32, chunk_tokens=64)
tokens = engine.run(prompt_of(200), 20, ignore_eos=True).tokens
engine.close()
print(tokens, xxhash.xxh3_64_hexdigest(b"".join(store.values.values())))
"""


@pytest.mark.skipif(
    "GenuineIntel" not in libraries.read_processor(), reason="other processors have no such mode"
)
def test_the_number_of_threads_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the mode that the package asks for; in processes where nothing was computed before."""
    path = write_hf(tmp_path_factory.mktemp("wide"), hidden_size=576, intermediate_size=1536)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", _SCRIPT, str(path), str(threads)],
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for threads in (1, 2)
    }
    assert len(outputs) == 1, outputs


def test_the_mode_is_asked_for_on_intel_only_and_can_be_overridden() -> None:
    def environment(processor: str, given: dict[str, str]) -> dict[str, str]:
        libraries.ask_for_reproducible_kernels(given, processor)
        return given

    assert environment("vendor_id : GenuineIntel", {}) == {"MKL_CBWR": "AUTO,STRICT"}
    assert environment("vendor_id : GenuineIntel", {"MKL_CBWR": "AVX2"}) == {"MKL_CBWR": "AVX2"}
    assert environment("vendor_id : AuthenticAMD", {}) == {}
    assert environment("", {}) == {}


def test_threads_do_not_spin_unless_the_user_wants_it() -> None:
    mine, empty = {"OMP_WAIT_POLICY": "ACTIVE"}, {}
    for environment in (mine, empty):
        libraries.ask_for_threads_that_yield(environment)
    assert mine == {"OMP_WAIT_POLICY": "ACTIVE"}
    assert empty == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
