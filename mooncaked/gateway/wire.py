"""The JSON of the scheduling API: /v1/schedule, /v1/explain, /v1/release, /v1/locate.

A prompt comes as its tokens, as text or messages (tokenized as for a completion), or as its length and the
keys of its blocks, as `mooncaked.keys` makes and shows them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from mooncaked.conductor.messages import Ask, Family, Observation
from mooncaked.gateway.openai import Count, Message
from mooncaked.keys import HASH_NAME, parse_key, show_key

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class ChainBody(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a prompt's full blocks, root first, for one family of instances."""

    namespace: str
    block_tokens: Annotated[int, Meta(ge=1)]
    hash_name: str = HASH_NAME
    keys: list[str]


class AskBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /v1/schedule and /v1/explain"""

    model: str
    request_id: Name | None = None  # given by the gateway when left out
    max_tokens: Count | None = None
    messages: list[Message] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    prompt_tokens: Count | None = None  # with `chains`, in place of a prompt
    chains: list[ChainBody] = []
    avoid: list[str] = []
    prefilled_on: str | None = None
    observed: Observation | None = None


class ReleaseBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /v1/release"""

    request_id: Name
    stage: str = "all"  # "prefill": its prefill is done, it goes on decoding; "all": it ended
    observed: Observation | None = None


class LocateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/locate"""

    namespace: str
    keys: list[str]


def ask_body(ask: Ask, observed: Observation | None) -> AskBody:
    """An ask as JSON carries it."""
    return AskBody(
        model=ask.model,
        request_id=ask.request_id,
        max_tokens=ask.max_tokens,
        prompt_tokens=ask.prompt_tokens,
        chains=[
            ChainBody(
                namespace=family.namespace,
                block_tokens=family.block_tokens,
                hash_name=family.hash_name,
                keys=[show_key(key) for key in keys],
            )
            for family, keys in ask.chains.items()
        ],
        avoid=sorted(ask.avoid),
        prefilled_on=ask.prefilled_on,
        observed=observed,
    )


def chains_of(body: AskBody) -> dict[Family, list[bytes]]:
    """The chains in a body; raises `InvalidKey`."""
    return {
        Family(chain.namespace, chain.block_tokens, chain.hash_name): [parse_key(key) for key in chain.keys]
        for chain in body.chains
    }
