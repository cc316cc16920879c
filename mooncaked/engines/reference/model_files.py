"""From a path to a loaded model: weights, tokenizer, chat template and fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import xxhash

from mooncaked.engines.reference import weights_gguf, weights_hf
from mooncaked.engines.reference.chat import ChatTemplate, read_hf_template
from mooncaked.engines.reference.model_config import SUPPORTED, ModelConfig, broken
from mooncaked.engines.reference.tokenizer import Tokenizer, load_hf_tokenizer
from mooncaked.engines.reference.tokenizer_gguf import load_gguf_tokenizer
from mooncaked.engines.reference.weights import TensorSource, Weights, assemble
from mooncaked.errors import ModelInvalid

_SAMPLE_BYTES = 1 << 20  # of each end of a weights file, for the fingerprint


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    template: ChatTemplate
    fingerprint: bytes  # 16; see `fingerprint`


def load_model(path: Path, *, dtype: torch.dtype, device: str) -> LoadedModel:
    """Load the GGUF file or Hugging Face directory at `path`. Raises `ModelInvalid`."""
    if path.is_dir():
        return _load_directory(path, dtype, device)
    if path.is_file():
        return _load_gguf(path, dtype, device)
    remedy = "Give a .gguf file, or a directory with config.json, tokenizer.json and *.safetensors."
    raise ModelInvalid(path=path, problem="it does not exist", remedy=remedy)


def _load_directory(path: Path, dtype: torch.dtype, device: str) -> LoadedModel:
    if not (path / "config.json").exists():
        raise ModelInvalid(path=path, problem="it holds no config.json", remedy=f"{SUPPORTED}.")
    config = weights_hf.read_config(path)
    tensors = weights_hf.HfTensors(path)
    tokenizer = load_hf_tokenizer(path)
    template = ChatTemplate(read_hf_template(path), tokenizer.specials, str(path))
    return _finish(config, tensors, tokenizer, template, tensors.files, dtype, device)


def _load_gguf(path: Path, dtype: torch.dtype, device: str) -> LoadedModel:
    gguf = weights_gguf.GgufFile(path)
    config = weights_gguf.read_config(gguf)
    tokenizer = load_gguf_tokenizer(gguf)
    template = ChatTemplate(gguf.get("tokenizer.chat_template"), tokenizer.specials, str(path))
    return _finish(config, gguf, tokenizer, template, [path], dtype, device)


def _finish(
    config: ModelConfig,
    tensors: TensorSource,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    files: list[Path],
    dtype: torch.dtype,
    device: str,
) -> LoadedModel:
    # More rows than tokens is common (padding for the GPU); fewer means that a token has no embedding.
    if tokenizer.size > config.vocab:
        raise broken(tensors.path, f"its tokenizer has {tokenizer.size} tokens, its embedding {config.vocab}")
    return LoadedModel(
        config=config,
        weights=assemble(config, tensors, dtype, device),
        tokenizer=tokenizer,
        template=template,
        fingerprint=fingerprint(config, files),
    )


def fingerprint(config: ModelConfig, files: list[Path]) -> bytes:
    """16 bytes that differ between models: of the configuration, and of each weights file its size and both
    ends. Quick, so not proof against a file changed in the middle on purpose."""
    digest = xxhash.xxh3_128(msgspec.json.encode(config))
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()


def namespace_of(model: LoadedModel, *, block_tokens: int, chunk_tokens: int, dtype: str) -> str:
    """The namespace of the model's blocks: equal only where their bytes are interchangeable."""
    settings = f"{block_tokens}/{chunk_tokens}/{dtype}".encode()
    digest = xxhash.xxh3_128_hexdigest(model.fingerprint + settings)
    return f"llama-{model.config.layers}x{model.config.hidden}-{dtype}-{digest}"
