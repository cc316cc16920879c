"""A Hugging Face directory: config.json and *.safetensors."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from mooncaked.engines.reference.model_config import (
    ModelConfig,
    broken,
    check,
    llama3_factors,
    unsupported,
)


class _HfConfig(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter here."""

    architectures: list[str] = []
    model_type: str = ""
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # newer name, with rope_theta inside
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    quantization_config: dict[str, Any] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model; raises `ModelInvalid`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise broken(str(path), f"it cannot be read ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise broken(str(path), f"it is no JSON object ({error})") from error


def read_config(directory: Path) -> ModelConfig:
    """The model's shape from config.json; raises `ModelInvalid`."""
    path = directory / "config.json"
    raw = read_json(path)
    name = next(iter(raw.get("architectures") or []), raw.get("model_type", "none named"))
    if name not in ("LlamaForCausalLM", "llama"):
        raise unsupported(str(directory), f"its architecture is {name}")
    try:
        hf = msgspec.convert(raw, _HfConfig)
    except msgspec.ValidationError as error:
        raise broken(str(path), f"it does not describe a model ({error})") from error
    if hf.attention_bias or hf.mlp_bias or hf.hidden_act != "silu" or hf.quantization_config:
        raise unsupported(str(directory), "it has biases, a quantization or an activation other than silu")
    if not hf.num_attention_heads:
        raise broken(str(path), "it has no attention heads")
    head_dim = hf.head_dim or hf.hidden_size // hf.num_attention_heads
    rope = hf.rope_parameters or hf.rope_scaling or {}
    theta = _number(path, rope.get("rope_theta", hf.rope_theta))
    config = ModelConfig(
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=head_dim,
        ffn=hf.intermediate_size,
        vocab=hf.vocab_size,
        context=hf.max_position_embeddings,
        rms_eps=hf.rms_norm_eps,
        rope_theta=theta,
        rope_factors=_rope_factors(path, rope, theta, head_dim),
        tied=hf.tie_word_embeddings,
    )
    return check(config, str(directory))


def _rope_factors(
    path: Path, rope: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[float, ...] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return (float(rope["factor"]),) * (head_dim // 2)
        if kind == "llama3":
            return llama3_factors(
                theta,
                head_dim,
                factor=float(rope["factor"]),
                low=float(rope["low_freq_factor"]),
                high=float(rope["high_freq_factor"]),
                original_context=int(rope["original_max_position_embeddings"]),
            )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise broken(str(path), f"its rope scaling is not usable ({error!r})") from error
    raise unsupported(str(path), f"its rope scaling is of the kind {kind!r}")


def _number(path: Path, value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise broken(str(path), f"its rope theta is {value!r}")


class HfTensors:
    """All *.safetensors files of a directory as one `TensorSource`."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelInvalid` when there is no file, or one is damaged."""
        self.path = str(directory)
        self.files = sorted(directory.glob("*.safetensors"))
        if not self.files:
            raise broken(self.path, "it holds no *.safetensors file")
        self._where: dict[str, Any] = {}
        self._lock = threading.Lock()  # an open file may be used by one thread at a time
        for file in self.files:
            opened = self._open(file)
            self._where.update(dict.fromkeys(opened.keys(), opened))

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise broken(str(file), f"it is no whole safetensors file ({error})") from error

    def names(self) -> Collection[str]:
        """Which tensors there are."""
        return self._where.keys()

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored."""
        with self._lock:
            try:
                return self._where[name].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise broken(self.path, f"its tensor {name} cannot be read ({error})") from error
