"""The default model: it knows what it should, its numbers are right, and the store changes no answer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from mooncaked.engines.reference.model_files import LoadedModel, namespace_of
from tests.engines import numpy_llama
from tests.engines.conftest import Start
from tests.engines.memory_store import MemoryStore
from tests.engines.serving import serving

REAL = {"block_tokens": 32, "chunk_tokens": 64, "kv_memory": 256 << 20}
PROSE = Path(__file__).parents[2] / "LICENSE"


def ids(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special=False, limit=10_000, model="real")


def chat(model: LoadedModel, question: str) -> list[int]:
    return ids(model, model.template.render([{"role": "user", "content": question}]))


async def test_it_knows_the_capital_of_france(start: Start, real: LoadedModel) -> None:
    async with serving(start(model=real, **REAL)) as http:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 20,
        }
        status, answer = await http.post("/v1/chat/completions", body)
        assert status == 200
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "stop"
        events = await http.stream("/v1/chat/completions", body)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
        assert text == answer["choices"][0]["message"]["content"]


def test_text_comes_back_and_is_cut_well(real: LoadedModel) -> None:
    text = PROSE.read_text()[:6000] + " naïve 日本語 🙂 x = 12345;\n\n\tend"
    tokens = ids(real, text)
    assert real.tokenizer.decode(tokens) == text
    assert len(tokens) < len(text) / 3  # whole words, so the merges are in use


def test_prompts_are_as_the_model_was_trained_on(real: LoadedModel, real_model_path: Path) -> None:
    if "SmolLM2" not in real_model_path.name:
        pytest.skip("another model has another template")
    text = real.template.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids(real, text)[:6] == [1, 9690, 198, 2683, 359, 253]
    assert real.tokenizer.eos == {2}


def test_logits_are_those_of_the_plain_formulas(
    start: Start, real: LoadedModel, real_model_path: Path
) -> None:
    """The whole model once more, from the file to the logits, by code that shares nothing with the engine."""
    if real_model_path.suffix != ".gguf":
        pytest.skip("this reads a GGUF file")
    tokens = chat(real, "What is the capital of France?")
    tensors, config = _read_again(real_model_path)
    expected = numpy_llama.logits(tensors, config, tokens)
    engine = start(model=real, **REAL)
    answer = engine.run(tokens, 1)
    assert answer.tokens == [int(expected[-1].argmax())]
    seen = engine.on_step_thread(lambda: _last_logits(engine.engine._model, tokens))
    np.testing.assert_allclose(seen, expected[-1], atol=2e-3, rtol=1e-3)


def _last_logits(llama: object, tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    logits = llama.prefill(tokens, 0, [1, 2], last=True)  # type: ignore[attr-defined]
    return logits.numpy()


def _read_again(
    path: Path,
) -> tuple[dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]], dict[str, float]]:
    reader = gguf.GGUFReader(path)
    config = {
        "num_hidden_layers": reader.fields["llama.block_count"].contents(),
        "num_attention_heads": reader.fields["llama.attention.head_count"].contents(),
        "num_key_value_heads": reader.fields["llama.attention.head_count_kv"].contents(),
        "rms_norm_eps": reader.fields["llama.attention.layer_norm_rms_epsilon"].contents(),
        "rope_theta": reader.fields["llama.rope.freq_base"].contents(),
        "head_dim": reader.fields["llama.rope.dimension_count"].contents(),
    }
    renamed = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    renamed |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    renamed |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    renamed["attn_output"] = "self_attn.o_proj"
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[2] in ("attn_q", "attn_k"):
            # Row 2i + h of a head in the file is row i + h * head_dim / 2 of the model.
            order = np.arange(values.shape[0]).reshape(-1, config["head_dim"])
            order = np.concatenate([order[:, 0::2], order[:, 1::2]], 1).flatten()
            values = values[order]
        name = f"model.layers.{parts[1]}.{renamed[parts[2]]}" if parts[0] == "blk" else names[parts[0]]
        tensors[f"{name}.weight"] = values
    return tensors, config


def test_answers_do_not_depend_on_the_store(start: Start, real: LoadedModel) -> None:
    """Real prose with two questions: computed, reused, and prefilled elsewhere; token for token the same."""
    text = PROSE.read_text()[1000:2400]
    first, second = (chat(real, f"{text}\n\n{question}") for question in ("What is this?", "Who wrote it?"))
    alone = start(model=real, **REAL)
    expected = [alone.run(prompt, 12, ignore_eos=True).tokens for prompt in (first, second)]
    alone.close()
    store = MemoryStore()
    engine = start(store, model=real, **REAL)
    answers = []
    for prompt in (first, second):
        answers.append(engine.run(prompt, 12, ignore_eos=True))
        engine.settle()
    assert [answer.tokens for answer in answers] == expected
    assert answers[1].finish is not None
    assert answers[1].finish.cached_tokens >= 0.75 * len(second)
    handed = engine.run(first, 1, handover=True)
    decode = start(store, model=real, **REAL)
    moved = decode.run(first, 12, first_token=handed.tokens[0], sources=["n"], ignore_eos=True)
    assert moved.tokens == expected[0]
    assert moved.finish is not None
    assert moved.finish.cached_tokens == len(first)
    assert namespace_of(real, block_tokens=32, chunk_tokens=64, dtype="float32") == engine.parts.namespace
