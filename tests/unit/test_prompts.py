"""Prompts are tokenized once, hashed once, and forgotten in the order of their last use."""

from __future__ import annotations

from typing import Any

import pytest

from mooncaked.conductor.messages import Family
from mooncaked.errors import EngineFailed, InvalidRequest, NoInstance
from mooncaked.gateway.engines import Target, Tokens
from mooncaked.gateway.openai import Request, parse_text
from mooncaked.gateway.prompts import Prompt, Prompts
from mooncaked.keys import chain_keys
from mooncaked.types import Role
from tests.unit.conductors import FAMILY, Small, instance


class CountingEngines:
    """Tokenizes a text into its bytes."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.broken: set[str] = set()

    async def tokenize(self, target: Target, body: dict[str, Any]) -> Tokens:
        self.asked.append(target.instance_id)
        if target.instance_id in self.broken:
            raise EngineFailed(instance=target.instance_id, cause="broken")
        return Tokens(list(body["prompt"].encode()))


def request(prompt: str) -> Request:
    return parse_text(b'{"model": "m", "prompt": "%s"}' % prompt.encode())


def sites(count: int = 2) -> list[Any]:
    small = Small(prefill=count, decode=0)
    return list(small.conductor.fleet.sites.values())


def test_chains_are_those_of_the_tokens() -> None:
    tokens = list(range(35))
    chains = Prompt(tokens).chains({FAMILY, Family("ns", 4), Family("ns", 10, "other_hash")})
    assert chains == {
        FAMILY: chain_keys("ns", tokens, 10),
        Family("ns", 4): chain_keys("ns", tokens, 4),
    }, "a family whose way of hashing is unknown has no chain"


async def test_the_same_prompt_is_asked_for_once() -> None:
    engines, failed = CountingEngines(), []
    prompts = Prompts(engines, failed.append)  # type: ignore[arg-type]
    first = await prompts.prompt(request("hello"), sites(), {FAMILY})
    assert await prompts.prompt(request("hello"), sites(), {FAMILY}) is first
    await prompts.prompt(request("other"), sites(), {FAMILY})
    assert len(engines.asked) == 2
    assert first.count == 5
    assert not failed


async def test_the_work_is_spread_and_a_failure_moves_on() -> None:
    engines, failed = CountingEngines(), []
    prompts = Prompts(engines, failed.append)  # type: ignore[arg-type]
    for i in range(4):
        await prompts.prompt(request(f"text {i}"), sites(), {FAMILY})
    assert sorted(engines.asked) == ["p1", "p1", "p2", "p2"]
    engines.broken = {"p1"}
    for i in range(4):
        await prompts.prompt(request(f"more {i}"), sites(), {FAMILY})
    assert set(failed) == {"p1"}


async def test_when_all_fail_the_last_failure_is_told() -> None:
    engines = CountingEngines()
    engines.broken = {"p1", "p2"}
    prompts = Prompts(engines, lambda _name: None)  # type: ignore[arg-type]
    with pytest.raises(EngineFailed, match="broken"):
        await prompts.prompt(request("x"), sites(), {FAMILY})
    with pytest.raises(NoInstance):
        await prompts.prompt(request("x"), [], {FAMILY})


async def test_the_cache_is_bounded_and_drops_the_least_recently_used() -> None:
    engines = CountingEngines()
    prompts = Prompts(engines, lambda _name: None, cache_bytes_max=6_000)  # type: ignore[arg-type]
    for _ in range(3):
        for i in range(3):
            await prompts.prompt(request(f"text {i}"), sites(), {FAMILY})
    assert len(engines.asked) == 3
    for i in range(20):
        await prompts.prompt(request("text 0"), sites(), {FAMILY})
        await prompts.prompt(request(f"new {i}"), sites(), {FAMILY})
    assert len(engines.asked) == 23, "text 0 stayed"
    assert prompts._cache_bytes <= 6_000


async def test_a_huge_prompt_is_not_kept() -> None:
    engines = CountingEngines()
    prompts = Prompts(engines, lambda _name: None, cache_bytes_max=1_000)  # type: ignore[arg-type]
    for _ in range(2):
        await prompts.prompt(request("x" * 5_000), sites(), {FAMILY})
    assert len(engines.asked) == 2


async def test_an_empty_prompt_is_refused() -> None:
    prompts = Prompts(CountingEngines(), lambda _name: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="empty"):
        await prompts.prompt(request(""), sites(), {FAMILY})


def test_sites_without_a_ready_node_are_asked_last() -> None:
    small = Small(prefill=1, decode=0)
    small.put(instance("p2", Role.PREFILL, "np2"))
    small.conductor.fleet.set_away(frozenset({"np1"}))
    assert [site.fit for site in small.conductor.fleet.sites.values()] == [False, True]
