"""How one candidate is chosen among several: the papers' Algorithm 1, and what to compare it with."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class PrefillCosts:
    """What a policy may look at, one entry per candidate in each list. All candidates have equal rank."""

    own_tokens: list[int] = field(default_factory=list)  # of the prompt, on the candidate's own node
    queue_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)  # predicted, everything included


@dataclass(slots=True)
class DecodeCosts:
    """The same for decode."""

    total_ms: list[float] = field(default_factory=list)  # handoff and answer; infinite without KV room


class Policy(Protocol):
    """Chooses a position in the lists, which are never empty."""

    name: str
    pull_ratio: float  # pull when another node holds more than this many times what the own does

    def prefill(self, costs: PrefillCosts) -> int:
        """The candidate that gets the prefill."""

    def decode(self, costs: DecodeCosts) -> int:
        """The candidate that gets the decode."""


def _least(values: list[float]) -> int:
    return values.index(min(values))


class _LeastDecode:
    """Decode where the answer is predicted to end first: what all policies but the blind ones do."""

    def decode(self, costs: DecodeCosts) -> int:
        return _least(costs.total_ms)


class Algorithm1(_LeastDecode):
    """The papers' Algorithm 1: least predicted TTFT. An instance pulls the best match where that is more than
    `threshold` times what its own node holds, and so hot prefixes spread by being used."""

    name = "algorithm1"

    def __init__(self, threshold: float) -> None:
        self.pull_ratio = threshold

    def prefill(self, costs: PrefillCosts) -> int:
        return _least(costs.ttft_ms)


class LeastLoad(_LeastDecode):
    """The shortest queue, whatever is cached where. Nothing is pulled, here and in the policies below."""

    name = "least-load"
    pull_ratio = math.inf

    def prefill(self, costs: PrefillCosts) -> int:
        return _least(costs.queue_ms)


class PrefixOnly(_LeastDecode):
    """The longest prefix on the own node, whatever is queued there; the shortest queue among equals."""

    name = "prefix-only"
    pull_ratio = math.inf

    def prefill(self, costs: PrefillCosts) -> int:
        longest = max(costs.own_tokens)
        equals = [i for i, own in enumerate(costs.own_tokens) if own == longest]
        return min(equals, key=costs.queue_ms.__getitem__)


class Random:
    """Any."""

    name = "random"
    pull_ratio = math.inf

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def prefill(self, costs: PrefillCosts) -> int:
        return self._rng.randrange(len(costs.ttft_ms))

    def decode(self, costs: DecodeCosts) -> int:
        return self._rng.randrange(len(costs.total_ms))


class RoundRobin:
    """One after the other."""

    name = "round-robin"
    pull_ratio = math.inf

    def __init__(self) -> None:
        self._prefills = self._decodes = -1

    def prefill(self, costs: PrefillCosts) -> int:
        self._prefills += 1
        return self._prefills % len(costs.ttft_ms)

    def decode(self, costs: DecodeCosts) -> int:
        self._decodes += 1
        return self._decodes % len(costs.total_ms)


POLICIES = (Algorithm1.name, Random.name, RoundRobin.name, LeastLoad.name, PrefixOnly.name)


def make_policy(name: str, threshold: float, rng: random.Random) -> Policy:
    """The policy of that name; raises `ValueError` for a name that is not in `POLICIES`."""
    policies: list[Policy] = [Algorithm1(threshold), Random(rng), RoundRobin(), LeastLoad(), PrefixOnly()]
    for policy in policies:
        if policy.name == name:
            return policy
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
