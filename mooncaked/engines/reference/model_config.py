"""The numbers that define a model of the Llama architecture, whatever file they came from."""

from __future__ import annotations

import math

import msgspec

from mooncaked.errors import ModelInvalid

SUPPORTED = "Supported are models of the Llama architecture (LlamaForCausalLM), as safetensors or GGUF"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants. `check` must pass before it is used."""

    layers: int
    hidden: int  # width of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width between the two products of the feed-forward part
    vocab: int
    context: int  # tokens, prompt and answer together
    rms_eps: float
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None  # each rotation frequency is divided by its factor
    tied: bool  # the output matrix is the embedding

    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def frequencies(self) -> list[float]:
        """Rotation per position, for each of the head_dim / 2 pairs of dimensions."""
        plain = [self.rope_theta ** (-2 * i / self.head_dim) for i in range(self.head_dim // 2)]
        factors = self.rope_factors or (1.0,) * len(plain)
        return [value / factor for value, factor in zip(plain, factors, strict=True)]


# Far beyond any real model: a damaged count must not keep the loader busy for ever, or ask for all memory.
_LIMITS = {
    "layers": 1 << 10,
    "hidden": 1 << 20,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "ffn": 1 << 22,
    "vocab": 1 << 24,
    "context": 1 << 26,
}


def check(config: ModelConfig, path: str) -> ModelConfig:
    """Return `config`; raise `ModelInvalid` when no model can have such a shape."""
    for name, limit in _LIMITS.items():
        if not 1 <= getattr(config, name) <= limit:
            raise broken(path, f"its {name} is {getattr(config, name)}, it must be 1 to {limit}")
    if config.heads % config.kv_heads:
        raise broken(path, f"{config.heads} heads cannot share {config.kv_heads} key-value heads")
    if config.head_dim % 2:
        raise broken(path, f"its head dimension {config.head_dim} is odd")
    if not (config.rms_eps > 0 and config.rope_theta > 0 and math.isfinite(config.rope_theta)):
        raise broken(path, f"rms eps {config.rms_eps} or rope theta {config.rope_theta} is out of range")
    factors = config.rope_factors
    if factors is not None and (len(factors) != config.head_dim // 2 or not all(f > 0 for f in factors)):
        raise broken(path, "its rope factors do not fit its head dimension")
    return config


def broken(path: str, problem: str) -> ModelInvalid:
    """The error for a file that is no whole model."""
    return ModelInvalid(path=path, problem=problem, remedy="Fetch the model again, or give another one.")


def unsupported(path: str, problem: str) -> ModelInvalid:
    """The error for a model that this engine cannot run."""
    return ModelInvalid(path=path, problem=problem, remedy=f"{SUPPORTED}.")


def llama3_factors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, original_context: int
) -> tuple[float, ...]:
    """Rope factors by Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, those
    between blended. `low` and `high` are the bounds, in turns over `original_context` positions."""
    factors = []
    for index in range(head_dim // 2):
        turns = original_context * theta ** (-2 * index / head_dim) / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))  # 1: keep, 0: stretch
        factors.append(1 / ((1 - blend) / factor + blend))
    return tuple(factors)
