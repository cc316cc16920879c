"""The forward pass of a Llama model, written again from the paper's formulas in numpy and float64: plain,
without cache, chunks or fused matrices. It shares no code with the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def logits(
    tensors: dict[str, Any], config: dict[str, Any], tokens: list[int], factors: list[float] | None = None
) -> Array:
    """Logits [len(tokens), vocab] after each token."""
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + _attention(
            w, f"{at}.self_attn", config, _norm(x, w[f"{at}.input_layernorm.weight"], config), factors
        )
        h = _norm(x, w[f"{at}.post_attention_layernorm.weight"], config)
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        up = h @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return _norm(x, w["model.norm.weight"], config) @ head.T


def _norm(x: Array, weight: Array, config: dict[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def _rope(x: Array, config: dict[str, Any], factors: list[float] | None) -> Array:
    """x is [tokens, heads, head_dim]; as complex numbers: the second half is the imaginary part."""
    half = config["head_dim"] // 2
    frequency = config["rope_theta"] ** (-np.arange(half) / half)
    if factors is not None:
        frequency = frequency / np.array(factors)
    turn = np.exp(1j * np.outer(np.arange(len(x)), frequency))[:, None, :]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)


def _attention(
    w: dict[str, Array], at: str, config: dict[str, Any], x: Array, factors: list[float] | None
) -> Array:
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n = len(x)
    q = _rope((x @ w[f"{at}.q_proj.weight"].T).reshape(n, heads, dim), config, factors)
    k = _rope((x @ w[f"{at}.k_proj.weight"].T).reshape(n, kv_heads, dim), config, factors)
    v = (x @ w[f"{at}.v_proj.weight"].T).reshape(n, kv_heads, dim)
    out = np.empty((n, heads, dim))
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, shared].T / np.sqrt(dim)
        scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, shared]
    return out.reshape(n, -1) @ w[f"{at}.o_proj.weight"].T
