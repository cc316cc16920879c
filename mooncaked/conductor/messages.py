"""What crosses the conductor's border: questions, decisions with the terms they rest on, and observations.

All immutable, and the same structs are the JSON of the scheduling API. Times in ms, lengths in tokens.
"""

from __future__ import annotations

import msgspec

from mooncaked.keys import HASH_NAME
from mooncaked.types import InstanceRecord


class Family(msgspec.Struct, frozen=True, order=True):
    """Instances of one family can use each other's KV: same namespace, same blocks, same keys."""

    namespace: str
    block_tokens: int
    hash_name: str = HASH_NAME


def family_of(record: InstanceRecord) -> Family:
    """The family of an instance."""
    return Family(record.namespace, record.block_tokens, record.hash_name)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request that wants instances."""

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int | None = None  # of the answer; None: as many as the context has room for
    chains: dict[Family, list[bytes]] = {}  # keys of the prompt's full blocks, root first
    avoid: frozenset[str] = frozenset()  # failed this request: taken only when nothing else is left
    prefilled_on: str | None = None  # this instance has done the prefill: choose a decode instance only


class PrefillTerms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a prefill on one instance is predicted to cost: `ttft_ms` is the sum of the other times."""

    instance_id: str
    node_id: str | None
    rank: (
        int  # 0 fit; 1 its node is away or draining; 2 it failed a moment ago; 3 it failed this very request
    )
    own_tokens: int  # of the prompt, on its own node
    reused_tokens: int  # of the prompt, after pulling from `pull_from`; what is left is computed
    pull_from: str  # node id; "" when nothing is pulled
    queued: int  # requests before this one
    queue_ms: float
    load_ms: float  # reused blocks, from the node's tiers into the engine
    transfer_ms: float  # what is pulled, from the other node to this one
    prefill_ms: float
    recompute_ms: float  # spent again at decode, because KV cannot be handed over from here
    ttft_ms: float


class DecodeTerms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What decoding on one instance is predicted to be like."""

    instance_id: str
    node_id: str | None
    rank: int  # as in PrefillTerms
    batch: int  # requests reserved there, without this one
    kv_tokens: int  # reserved there, without this one
    room: bool  # the KV of this request fits as well
    handoff_ms: float  # until the prompt's KV is there: loaded, or computed again
    tbt_ms: float  # between tokens, with everything that is reserved there
    total_ms: float  # handoff and the expected answer


class Prefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a node has only on its disks, and that a request which was just placed will read there."""

    node_id: str
    namespace: str
    keys: list[bytes]  # root first


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request goes. With `prefill == decode`, one call does it all."""

    request_id: str
    term: int  # of the leader that decided; 0 when degraded
    degraded: bool  # decided without a leader, from this candidate's own view
    policy: str
    model: str
    family: Family
    prefill: str  # instance ids and their base URLs
    prefill_url: str
    decode: str
    decode_url: str
    prefill_sources: list[str]  # node ids that the prefill instance should pull from, best first
    decode_sources: list[str]  # node ids where the prompt's KV is or will be, best first
    prompt_tokens: int
    max_tokens: int  # of the answer, after the context limit
    expected_tokens: int  # of the answer, as predicted
    ttft_ms: float
    tbt_ms: float
    prefill_terms: PrefillTerms
    decode_terms: DecodeTerms
    prefetch: list[Prefetch] = []  # for whoever decided: to be ordered now, and not passed on

    @property
    def single(self) -> bool:
        """One instance does prefill and decode in one call."""
        return self.prefill == self.decode


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why admission says no."""

    reason: str  # "ttft" | "tbt" | "prefill_queue" | "decode_queue" | "kv_room"
    detail: str  # for people
    predicted_ms: float
    limit_ms: float
    retry_after_s: int


class PrefillSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill really took."""

    reused_tokens: int
    wall_ms: float  # from sending the request to its answer
    queue_ms: float | None = None  # the engine's own clock, where it tells
    load_ms: float | None = None
    prefill_ms: float | None = None
    store_ms: float | None = None


class DecodeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode really took."""

    tokens: int
    tbt_ms: float | None  # mean between tokens; None with fewer than two tokens
    ttft_ms: float | None = None  # of the whole request, from its decision to the first token


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway reports to whoever decided."""

    prefill: PrefillSeen | None = None
    decode: DecodeSeen | None = None
    failed: list[str] = []  # instances that refused a connection or broke before their first token


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Every candidate's terms, and what would be decided; nothing is reserved."""

    policy: str
    admission: str
    decision: Decision | None
    refusal: Refusal | None
    prefill: list[PrefillTerms]
    decode: list[DecodeTerms]
    matched_tokens: dict[str, int]  # by node
