"""Text to token ids and back, through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from mooncaked.engines.reference.model_config import broken
from mooncaked.engines.reference.weights_hf import read_json
from mooncaked.errors import ContextLengthExceeded


class Tokenizer:
    """Safe to use from several threads; `encode` of a long text takes its time, so not on an event loop."""

    def __init__(self, backend: Backend, *, eos: frozenset[int], specials: dict[str, str]) -> None:
        self._backend = backend
        self.eos = eos  # a generated token of these ends the answer
        self.specials = specials  # bos_token, eos_token, ...: what a chat template may refer to
        vocabulary = backend.get_vocab()
        self.size = max(vocabulary.values(), default=-1) + 1
        self._longest_bytes = max((len(text.encode()) for text in vocabulary), default=1)

    def encode(self, text: str, *, add_special: bool, limit: int, model: str) -> list[int]:
        """Token ids of `text`; with `add_special`, with what the model wants around a plain prompt.

        Raises `ContextLengthExceeded` for a text that cannot have `limit` tokens or fewer, without the work
        of encoding it: no token stands for more bytes than the longest one in the vocabulary has."""
        floor = len(text.encode()) // self._longest_bytes
        if floor > limit:
            raise ContextLengthExceeded(tokens=f"over {floor}", model=model, limit=limit)
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special ones; bytes that are no whole character become U+FFFD."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))


def load_hf_tokenizer(directory: Path) -> Tokenizer:
    """From tokenizer.json, with the special tokens that the files beside it name. Raises `ModelInvalid`."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise broken(str(directory), "it holds no tokenizer.json")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise broken(str(path), f"it is no tokenizer ({error})") from error
    backend.no_truncation()
    backend.no_padding()
    settings = _optional_json(directory / "tokenizer_config.json")
    specials = {
        name: text
        for name, value in settings.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    eos = _eos_ids(directory, backend, specials.get("eos_token"))
    return Tokenizer(backend, eos=eos, specials=specials)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(directory: Path, backend: Backend, eos_token: str | None) -> frozenset[int]:
    """From the generation defaults, else the model's, else the tokenizer's: the first that names any."""
    for name in ("generation_config.json", "config.json"):
        ids = _optional_json(directory / name).get("eos_token_id")
        if isinstance(ids, int):
            return frozenset([ids])
        if isinstance(ids, list) and ids:
            return frozenset(i for i in ids if isinstance(i, int))
    found = backend.token_to_id(eos_token) if eos_token else None
    return frozenset() if found is None else frozenset([found])
