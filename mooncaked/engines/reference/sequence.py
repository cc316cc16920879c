"""One request inside the engine: what was asked, how far it is, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from mooncaked.engines.reference.sampling import SamplingParams
from mooncaked.errors import MooncakeError


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is to do, already checked."""

    request_id: str
    prompt: list[int]
    max_tokens: int  # at most, first token included
    sampling: SamplingParams = SamplingParams(temperature=0.0)
    ignore_eos: bool = False
    sources: list[str] | None = None  # nodes that may have KV; None: ask the conductor's index
    handover: bool = False  # store the prompt's KV, all of it, and end after the first token
    first_token: int | None = None  # prefill was done elsewhere, and gave this token


class Timing(msgspec.Struct, frozen=True):
    """Where a request's time went, in milliseconds."""

    queue_ms: float = 0.0  # until there was room for it
    load_ms: float = 0.0  # reading KV from the store
    prefill_ms: float = 0.0  # computing the rest of the prompt, waiting for its turns included
    store_ms: float = 0.0  # after the first token, until the prompt's KV was stored (handover only)


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request."""

    reason: str  # "stop" | "length" | "cancelled"
    cached_tokens: int  # of the prompt, whose KV came from the store
    timing: Timing


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of news: a token, the end, or both; or an error, which is the end."""

    token: int | None = None
    cached_tokens: int = 0  # so far as is known
    finish: Finish | None = None
    error: MooncakeError | None = None


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # for KV blocks
    LOADING = "loading"  # KV from the store
    PREFILL = "prefill"  # the rest of its prompt is computed
    DECODE = "decode"  # tokens are generated
    SAVING = "saving"  # handover: done but for the store
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A request under way. Only the step thread changes it."""

    request: GenerationRequest
    sink: Callable[[Output], None]  # called on the step thread; must not block or raise
    arrived_s: float
    state: State = State.WAITING
    table: list[int] = field(default_factory=list)  # its KV blocks, in order
    computed: int = 0  # tokens of the prompt whose KV is there
    loaded_blocks: int = 0  # of the prompt, whose KV came from the store
    cached_tokens: int = 0  # of the prompt, not computed here
    output: list[int] = field(default_factory=list)
    reason: str = ""  # why it ended, once it has
    busy: int = 0  # jobs of the store that still use its blocks
    cancelled: bool = False
    admitted_s: float = 0.0
    loaded_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    keys: list[bytes] = field(default_factory=list)  # of the prompt's full blocks

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def next_position(self) -> int:
        """Position of the last token, which the next decode step computes."""
        return self.prompt_tokens + len(self.output) - 1


def kv_tokens(request: GenerationRequest) -> int:
    """Tokens that a request needs KV room for: the last one generated is never computed."""
    if request.handover:
        return len(request.prompt)
    return len(request.prompt) + request.max_tokens - 1
