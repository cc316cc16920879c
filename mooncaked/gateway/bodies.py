"""What engines are asked, and the headers that tell the client who served it."""

from __future__ import annotations

from typing import Any

from mooncaked.conductor.messages import Decision, PrefillSeen
from mooncaked.gateway.engines import Timing
from mooncaked.gateway.openai import Request
from mooncaked.gateway.prompts import Prompt

Body = dict[str, Any]


def prefill(request: Request, prompt: Prompt, decision: Decision) -> Body:
    """Compute the prompt's KV and the first token, store the KV, and say where."""
    params = {
        "do_remote_decode": True,
        "request_id": decision.request_id,
        "sources": decision.prefill_sources,
    }
    body = {"model": request.model, "prompt": prompt.json, "max_tokens": 1, "stream": False}
    return body | request.sampling | {"kv_transfer_params": params}


def decode(
    request: Request, prompt: Prompt, decision: Decision, kv_node: str | None, first_token: int | None
) -> Body:
    """Load the prompt's KV from where it is, and go on after the first token."""
    own = decision.decode_terms.node_id
    names = [kv_node, *decision.decode_sources]
    sources = list(dict.fromkeys(name for name in names if name is not None and name != own))
    params: Body = {"do_remote_prefill": True, "request_id": decision.request_id, "sources": sources}
    if first_token is not None:
        params["first_token"] = first_token
    return _streamed(request, prompt, decision) | {"kv_transfer_params": params}


def single(request: Request, prompt: Prompt, decision: Decision) -> Body:
    """Prefill and decode in one call."""
    params = {"request_id": decision.request_id, "sources": decision.prefill_sources}
    return _streamed(request, prompt, decision) | {"kv_transfer_params": params}


def _streamed(request: Request, prompt: Prompt, decision: Decision) -> Body:
    body = {
        "model": request.model,
        "prompt": prompt.json,
        "max_tokens": decision.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | request.sampling


def prefill_seen(reused_tokens: int, wall_ms: float, timing: Timing | None) -> PrefillSeen:
    """A prefill as the conductor learns from it."""
    times = timing or Timing()
    return PrefillSeen(
        reused_tokens=reused_tokens,
        wall_ms=wall_ms,
        queue_ms=times.queue_ms,
        load_ms=times.load_ms,
        prefill_ms=times.prefill_ms,
        store_ms=times.store_ms,
    )


def headers(request_id: str, prompt: Prompt, decision: Decision, reused_tokens: int) -> dict[str, str]:
    """Who served a request, and how much of its prompt came from the cache as far as is known."""
    result = {
        "X-Mooncake-Request-Id": request_id,
        "X-Mooncake-Prefill": decision.prefill,
        "X-Mooncake-Decode": decision.decode,
        "X-Mooncake-Reused-Tokens": str(reused_tokens),
        "X-Mooncake-Prompt-Tokens": str(prompt.count),
        "X-Mooncake-Term": str(decision.term),
    }
    return result | {"X-Mooncake-Degraded": "1"} if decision.degraded else result
