"""The arithmetic: against a second implementation in numpy, and between file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from mooncaked.engines.reference.kv_cache import PagedKV
from mooncaked.engines.reference.model import Llama
from mooncaked.engines.reference.model_config import llama3_factors
from mooncaked.engines.reference.model_files import LoadedModel, namespace_of
from tests.engines import numpy_llama
from tests.engines.harness import load
from tests.engines.tiny_model import CONFIG, make_tensors, write_gguf, write_hf

UNIT, CHUNK = 4, 8


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], length)]


def make_llama(model: LoadedModel, blocks: int = 64) -> Llama:
    cache = PagedKV(model.config, block_tokens=UNIT, blocks=blocks, dtype=torch.float32, device="cpu")
    return Llama(model.config, model.weights, cache, chunk_tokens=CHUNK, context=blocks * UNIT)


def prefill(llama: Llama, prompt: list[int], table: list[int]) -> np.ndarray[Any, Any]:
    """Logits after the last token of `prompt`."""
    logits = None
    with torch.inference_mode():
        for number in range(-(-len(prompt) // CHUNK)):
            part = prompt[number * CHUNK : (number + 1) * CHUNK]
            last = (number + 1) * CHUNK >= len(prompt)
            logits = llama.prefill(part, number, table, last=last)
    assert logits is not None
    return logits.numpy()


def decode(llama: Llama, token: int, position: int, table: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        return llama.decode([token], [position], [table])[0].numpy()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40, 61])
def test_prefill_gives_the_logits_of_the_plain_formulas(tiny: LoadedModel, length: int) -> None:
    prompt = prompt_of(length)
    expected = numpy_llama.logits(make_tensors(CONFIG), CONFIG, prompt)[-1]
    table = [9, 3, 7, 1, 22, 11, 5, 60, 2, 30, 31, 8, 40, 41, 6, 13]
    actual = prefill(make_llama(tiny), prompt, table[: -(-length // UNIT)])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_decode_gives_the_logits_of_the_plain_formulas(tiny: LoadedModel) -> None:
    tokens = prompt_of(30)
    expected = numpy_llama.logits(make_tensors(CONFIG), CONFIG, tokens)
    llama, table = make_llama(tiny), list(range(1, 9))
    prefill(llama, tokens[:11], table)
    for position in range(11, 30):
        actual = decode(llama, tokens[position], position, table)
        np.testing.assert_allclose(actual, expected[position], rtol=1e-4, atol=1e-3)


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    config = CONFIG | {"tie_word_embeddings": False}
    prompt = prompt_of(10)
    expected = numpy_llama.logits(make_tensors(config), config, prompt)[-1]
    for path in (write_hf(tmp_path / "hf", tie_word_embeddings=False), _untied_gguf(tmp_path)):
        actual = prefill(make_llama(load(path)), prompt, [1, 2, 3])
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def _untied_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "untied.gguf", tie_word_embeddings=False)


def test_every_head_may_have_its_own_keys(tmp_path: Path) -> None:
    config = CONFIG | {"num_key_value_heads": 4}
    prompt = prompt_of(21)
    expected = numpy_llama.logits(make_tensors(config), config, prompt)[-1]
    model = load(write_hf(tmp_path / "mha", num_key_value_heads=4))
    np.testing.assert_allclose(
        prefill(make_llama(model), prompt, list(range(1, 7))), expected, rtol=1e-4, atol=1e-3
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_stretched_rope_frequencies(tmp_path: Path) -> None:
    """Linear and Llama 3's scaling from config.json, and the same factors from a GGUF tensor."""
    factors = list(llama3_factors(10_000.0, 16, factor=8.0, low=1.0, high=4.0, original_context=64))
    assert factors[0] == 1.0  # the fastest turns are kept
    assert factors[-1] == pytest.approx(8.0)  # the slowest are stretched in full
    assert factors == sorted(factors)
    prompt = prompt_of(40)
    cases: list[tuple[Path, list[float]]] = [
        (write_hf(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 2.0}), [2.0] * 8),
        (write_hf(tmp_path / "llama3", rope_scaling=LLAMA3), factors),
        (write_hf(tmp_path / "new", rope_parameters=LLAMA3 | {"rope_theta": 10_000.0}), factors),
        (write_gguf(tmp_path / "llama3.gguf", rope_factors=factors), factors),
    ]
    for path, wanted in cases:
        expected = numpy_llama.logits(make_tensors(CONFIG), CONFIG, prompt, wanted)[-1]
        actual = prefill(make_llama(load(path)), prompt, list(range(1, 11)))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3, err_msg=path.name)


def test_gguf_and_safetensors_give_the_same_bits(tiny: LoadedModel, tiny_gguf: Path) -> None:
    """So q and k are put back in order, and both formats can share blocks but for their fingerprints."""
    other = load(tiny_gguf)
    prompt, table = prompt_of(19), [1, 2, 3, 4, 5]
    assert np.array_equal(prefill(make_llama(tiny), prompt, table), prefill(make_llama(other), prompt, table))
    for ours, theirs in zip(tiny.weights.layers, other.weights.layers, strict=True):
        assert torch.equal(ours.qkv, theirs.qkv)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantized_matrices_are_unpacked(tmp_path: Path, kind: str) -> None:
    """The logits are those of the weights as the file has them, which the package's own unpacking gives."""
    quantization = gguf.GGMLQuantizationType[kind]
    original = make_tensors(CONFIG)
    packed = {
        name: gguf.dequantize(gguf.quantize(values, quantization), quantization)
        if values.ndim == 2
        else values
        for name, values in original.items()
    }
    prompt = prompt_of(13)
    expected = numpy_llama.logits(packed, CONFIG, prompt)[-1]
    model = load(write_gguf(tmp_path / "packed.gguf", kind=quantization))
    actual = prefill(make_llama(model), prompt, [1, 2, 3, 4])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


def test_namespace_covers_what_must_agree(tmp_path: Path, tiny: LoadedModel, tiny_gguf: Path) -> None:
    def name(model: LoadedModel, block: int = 32, chunk: int = 64, dtype: str = "float32") -> str:
        return namespace_of(model, block_tokens=block, chunk_tokens=chunk, dtype=dtype)

    others = [
        name(load(write_hf(tmp_path / "other", make_tensors(CONFIG, seed=5)))),
        name(load(write_hf(tmp_path / "theta", rope_theta=20_000.0))),
        name(load(tiny_gguf)),
        name(tiny, block=16),
        name(tiny, chunk=128),
        name(tiny, dtype="bfloat16"),
    ]
    again = write_hf(tmp_path / "again")
    assert name(load(again)) == name(tiny)
    assert len({name(tiny), *others}) == len(others) + 1
    assert all(n.isprintable() and len(n) <= 128 for n in others)
