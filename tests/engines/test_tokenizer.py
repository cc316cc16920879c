"""Text to tokens and back, from both kinds of file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.engines.reference.model_files import LoadedModel
from mooncaked.engines.reference.tokenizer import Tokenizer, load_hf_tokenizer
from mooncaked.engines.reference.tokenizer_gguf import load_gguf_tokenizer, merges_by_score
from mooncaked.engines.reference.weights_gguf import GgufFile
from mooncaked.errors import ContextLengthExceeded, ModelInvalid
from tests.engines.tiny_model import EOS, write_gguf, write_hf


def encode(tokenizer: Tokenizer, text: str, *, add_special: bool = True, limit: int = 10_000) -> list[int]:
    return tokenizer.encode(text, add_special=add_special, limit=limit, model="tiny")


@given(text=st.text(max_size=60))
def test_text_comes_back(tiny: LoadedModel, text: str) -> None:
    assert tiny.tokenizer.decode(encode(tiny.tokenizer, text)) == text


@given(text=st.text(max_size=60))
def test_both_files_give_the_same_tokens(tiny: LoadedModel, gguf_tokenizer: Tokenizer, text: str) -> None:
    assert encode(gguf_tokenizer, text) == encode(tiny.tokenizer, text)


@pytest.fixture(scope="module")
def gguf_tokenizer(tiny_gguf: Path) -> Tokenizer:
    return load_gguf_tokenizer(GgufFile(tiny_gguf))


def test_special_tokens_are_one_token_and_no_text(tiny: LoadedModel, gguf_tokenizer: Tokenizer) -> None:
    for tokenizer in (tiny.tokenizer, gguf_tokenizer):
        tokens = encode(tokenizer, "<|im_start|>the<|im_end|>")
        assert (tokens[0], tokens[-1], len(tokens)) == (1, 2, 3)
        assert tokenizer.decode(tokens) == "the"
        assert tokenizer.eos == {EOS}
        assert tokenizer.specials["eos_token"] == "<|im_end|>"


def test_a_text_that_cannot_fit_is_refused_without_encoding_it(tiny: LoadedModel) -> None:
    with pytest.raises(ContextLengthExceeded, match="context of 100"):
        encode(tiny.tokenizer, "the " * 5_000_000, limit=100)


def test_digits_are_cut_as_the_model_was_trained(tmp_path: Path) -> None:
    """SmolLM cuts numbers into digits; a merge of two digits is never used there."""
    path = write_gguf(tmp_path / "smollm.gguf", pre="smollm")
    reader = GgufFile(path)
    tokenizer = load_gguf_tokenizer(reader)
    assert [tokenizer.decode([t]) for t in encode(tokenizer, "in 2024")] == ["in", " ", "2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ab", " 12345", "!?", "\n", " x"]),
        ("smollm", ["Ab", " ", "1", "2", "3", "4", "5", "!?", "\n", " x"]),
        ("llama-bpe", ["Ab", " ", "123", "45", "!?\n", " x"]),
    ],
)
def test_styles_of_cutting_before_merging(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load_gguf_tokenizer(GgufFile(write_gguf(tmp_path / "m.gguf", pre=pre)))
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str("Ab 12345!?\n x")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces


def test_an_unknown_style_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre="from-the-future")
    with pytest.raises(ModelInvalid, match=r"'from-the-future' is none of gpt-2, .*smollm"):
        load_gguf_tokenizer(GgufFile(path))


# --- SentencePiece ------------------------------------------------------------------------------------


def write_sentence_piece(path: Path, *, add_bos: bool = True) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *words])
    scores = [0.0] * len(pieces) + [-10.0, -11.0, -12.0, -13.0, -3.0, -2.0, -4.0, -1.0, -5.0]
    writer.add_token_scores(scores)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentence_piece_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(GgufFile(write_sentence_piece(tmp_path / "sp.gguf")))

    def pieces(text: str) -> list[str | None]:
        return [tokenizer._backend.id_to_token(t) for t in encode(tokenizer, text)]

    # "▁a" has the best score, so it is joined first; then "bc", which "▁a" cannot take up.
    assert pieces("abc") == ["<s>", "▁a", "bc"]
    assert pieces("ab") == ["<s>", "▁ab"]
    assert pieces("aé") == ["<s>", "▁a", "<0xC3>", "<0xA9>"]
    for text in ("abc", "a b  c", "aé", "日本"):
        assert tokenizer.decode(encode(tokenizer, text)) == text
    assert encode(tokenizer, "a", add_special=False) == encode(tokenizer, "a")[1:]


def test_merges_are_ordered_by_score() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    assert merges_by_score(vocabulary, [0, 0, 0, -2, -1, -3]) == [
        ("b", "c"),
        ("a", "b"),
        ("a", "bc"),
        ("ab", "c"),
    ]


# --- Hugging Face's side files --------------------------------------------------------------------------


def test_which_tokens_end_an_answer(tmp_path: Path) -> None:
    """The generation defaults win over the model's, those over the tokenizer's."""
    path = write_hf(tmp_path / "m")
    assert load_hf_tokenizer(path).eos == {EOS}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_hf_tokenizer(path).eos == {0, 2}
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    del config["eos_token_id"]
    (path / "config.json").write_text(json.dumps(config))
    assert load_hf_tokenizer(path).eos == {2}  # by the name in tokenizer_config.json
