"""The forward pass of a Llama model over the paged KV cache. The package's text says why shapes are fixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from mooncaked.engines.reference.kv_cache import SCRATCH, PagedKV
from mooncaked.engines.reference.model_config import ModelConfig
from mooncaked.engines.reference.weights import LayerWeights, Weights

DECODE_ROWS = 8
"""Rows of every decode step, used or not."""


class Rows:
    """What a forward pass needs to know of its rows: where each is, and where its KV goes."""

    def __init__(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        blocks: Sequence[int],
        *,
        block_tokens: int,
        device: str,
    ) -> None:
        self.tokens = torch.tensor(tokens, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.blocks = torch.tensor(blocks, device=device)  # block of each row's own KV
        self.offsets = self.positions % block_tokens  # and where in it


class Span:
    """The keys that some rows attend to: the blocks that hold them, and how many."""

    def __init__(
        self, rows: slice, blocks: torch.Tensor, length: int, mask: torch.Tensor | None = None
    ) -> None:
        self.rows = rows
        self.blocks = blocks  # [blocks]
        self.length = length  # tokens
        self.mask = mask  # [rows * heads per kv head, length]: what each row may see; None: all


class Llama:
    """One model. Not thread-safe: the step thread alone uses it, in torch's inference mode."""

    def __init__(
        self, config: ModelConfig, weights: Weights, cache: PagedKV, *, chunk_tokens: int, context: int
    ) -> None:
        """`chunk_tokens` is a multiple of the cache's block_tokens; `context` the longest sequence."""
        self._config, self._weights, self._cache = config, weights, cache
        self._device = cache.device
        self.chunk_tokens = chunk_tokens
        self._group = config.heads // config.kv_heads
        self._scale = config.head_dim**-0.5
        # The last chunk of the longest prompt is padded too, and its padding has positions.
        angles = torch.outer(
            torch.arange(context + chunk_tokens, dtype=torch.float64),
            torch.tensor(config.frequencies(), dtype=torch.float64),
        )
        dtype = weights.embedding.dtype
        self._cos = angles.cos().to(dtype=dtype, device=self._device)
        self._sin = angles.sin().to(dtype=dtype, device=self._device)

    # --- the two kinds of step ---------------------------------------------------------------------

    def prefill(
        self, tokens: Sequence[int], chunk: int, table: Sequence[int], *, last: bool
    ) -> torch.Tensor | None:
        """Compute chunk number `chunk` of a prompt, given its up to `chunk_tokens` tokens.

        `table` lists the sequence's blocks; KV of the chunks before is there already. With `last`, returns
        the logits [vocab] that follow the last of the tokens."""
        size, start = self.chunk_tokens, chunk * self.chunk_tokens
        length = start + size
        unit = self._cache.block_tokens
        covering = list(table[: length // unit])
        covering += [SCRATCH] * (length // unit - len(covering))
        positions = range(start, length)
        rows = Rows(
            [*tokens, *[0] * (size - len(tokens))],
            positions,
            [covering[p // unit] for p in positions],
            block_tokens=unit,
            device=self._device,
        )
        visible = torch.arange(length, device=self._device)[None, :] <= rows.positions[:, None]
        blocks = torch.tensor(covering, device=self._device)
        span = Span(slice(0, size), blocks, length, visible.repeat(self._group, 1))
        hidden = self._layers(rows, [span])
        # One row, whatever the chunk's padding: the first token is sampled from the same bits in every mode.
        return self._logits(hidden[len(tokens) - 1 : len(tokens)])[0] if last else None

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """One token for each of up to `DECODE_ROWS` sequences: `tokens[i]` stands at `positions[i]`.

        Returns the logits [len(tokens), vocab] that follow."""
        unit, spare = self._cache.block_tokens, DECODE_ROWS - len(tokens)
        own = [table[p // unit] for p, table in zip(positions, tables, strict=True)]
        rows = Rows(
            [*tokens, *[0] * spare],
            [*positions, *[0] * spare],
            [*own, *[SCRATCH] * spare],
            block_tokens=unit,
            device=self._device,
        )
        spans = [
            Span(slice(i, i + 1), torch.tensor(table[: p // unit + 1], device=self._device), p + 1)
            for i, (p, table) in enumerate(zip(positions, tables, strict=True))
        ]
        return self._logits(self._layers(rows, spans))[: len(tokens)]

    # --- the arithmetic ----------------------------------------------------------------------------

    def _layers(self, rows: Rows, spans: Sequence[Span]) -> torch.Tensor:
        """Hidden state [rows, hidden] after all layers; writes the rows' KV on the way."""
        cos = self._cos[rows.positions][:, None, :]
        sin = self._sin[rows.positions][:, None, :]
        x = embedding(rows.tokens, self._weights.embedding)
        for index, weights in enumerate(self._weights.layers):
            x = x + self._attention(
                index, weights, self._norm(x, weights.attention_norm), rows, spans, cos, sin
            )
            x = x + self._feed_forward(weights, self._norm(x, weights.ffn_norm))
        return x

    def _attention(
        self,
        index: int,
        weights: LayerWeights,
        x: torch.Tensor,
        rows: Rows,
        spans: Sequence[Span],
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        c = self._config
        count, rotated = x.shape[0], c.heads + c.kv_heads
        parts = linear(x, weights.qkv).view(count, rotated + c.kv_heads, c.head_dim)
        turned = _rotate(parts[:, :rotated], cos, sin)
        self._cache.write(index, rows.blocks, rows.offsets, turned[:, c.heads :], parts[:, rotated:])
        out = torch.zeros((count, c.heads, c.head_dim), dtype=x.dtype, device=x.device)
        for span in spans:
            keys, values = self._cache.gather(index, span.blocks)
            out[span.rows] = self._attend(
                turned[span.rows, : c.heads], keys[: span.length], values[: span.length], span.mask
            )
        return linear(out.view(count, -1), weights.output)

    def _attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of queries [rows, heads, head_dim] over keys and values [length, kv_heads, head_dim].

        The query heads that share a key-value head are put below each other as rows, so that keys and values
        need not be repeated."""
        c, count = self._config, queries.shape[0]
        folded = queries.view(count, c.kv_heads, self._group, c.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, c.kv_heads, self._group * count, c.head_dim)
        result = scaled_dot_product_attention(
            folded,
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=self._scale,
        )
        unfolded = result.view(c.kv_heads, self._group, count, c.head_dim).permute(2, 0, 1, 3)
        return unfolded.reshape(count, c.heads, c.head_dim)

    def _feed_forward(self, weights: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        both = linear(x, weights.gate_up)
        gate, up = both.split(self._config.ffn, dim=1)
        return linear(silu(gate) * up, weights.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self._config.hidden,), weight, self._config.rms_eps)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(self._norm(hidden, self._weights.norm), self._weights.head).float()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [rows, heads, head_dim]: dimension i turns with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
