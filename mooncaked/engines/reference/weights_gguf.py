"""A GGUF file: metadata, and tensors that may be quantized."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, dequantize

from mooncaked.engines.reference.model_config import ModelConfig, broken, check, unsupported

_ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Reader(GGUFReader):  # type: ignore[misc]
    """The package's reader, made quicker and safer.

    It works on a plain array and makes no views that change nothing: with 100,000 strings in a vocabulary
    that is most of the time. And it stops at the end of the file, beyond which the package reads on, for as
    long as a damaged length says."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        kind = np.dtype(dtype)
        end = int(offset) + kind.itemsize * int(count)
        part = self._plain[offset:end]
        if len(part) < end - offset:
            raise ValueError(f"it ends before byte {end}")
        values = part.view(kind)
        order = override_order or self.byte_order
        return values if order == "I" else values.view(kind.newbyteorder(order))

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._plain

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._plain = mapped.view(np.ndarray)


class GgufFile:
    """One GGUF file: typed access to its metadata, and its tensors as a `TensorSource`."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelInvalid` when it is no GGUF file, or not a whole one."""
        self.path = str(path)
        self.file = path
        try:
            with path.open("rb") as stream:
                magic = stream.read(4)
        except OSError as error:
            raise broken(self.path, f"it cannot be read ({error.strerror})") from error
        if magic != b"GGUF":
            raise broken(self.path, "it is no GGUF file")
        try:
            self._reader = _Reader(path)
        except Exception as error:  # the parser checks nothing: a damaged file gives any error at all
            raise broken(self.path, f"the file is damaged or cut short ({error})") from error
        self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}

    # --- metadata ----------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as Python types, or `default`."""
        field = self._reader.fields.get(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise broken(self.path, f"its field {key} is damaged ({error})") from error

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """A metadata value that must be there and of type `kind`; raises `ModelInvalid`."""
        value = self.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise broken(self.path, f"its field {key} is missing or of another type")
        return value

    # --- tensors -----------------------------------------------------------------------------------

    def names(self) -> Collection[str]:
        """Which tensors there are, by Hugging Face's names."""
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, unpacked to float32 (or as it is, where it is a plain type), rows in Hugging Face's
        order."""
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            kind = tensor.tensor_type.name
            raise unsupported(
                self.path, f"its tensor {name} is of type {kind}, which cannot be unpacked ({error})"
            ) from error
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "head_count" if name.endswith("q_proj.weight") else "head_count_kv"
            values = unpermute(values, self._heads(heads))
        return torch.from_numpy(
            np.require(values, requirements=["C", "W"])
        )  # a copy where it is the file itself

    def _heads(self, which: str) -> int:
        return int(self.get(f"llama.attention.{which}") or self.need("llama.attention.head_count", int))

    def rope_factors(self) -> tuple[float, ...] | None:
        """What each rotation frequency is divided by, where the file says so."""
        if _ROPE_FACTORS not in self._tensors:
            return None
        return tuple(self.read(_ROPE_FACTORS).flatten().tolist())

    def vocab(self) -> int:
        """Rows of the embedding."""
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise broken(self.path, "it holds no token embedding")
        return int(embedding.shape[1])


def unpermute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """From GGUF's order of a q or k matrix's rows to Hugging Face's.

    GGUF rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates row i with row i + head_dim / 2."""
    head_dim = rows.shape[0] // heads
    pairs = rows.reshape(heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _NAMES.get(name, name)


def read_config(gguf: GgufFile) -> ModelConfig:
    """The model's shape from the metadata; raises `ModelInvalid`."""
    architecture = gguf.get("general.architecture", "none named")
    if architecture != "llama":
        raise unsupported(gguf.path, f"its architecture is {architecture}")
    if any(name.endswith(".bias") for name in gguf.names()) or gguf.get("llama.expert_count"):
        raise unsupported(gguf.path, "it has biases or experts")
    scaling = gguf.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise unsupported(gguf.path, f"its rope scaling is of the kind {scaling!r}")
    heads = gguf.need("llama.attention.head_count", int)
    hidden = gguf.need("llama.embedding_length", int)
    head_dim = gguf.get("llama.attention.key_length") or (hidden // heads if heads else 0)
    if gguf.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise unsupported(gguf.path, "it rotates only a part of each head")
    factors = gguf.rope_factors()
    if factors is None and scaling == "linear":
        factors = (float(gguf.need("llama.rope.scaling.factor", (int, float))),) * (head_dim // 2)
    config = ModelConfig(
        layers=gguf.need("llama.block_count", int),
        hidden=hidden,
        heads=heads,
        kv_heads=gguf.get("llama.attention.head_count_kv") or heads,
        head_dim=head_dim,
        ffn=gguf.need("llama.feed_forward_length", int),
        vocab=gguf.vocab(),
        context=gguf.need("llama.context_length", int),
        rms_eps=gguf.need("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=float(gguf.get("llama.rope.freq_base", 10_000.0)),
        rope_factors=factors,
        tied="lm_head.weight" not in gguf.names(),
    )
    return check(config, gguf.path)
