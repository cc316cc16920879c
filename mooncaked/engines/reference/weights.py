"""The matrices of a model in memory, put together from a file's tensors by Hugging Face's names."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from mooncaked.engines.reference.model_config import ModelConfig, broken

_THREADS_MAX = 8  # that read and unpack tensors; beyond it the disk or memory is the limit


class TensorSource(Protocol):
    """The tensors of one model file."""

    path: str

    def names(self) -> Collection[str]:
        """Which tensors there are, as `model.layers.0.self_attn.q_proj.weight` and so on."""

    def read(self, name: str) -> torch.Tensor:
        """One of them, on the CPU. Called from several threads."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are [out, in]; products that share an input are one matrix."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    output: torch.Tensor  # [hidden, heads * head_dim]
    ffn_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * ffn, hidden]
    down: torch.Tensor  # [hidden, ffn]


@dataclass(frozen=True)
class Weights:
    """The whole model."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied


class _Assembler:
    def __init__(self, config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: str) -> None:
        self._config, self._source, self._dtype, self._device = config, source, dtype, device

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of the wanted shape, type and place; raises `ModelInvalid`."""
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise broken(
                self._source.path, f"its tensor {name} has shape {list(tensor.shape)}, not {list(shape)}"
            )
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def layer(self, index: int) -> LayerWeights:
        """One layer's weights, joined."""
        c, prefix = self._config, f"model.layers.{index}"
        q_width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=self.read(f"{prefix}.input_layernorm.weight", c.hidden),
            qkv=torch.cat(
                [
                    self.read(f"{attention}.q_proj.weight", q_width, c.hidden),
                    self.read(f"{attention}.k_proj.weight", kv_width, c.hidden),
                    self.read(f"{attention}.v_proj.weight", kv_width, c.hidden),
                ]
            ),
            output=self.read(f"{attention}.o_proj.weight", c.hidden, q_width),
            ffn_norm=self.read(f"{prefix}.post_attention_layernorm.weight", c.hidden),
            gate_up=torch.cat(
                [
                    self.read(f"{mlp}.gate_proj.weight", c.ffn, c.hidden),
                    self.read(f"{mlp}.up_proj.weight", c.ffn, c.hidden),
                ]
            ),
            down=self.read(f"{mlp}.down_proj.weight", c.hidden, c.ffn),
        )


def assemble(config: ModelConfig, source: TensorSource, dtype: torch.dtype, device: str) -> Weights:
    """Read all tensors, several at a time. Raises `ModelInvalid` for a missing or misshapen one."""
    _check_names(config, source)
    build = _Assembler(config, source, dtype, device)
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "weights") as pool:
        embedding = pool.submit(build.read, "model.embed_tokens.weight", config.vocab, config.hidden)
        layers = pool.map(build.layer, range(config.layers))
        norm = build.read("model.norm.weight", config.hidden)
        head = None if config.tied else build.read("lm_head.weight", config.vocab, config.hidden)
        table = embedding.result()
        return Weights(embedding=table, layers=tuple(layers), norm=norm, head=table if head is None else head)


def _check_names(config: ModelConfig, source: TensorSource) -> None:
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.tied:
        expected.add("lm_head.weight")
    for index in range(config.layers):
        prefix = f"model.layers.{index}"
        expected |= {f"{prefix}.self_attn.{part}_proj.weight" for part in "qkvo"}
        expected |= {f"{prefix}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        expected |= {f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight"}
    if missing := sorted(expected - set(source.names())):
        raise broken(source.path, f"{len(missing)} of its tensors are missing, the first is {missing[0]}")
