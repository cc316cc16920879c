"""The conductor: asks in, decisions out. No I/O; the gateway and the subscriber are its shell.

Every candidate has one, fed all the time; the leader's decides for everybody. One decision is made and
reserved in a single step without an await, so that concurrent requests see each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from mooncaked.clock import Clock
from mooncaked.conductor.admission import Forecast, Limits, admit_arrival, admit_decode
from mooncaked.conductor.cost import Estimators
from mooncaked.conductor.fleet import RANK_FIT, Fleet, Model, Site
from mooncaked.conductor.index import PrefixIndex
from mooncaked.conductor.learn import Lessons
from mooncaked.conductor.ledger import Ledger
from mooncaked.conductor.messages import (
    Ask,
    Decision,
    DecodeTerms,
    Explanation,
    Observation,
    PrefillTerms,
    Refusal,
)
from mooncaked.conductor.policies import Policy
from mooncaked.conductor.schedule import Found, Scheduler
from mooncaked.errors import AdmissionRefused, ContextLengthExceeded, NoInstance
from mooncaked.types import InstanceRecord, NodeRecord, Role

FAILED_FOR_MS = 5_000.0  # how long others are preferred to an instance that failed


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator chooses."""

    admission: str
    limits: Limits
    reservation_ttl_ms: float


@dataclass(frozen=True, slots=True)
class _Plan:
    """One thought-out answer, not yet reserved."""

    decision: Decision
    refusal: Refusal | None
    prefill: Sequence[Site]  # the candidates
    decode: Sequence[Site]
    found: Found  # in the family that was chosen


class Conductor:
    """State: `index` (fed by the subscriber), `fleet`, `estimators` and `ledger`. Not thread-safe."""

    def __init__(self, index: PrefixIndex, policy: Policy, settings: Settings, clock: Clock) -> None:
        self.index = index
        self.settings = settings
        self.estimators = Estimators()
        self.ledger = Ledger()
        self.fleet = Fleet(self.estimators, self.ledger)
        self.scheduler = Scheduler(index, self.fleet, self.estimators, self.ledger, policy)
        self._lessons = Lessons(self.fleet, self.estimators)
        self._clock = clock

    # --- the outside world ----------------------------------------------------------------------------

    def update(self, instances: Mapping[str, InstanceRecord], nodes: Mapping[str, NodeRecord]) -> None:
        """etcd says that these instances and nodes exist."""
        self.fleet.update(instances, nodes)
        self.estimators.retain(instances, nodes)
        self.ledger.retain(instances)

    def observe(self, request_id: str, seen: Observation) -> None:
        """A gateway reports what it saw; what is over is learnt from. Unknown requests are ignored."""
        for instance_id in seen.failed:
            self.failed(instance_id)
        entry = self.ledger.get(request_id)
        if entry is None:
            return
        if seen.prefill is not None:
            self._lessons.prefill(entry.decision, seen.prefill)
        if seen.decode is not None:
            load = self.ledger.load(entry.decision.decode)
            self._lessons.decode(entry.decision, seen.decode, load)

    def failed(self, instance_id: str) -> None:
        """An instance refused a connection, or broke: prefer others for a while."""
        self.fleet.mark_failed(instance_id, self._now_ms() + FAILED_FOR_MS)

    def release(self, request_id: str) -> bool:
        """A request ended, however; False when nothing was reserved for it."""
        return self.ledger.release(request_id, self._now_ms()) is not None

    def prefill_done(self, request_id: str) -> None:
        """A request has its first token: it no longer waits at its prefill instance."""
        self.ledger.to_decode(request_id, self._now_ms())

    def adopt(self, decision: Decision, *, prefilled: bool = False) -> None:
        """Count in what the leader decided for a request of this gateway, for when this one decides."""
        ttl_ms = self.settings.reservation_ttl_ms
        self.ledger.reserve(decision, self._now_ms(), ttl_ms, prefilled=prefilled)

    # --- decisions ------------------------------------------------------------------------------------

    def schedule(self, ask: Ask, term: int, *, degraded: bool = False) -> Decision:
        """Choose instances and reserve them. With `ask.prefilled_on`, only decode is chosen (again).

        A leader's decision names blocks to `prefetch` too; nodes do not obey who decides without leading.

        Raises `NoInstance`, `ContextLengthExceeded`, or `AdmissionRefused`."""
        now_ms = self._now_ms()
        self.ledger.expire(now_ms)
        if ask.prefilled_on is not None:
            return self._schedule_decode(ask, ask.prefilled_on, term, degraded, now_ms)
        plan = self._plan(ask, term, degraded, now_ms)
        if plan.refusal is not None:
            raise _refused(plan.refusal)
        decision = plan.decision
        self.ledger.reserve(decision, now_ms, self.settings.reservation_ttl_ms)
        return self._with_prefetch(ask, decision, [decision.prefill, decision.decode], plan.found)

    def explain(self, ask: Ask, term: int) -> Explanation:
        """All candidates' terms, and what would be decided. Raises as `schedule`, but for refusals."""
        now_ms, scheduler = self._now_ms(), self.scheduler
        plan = self._plan(ask, term, False, now_ms)
        decision = plan.decision
        found = {family: scheduler.find(ask, family) for family in {site.family for site in plan.prefill}}
        at_hand, prefill, expected = found[decision.family], decision.prefill_terms, decision.expected_tokens
        return Explanation(
            policy=decision.policy,
            admission=self.settings.admission,
            decision=decision if plan.refusal is None else None,
            refusal=plan.refusal,
            prefill=[scheduler.prefill_terms(ask, s, found[s.family], now_ms) for s in plan.prefill],
            decode=[
                scheduler.decode_terms(ask, site, prefill, at_hand, expected, now_ms) for site in plan.decode
            ],
            matched_tokens={
                node_id: depth * family.block_tokens
                for family, this in found.items()
                for node_id, depth in this.depths.items()
            },
        )

    def _plan(self, ask: Ask, term: int, degraded: bool, now_ms: float) -> _Plan:
        scheduler = self.scheduler
        model = self._model(ask)
        need = ask.prompt_tokens + (ask.max_tokens or 1)
        sites = self._that_fit(ask, model, need, model.usable_prefill)
        choice = scheduler.choose_prefill(ask, sites, now_ms)
        site, prefill, found = choice.site, choice.terms, choice.found
        aggregated = site.record.role is Role.BOTH
        targets = [site] if aggregated else self._that_fit(ask, model, need, model.decode[site.family])
        max_tokens = ask.max_tokens or min(t.limit_tokens for t in (site, *targets)) - ask.prompt_tokens
        expected = self.estimators.output_tokens(ask.model, max_tokens)
        target = scheduler.choose_decode(ask, targets, prefill, found, expected, now_ms)
        decode = scheduler.decode_terms(ask, target, prefill, found, expected, now_ms)
        if aggregated:
            decode = msgspec.structs.replace(decode, handoff_ms=0.0)
        forecast = self._forecast(ask, prefill, decode, target, expected, now_ms)
        decision = Decision(
            request_id=ask.request_id,
            term=term,
            degraded=degraded,
            policy=scheduler.policy.name,
            model=ask.model,
            family=site.family,
            prefill=site.instance_id,
            prefill_url=site.record.url,
            decode=target.instance_id,
            decode_url=target.record.url,
            prefill_sources=scheduler.prefill_sources(prefill, found),
            decode_sources=scheduler.decode_sources(prefill, decode.node_id, found),
            prompt_tokens=ask.prompt_tokens,
            max_tokens=max_tokens,
            expected_tokens=expected,
            ttft_ms=forecast.ttft_ms,
            tbt_ms=decode.tbt_ms,
            prefill_terms=prefill,
            decode_terms=decode,
        )
        refusal = admit_arrival(self.settings.admission, forecast, self.settings.limits)
        return _Plan(decision, refusal, sites, targets, found)

    def _forecast(
        self,
        ask: Ask,
        prefill: PrefillTerms,
        decode: DecodeTerms,
        target: Site,
        expected: int,
        now_ms: float,
    ) -> Forecast:
        need = ask.prompt_tokens + expected
        ready_ms = prefill.ttft_ms + decode.handoff_ms
        wait_ms = self.ledger.room_wait_ms(
            target.instance_id, need, target.kv_capacity, now_ms + ready_ms, ask.request_id
        )
        trusted = self.estimators.tbt_trusted(ask.model)
        then_ms = decode.tbt_ms
        if trusted:  # only then is it looked at, and it takes a walk over the batch
            batch, kv_tokens = self.ledger.decode_at(
                target.instance_id, now_ms + ready_ms + wait_ms, ask.request_id
            )
            then_ms = target.models.step.predict(min(batch + 1, target.batch_max), kv_tokens + need)
        return Forecast(
            ttft_ms=ready_ms + wait_ms,
            ttft_trusted=self.estimators.ttft_trusted(ask.model),
            queued=prefill.queued,
            wait_ms=wait_ms,
            tbt_now_ms=decode.tbt_ms,
            tbt_then_ms=then_ms,
            tbt_trusted=trusted,
            batch=decode.batch,
            batch_max=target.batch_max,
        )

    # --- the second look, before decode ---------------------------------------------------------------

    def _schedule_decode(
        self, ask: Ask, prefilled_on: str, term: int, degraded: bool, now_ms: float
    ) -> Decision:
        entry = self.ledger.get(ask.request_id)
        if entry is None:
            raise NoInstance(model=ask.model, detail=f"nothing is reserved for request {ask.request_id}")
        before = entry.decision
        expected, prefill = before.expected_tokens, before.prefill_terms
        found = self.scheduler.find(ask, before.family)
        self.ledger.to_decode(ask.request_id, now_ms)
        target = self._keep_or_choose(ask, before, found, now_ms)
        decode = self.scheduler.decode_terms(ask, target, prefill, found, expected, now_ms)
        forecast = self._forecast(ask, prefill, decode, target, expected, now_ms)
        if refusal := admit_decode(self.settings.admission, forecast, self.settings.limits):
            self.ledger.release(ask.request_id, now_ms)
            raise _refused(refusal)
        decision = msgspec.structs.replace(
            before,
            term=term,
            degraded=degraded,
            decode=decode.instance_id,
            decode_url=target.record.url,
            decode_sources=self._sources_again(before, prefilled_on, decode.node_id),
            tbt_ms=decode.tbt_ms,
            decode_terms=decode,
        )
        self.ledger.reserve(decision, now_ms, self.settings.reservation_ttl_ms, prefilled=True)
        moved = [] if decision.decode == before.decode else [decision.decode]
        return self._with_prefetch(ask, decision, moved, found)

    def _keep_or_choose(self, ask: Ask, before: Decision, found: Found, now_ms: float) -> Site:
        """The instance decided on before, unless another has less against it."""
        kept = self.fleet.sites.get(before.decode)
        if kept is not None and self.fleet.rank(kept, ask.avoid, now_ms) == RANK_FIT:
            return kept
        need = ask.prompt_tokens + before.max_tokens
        model = self._model(ask)
        pool = self._that_fit(ask, model, need, model.decode.get(before.family, []))
        if kept is not None and kept in self.fleet.best_ranked(pool, ask.avoid, now_ms):
            return kept
        expected = before.expected_tokens
        return self.scheduler.choose_decode(ask, pool, before.prefill_terms, found, expected, now_ms)

    def _sources_again(self, before: Decision, prefilled_on: str, decode_node: str | None) -> list[str]:
        site = self.fleet.sites.get(prefilled_on)
        first = before.prefill_terms.node_id if site is None else site.record.node_id
        names = ([] if first is None else [first]) + [n for n in before.decode_sources if n != first]
        return [name for name in names if name != decode_node]

    # --- helpers ---------------------------------------------------------------------------------------

    def _with_prefetch(
        self, ask: Ask, decision: Decision, instances: Sequence[str], found: Found
    ) -> Decision:
        """`decision` with what the nodes of `instances` should prefetch; what is reserved goes without."""
        if decision.degraded or not found.match.slow:
            return decision
        wanted = self.scheduler.prefetches(ask, decision.family, instances, found)
        return msgspec.structs.replace(decision, prefetch=wanted) if wanted else decision

    def _model(self, ask: Ask) -> Model:
        model = self.fleet.model(ask.model)
        if model is None:
            raise NoInstance(model=ask.model, detail="none is registered")
        if not model.usable_prefill:
            detail = f"{len(model.prefill)} for prefill, {sum(map(len, model.decode.values()))} for decode"
            raise NoInstance(model=ask.model, detail=f"{detail}; it takes both, or one of role both")
        return model

    def _that_fit(self, ask: Ask, model: Model, need: int, sites: Sequence[Site]) -> Sequence[Site]:
        if need <= model.limit_tokens_min and sites:
            return sites
        fitting = [site for site in sites if site.limit_tokens >= need]
        if fitting:
            return fitting
        if not sites:
            raise NoInstance(model=ask.model, detail="no decode instance is left")
        limit = max(site.limit_tokens for site in sites)
        raise ContextLengthExceeded(tokens=need, model=ask.model, limit=limit)

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000.0


def _refused(refusal: Refusal) -> AdmissionRefused:
    return AdmissionRefused(
        reason=refusal.detail,
        cause=refusal.reason,
        predicted_ms=round(refusal.predicted_ms),
        limit_ms=round(refusal.limit_ms),
        retry_after_s=refusal.retry_after_s,
    )
