"""What the gateway counts, under names that begin with `mooncaked_conductor_`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncaked.conductor.messages import Decision
from mooncaked.conductor.orders import RESULTS
from mooncaked.gateway.shapes import Usage

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5, 5.0)


class Counters:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"mooncaked_conductor_{name}", doc, labels, registry=registry)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mooncaked_conductor_{name}", doc, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests answered, by route and HTTP status.", "route", "status")
        self.broken_off = counter("requests_broken_off", "Requests whose client went away before the end.")
        self.refusals = counter("refusals", "Requests refused by admission, by reason.", "reason")
        self.in_flight = Gauge(
            "mooncaked_conductor_requests_in_flight", "Requests being served.", registry=registry
        )
        self.ttft = histogram("ttft_seconds", "From a request's arrival to its first token.", _TTFT_S)
        self.tbt = histogram("tbt_seconds", "Between two tokens of an answer.", _TBT_S)
        self.decision = histogram("decision_seconds", "From asking for a decision to having it.", _DECISION_S)
        self.decisions = counter("decisions", "Decisions of a leader, this one or another.")
        self.degraded_decisions = counter("degraded_decisions", "Decisions made without a leader.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of served requests.")
        self.reused_tokens = counter("reused_tokens", "Prompt tokens that came from the cache.")
        self.answer_tokens = counter("answer_tokens", "Tokens of the answers of served requests.")
        self.engine_failures = counter("engine_failures", "Calls to engines that failed.")
        self.prefetch_orders = counter("prefetch_orders", "Orders to nodes to prefetch, by result.", "result")
        for result in RESULTS:
            self.prefetch_orders.labels(result)

    def decided(self, decision: Decision, seconds: float) -> None:
        """A decision came, `seconds` after it was asked for."""
        self.decision.observe(seconds)
        (self.degraded_decisions if decision.degraded else self.decisions).inc()

    def served(self, usage: Usage) -> None:
        """A request got its whole answer."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.reused_tokens.inc(usage.reused_tokens)
        self.answer_tokens.inc(usage.completion_tokens)
