"""From logits to a token."""

from __future__ import annotations

import struct

import msgspec
import torch
import xxhash

_SORTED_FIRST = 1024  # candidates that are sorted at first; more only where these have too little probability


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request chooses its tokens."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0  # the likeliest tokens that together have this probability
    top_k: int = 0  # the likeliest k tokens; 0: no such limit
    seed: int = 0  # equal seeds give equal draws


def draw(seed: int, index: int) -> float:
    """A number in [0, 1) for the answer's token number `index`.

    A hash, not a generator's state: a decode instance draws token 1 as if it had drawn token 0."""
    packed = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, index)
    return (xxhash.xxh3_64_intdigest(packed) >> 11) * 2.0**-53


def choose(logits: torch.Tensor, params: SamplingParams, index: int) -> int:
    """The answer's token number `index`, given its logits [vocab]."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / params.temperature
    values, tokens = _candidates(torch.softmax(scaled, dim=-1), params)
    total = values.cumsum(0)
    place = int(torch.searchsorted(total, draw(params.seed, index) * float(total[-1]), right=True))
    place = min(place, len(total) - 1)
    return place if tokens is None else int(tokens[place])


def _candidates(
    probabilities: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The probabilities and ids of the tokens that may be drawn; ids None: all, in their own order."""
    size = len(probabilities)
    if 0 < params.top_k < size:
        values, tokens = probabilities.topk(params.top_k)
        mass = float(values.sum())
    elif params.top_p < 1:
        values, tokens = probabilities.topk(min(_SORTED_FIRST, size))
        mass = 1.0
        if float(values.sum()) < params.top_p:
            values, tokens = probabilities.topk(size)
    else:
        return probabilities, None
    # Up to and with the token that reaches top_p of what top_k has left.
    reached = int(torch.searchsorted(values.cumsum(0), params.top_p * mass)) + 1
    return values[:reached], tokens[:reached]
