"""From what a gateway saw to samples for the estimators."""

from __future__ import annotations

from mooncaked.conductor.cost import Estimators
from mooncaked.conductor.fleet import Fleet
from mooncaked.conductor.ledger import Load
from mooncaked.conductor.messages import Decision, DecodeSeen, PrefillSeen

_IDLE_QUEUE_MS = 1.0


class Lessons:
    """Knows which part of an observation says something about which estimator."""

    def __init__(self, fleet: Fleet, estimators: Estimators) -> None:
        self._fleet = fleet
        self._estimators = estimators

    def prefill(self, decision: Decision, seen: PrefillSeen) -> None:
        """The engine's own times where it tells them; else the wall time, when nothing was queued before."""
        site = self._fleet.sites.get(decision.prefill)
        if site is None:
            return
        compute_ms = None
        if seen.prefill_ms is not None:
            compute_ms = seen.prefill_ms + (seen.store_ms or 0.0)
        elif decision.prefill_terms.queue_ms < _IDLE_QUEUE_MS:
            compute_ms = seen.wall_ms
        if compute_ms is not None:
            site.models.learn_prefill(decision.prompt_tokens, seen.reused_tokens, compute_ms)
        if seen.load_ms:
            self._load(decision, seen.reused_tokens, seen.load_ms, site.record.kv_bytes_per_token)

    def _load(self, decision: Decision, reused: int, load_ms: float, token_bytes: int) -> None:
        """One figure covers local reads and pulls; a pull's share is what local reads do not explain."""
        terms = decision.prefill_terms
        node_id = terms.node_id
        if node_id is None:
            return
        if not terms.pull_from:
            self._estimators.saw_load(node_id, reused * token_bytes, load_ms)
            return
        if reused < terms.reused_tokens:  # the source did not have it all: says nothing about the link
            return
        pulled = (reused - terms.own_tokens) * token_bytes
        self._estimators.saw_pull(terms.pull_from, node_id, pulled, max(load_ms - terms.load_ms, 0.0))

    def decode(self, decision: Decision, seen: DecodeSeen, load: Load) -> None:
        """The batch and KV that go with an observed TBT are those reserved at its end."""
        site = self._fleet.sites.get(decision.decode)
        if seen.tokens > 0:
            self._estimators.saw_output(decision.model, seen.tokens)
        if seen.ttft_ms is not None:
            self._estimators.saw_ttft(decision.model, decision.ttft_ms, seen.ttft_ms)
        if seen.tbt_ms is None or site is None:
            return
        self._estimators.saw_tbt(decision.model, decision.tbt_ms, seen.tbt_ms)
        running = [e for e in load.decode.values() if e.decoding_since_ms is not None]
        batch = min(max(1, len(running)), max(1, site.record.batch_max))
        site.models.learn_step(batch, sum(e.kv_tokens for e in running), seen.tbt_ms)
