"""A tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from mooncaked.engines.reference.model_config import broken, unsupported
from mooncaked.engines.reference.tokenizer import Tokenizer
from mooncaked.engines.reference.weights_gguf import GgufFile

# Kinds of token in `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre`: how text is cut into pieces before merging.
_GPT2_STYLE = ("gpt-2", "default", "olmo", "jais", "phi-2")
_DIGIT_STYLE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_LLAMA3_STYLE = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
_SPACE = "\u2581"  # stands for a blank in SentencePiece vocabularies


def load_gguf_tokenizer(gguf: GgufFile) -> Tokenizer:
    """The tokenizer of the file. Raises `ModelInvalid` when it is of a kind that is not known here."""
    tokens: list[str] = gguf.need("tokenizer.ggml.tokens", list)
    model = gguf.need("tokenizer.ggml.model", str)
    if model == "gpt2":
        backend = _byte_level(gguf, tokens)
    elif model == "llama":
        backend = _sentence_piece(gguf, tokens)
    else:
        raise unsupported(gguf.path, f"its tokenizer is of the kind {model!r}")
    _add_special(gguf, backend, tokens)
    specials = {
        f"{name}_token": tokens[index]
        for name in ("bos", "eos", "unknown", "padding")
        if (index := _token_id(gguf, name, tokens)) is not None
    }
    if gguf.get("tokenizer.ggml.add_bos_token", model == "llama"):
        _prepend_bos(gguf, backend, tokens)
    eos = {_token_id(gguf, name, tokens) for name in ("eos", "eot")} - {None}
    return Tokenizer(backend, eos=frozenset(i for i in eos if i is not None), specials=specials)


def _token_id(gguf: GgufFile, name: str, tokens: Sequence[str]) -> int | None:
    index: int | None = gguf.get(f"tokenizer.ggml.{name}_token_id")
    if index is not None and not 0 <= index < len(tokens):
        raise broken(gguf.path, f"its {name} token is {index}, of {len(tokens)} tokens")
    return index


def _byte_level(gguf: GgufFile, tokens: Sequence[str]) -> Backend:
    """Byte-level BPE, as GPT-2 began it."""
    style = gguf.get("tokenizer.ggml.pre", "default")
    merges = [tuple(line.split(" ")) for line in gguf.need("tokenizer.ggml.merges", list)]
    vocabulary = {text: index for index, text in enumerate(tokens)}
    try:
        backend = Backend(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style in _LLAMA3_STYLE, fuse_unk=False)
        )
    except Exception as error:  # the library raises plain Exception, for a merge of unknown tokens say
        raise broken(gguf.path, f"its tokenizer's vocabulary and merges do not fit ({error})") from error
    backend.pre_tokenizer = _pre_tokenizer(gguf, style)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(gguf: GgufFile, style: str) -> pre_tokenizers.PreTokenizer:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style in _GPT2_STYLE:
        return plain
    if style in _DIGIT_STYLE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if style in _LLAMA3_STYLE:
        split = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
        unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, unsplit])
    known = ", ".join((*_GPT2_STYLE, *_DIGIT_STYLE, *_LLAMA3_STYLE))
    raise unsupported(gguf.path, f"its pre-tokenizer {style!r} is none of {known}")


def _sentence_piece(gguf: GgufFile, tokens: Sequence[str]) -> Backend:
    """SentencePiece BPE with byte fallback, as Llama 1 and 2 have it: a score per token, and no merges."""
    scores: list[float] = gguf.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise broken(gguf.path, f"its tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {text: index for index, text in enumerate(tokens)}
    unknown = _token_id(gguf, "unknown", tokens)
    backend = Backend(
        models.BPE(
            vocab=vocabulary,
            merges=merges_by_score(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = gguf.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return backend


def merges_by_score(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges, best first, that cut text as SentencePiece does: it joins the pair that makes the token of
    the highest score."""
    ranked = []
    for text, index in vocabulary.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_special(gguf: GgufFile, backend: Backend, tokens: Sequence[str]) -> None:
    kinds: list[int] = gguf.get("tokenizer.ggml.token_type", [])
    by_kind: dict[int, list[str]] = {_CONTROL: [], _USER_DEFINED: []}
    for text, kind in zip(tokens, kinds, strict=False):
        by_kind.get(kind, []).append(text)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in by_kind[_CONTROL]])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in by_kind[_USER_DEFINED]])


def _prepend_bos(gguf: GgufFile, backend: Backend, tokens: Sequence[str]) -> None:
    index = _token_id(gguf, "bos", tokens)
    if index is None:
        return
    text = tokens[index]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{text}:0 $A:0", pair=f"{text}:0 $A:0 $B:0", special_tokens=[(text, index)]
    )
