"""Whatever `--model` names: it is served, or refused in one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mooncaked.errors import ModelInvalid
from tests.engines.harness import load
from tests.engines.tiny_model import CONFIG, make_tensors, vocabulary, write_gguf, write_hf


def problem_of(path: Path) -> str:
    """The sentence with which the model at `path` is refused."""
    with pytest.raises(ModelInvalid) as caught:
        load(path)
    text = str(caught.value)
    assert str(path.name) in text
    assert "\n" not in text
    return text


# --- GGUF ---------------------------------------------------------------------------------------------


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    assert "it does not exist" in problem_of(tmp_path / "nothing")
    text = tmp_path / "notes.txt"
    text.write_text("Dear diary\n" * 100)
    assert "it is no GGUF file" in problem_of(text)
    empty = tmp_path / "empty.gguf"
    empty.touch()
    assert "it is no GGUF file" in problem_of(empty)
    short = tmp_path / "short.gguf"
    short.write_bytes(b"GGUF")
    assert "damaged or cut short" in problem_of(short)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999])
def test_a_gguf_file_that_was_cut_short(tmp_path: Path, tiny_gguf: Path, share: float) -> None:
    data = tiny_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    assert "damaged or cut short" in problem_of(path)


def test_a_length_far_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    """A list of 2**40 numbers, of which the file holds four."""
    name = b"general.numbers"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    path = tmp_path / "endless.gguf"
    path.write_bytes(head + struct.pack("<IIQ", 9, 4, 2**40) + struct.pack("<4I", 1, 2, 3, 4))
    assert "it ends before byte" in problem_of(path)


def test_gguf_files_that_are_whole_but_not_for_us(tmp_path: Path) -> None:
    def write(**changes: object) -> Path:
        return write_gguf(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", **changes)

    assert "its architecture is mamba" in problem_of(write(architecture="mamba"))
    missing = problem_of(write(leave_out="model.layers.1.mlp.up_proj.weight"))
    assert "1 of its tensors are missing, the first is model.layers.1.mlp.up_proj.weight" in missing
    assert "no token embedding" in problem_of(write(leave_out="model.embed_tokens.weight"))
    assert "has shape" in problem_of(write(tensors=make_tensors(CONFIG | {"intermediate_size": 64})))
    assert "cannot share" in problem_of(write(num_key_value_heads=3))
    few = make_tensors(CONFIG | {"vocab_size": 100})
    assert f"{len(vocabulary())} tokens, its embedding 100" in problem_of(write(tensors=few))


def test_a_number_of_layers_that_no_model_has(tmp_path: Path) -> None:
    """Billions of layers, by one damaged byte: refused at once, not counted through."""
    path = write_gguf(tmp_path / "deep.gguf", make_tensors(CONFIG), num_hidden_layers=2**31)
    assert "its layers is 2147483648, it must be 1 to 1024" in problem_of(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_gguf_file_never_does_worse_than_being_refused(
    tmp_path: Path, tiny_gguf: Path, data: st.DataObject
) -> None:
    """Bytes of the head are changed: lengths, types, names. The file may still be a model, by luck."""
    content = bytearray(tiny_gguf.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, 9000))
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with suppress(ModelInvalid):
        load(path)


# --- directories -----------------------------------------------------------------------------------------


def change(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


CASES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: (p / "config.json").unlink(), "it holds no config.json"),
    (lambda p: (p / "config.json").write_text("{"), "it is no JSON object"),
    (lambda p: (p / "config.json").write_text("[]"), "it is no JSON object"),
    (lambda p: change(p, architectures=["GPT2LMHeadModel"]), "its architecture is GPT2LMHeadModel"),
    (lambda p: change(p, hidden_size="wide"), "does not describe a model"),
    (lambda p: change(p, hidden_size=0), "its hidden is 0"),
    (lambda p: change(p, num_attention_heads=0, head_dim=None), "no attention heads"),
    (lambda p: change(p, head_dim=15), "head dimension 15 is odd"),
    (lambda p: change(p, attention_bias=True), "it has biases"),
    (lambda p: change(p, rope_scaling={"rope_type": "yarn", "factor": 2}), "of the kind 'yarn'"),
    (lambda p: change(p, rope_scaling={"rope_type": "linear"}), "its rope scaling is not usable"),
    (lambda p: change(p, rope_theta="x"), "does not describe a model"),
    (lambda p: change(p, num_hidden_layers=4), "9 of its tensors are missing"),
    (lambda p: change(p, tie_word_embeddings=False), "the first is lm_head.weight"),
    (lambda p: change(p, vocab_size=300), "its tensor model.embed_tokens.weight has shape [288, 64]"),
    (lambda p: (p / "model.safetensors").unlink(), "no *.safetensors file"),
    (lambda p: cut(p / "model.safetensors"), "no whole safetensors file"),
    (lambda p: (p / "model.safetensors").write_text("hello"), "no whole safetensors file"),
    (lambda p: (p / "tokenizer.json").unlink(), "no tokenizer.json"),
    (lambda p: cut(p / "tokenizer.json"), "it is no tokenizer"),
    (lambda p: (p / "tokenizer_config.json").write_text("nonsense"), "it is no JSON object"),
    (
        lambda p: (p / "tokenizer_config.json").write_text('{"chat_template": "{% if"}'),
        "its chat template is no template",
    ),
]


@pytest.mark.parametrize(("spoil", "problem"), CASES, ids=[problem for _, problem in CASES])
def test_directories_that_are_no_model(tmp_path: Path, spoil: Callable[[Path], object], problem: str) -> None:
    path = write_hf(tmp_path / "model")
    spoil(path)
    with pytest.raises(ModelInvalid) as caught:
        load(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_weight_files_are_one_model(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG)
    path = write_hf(tmp_path / "model", {})
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    for part in range(2):
        save_file({n: tensors[n] for n in names[part::2]}, str(path / f"model-{part + 1}-of-2.safetensors"))
    model = load(path)
    assert np.array_equal(model.weights.embedding.numpy(), tensors["model.embed_tokens.weight"])


def test_a_kind_of_number_that_cannot_be_unpacked(tmp_path: Path) -> None:
    tensors = make_tensors(CONFIG)
    path = tmp_path / "ints.gguf"
    write_gguf(path, tensors | {"model.norm.weight": np.ones(64, np.int32)})  # type: ignore[dict-item]
    assert "of type I32, which cannot be unpacked" in problem_of(path)
