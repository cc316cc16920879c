"""Where a request should go: what every candidate would cost, and the policy's choice among them.

The formulas are in `prefill_terms` and `decode_terms`, for one candidate. A decision only needs the sums of
many candidates, so `_prefill_sums` and `_decode_sums` compute those in one go for the common case (blocks in
DRAM, every node there), a few times faster; a property test holds the two to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncaked.conductor.cost import PULL_LATENCY_MS, Estimators
from mooncaked.conductor.fleet import RANK_NODE_AWAY, Fleet, Site
from mooncaked.conductor.index import Match, PrefixIndex
from mooncaked.conductor.ledger import Ledger
from mooncaked.conductor.messages import Ask, DecodeTerms, Family, Prefetch, PrefillTerms
from mooncaked.conductor.policies import DecodeCosts, Policy, PrefillCosts
from mooncaked.types import Role

SOURCES_MAX = 3
_NO_RATES: dict[str, float] = {}


@dataclass(slots=True)
class Found:
    """What the index says about one prompt in one family."""

    match: Match = field(default_factory=Match)
    depths: dict[str, int] = field(default_factory=dict)  # by node, in blocks
    order: list[str] = field(default_factory=list)  # a few nodes, the deepest first

    def best_other(self, node_id: str) -> tuple[str, int]:
        """The node that holds the longest prefix, `node_id` apart, and its depth; "" and 0 without one."""
        for name in self.order[:2]:
            if name != node_id:
                return name, self.depths[name]
        return "", 0


@dataclass(slots=True)
class PrefillChoice:
    """The instance that gets the prefill."""

    site: Site
    terms: PrefillTerms
    found: Found


class Scheduler:
    """Changes nothing: reserving what was chosen is the caller's next step."""

    def __init__(
        self, index: PrefixIndex, fleet: Fleet, estimators: Estimators, ledger: Ledger, policy: Policy
    ) -> None:
        self.index = index
        self.fleet = fleet
        self.estimators = estimators
        self.ledger = ledger
        self.policy = policy

    def find(self, ask: Ask, family: Family) -> Found:
        """Look the prompt up, as instances of `family` name its blocks."""
        keys = ask.chains.get(family)
        if not keys:
            return Found()
        match = self.index.lookup(family.namespace, keys)
        depths = self.index.depths(match)
        return Found(match, depths, list(depths)[: -SOURCES_MAX - 2 : -1])  # `depths` has the deepest last

    # --- prefill -------------------------------------------------------------------------------------

    def choose_prefill(self, ask: Ask, sites: Sequence[Site], now_ms: float) -> PrefillChoice:
        """The policy's choice among those of `sites` that have the best rank."""
        candidates: list[Site] = []
        found_by: dict[int, Found] = {}
        costs = PrefillCosts()
        for members in _by_family(self.fleet.best_ranked(sites, ask.avoid, now_ms)):
            found = found_by[members[0].family_number] = self.find(ask, members[0].family)
            self._prefill_costs(ask, members, found, now_ms, costs)
            candidates += members
        site = candidates[self.policy.prefill(costs)]
        found = found_by[site.family_number]
        return PrefillChoice(site, self.prefill_terms(ask, site, found, now_ms), found)

    def prefill_terms(self, ask: Ask, site: Site, found: Found, now_ms: float) -> PrefillTerms:
        """What a prefill on `site` would cost."""
        prompt, node_id, estimators = ask.prompt_tokens, site.node_id, self.estimators
        own = found.depths.get(node_id, 0) if site.hands_over else 0
        source, best = found.best_other(node_id) if site.hands_over else ("", 0)
        if not best > own * self.policy.pull_ratio:  # 0 * inf is nan: no pull
            source, best = "", own
        # The last token is always computed: the answer's first token comes from its logits.
        own_tokens = min(own * site.block_tokens, prompt - 1)
        reused = min(best * site.block_tokens, prompt - 1)
        slow = min(own_tokens, self.index.slow_blocks(found.match, node_id, own) * site.block_tokens)
        # What is pulled lies in DRAM then, and is read from there like the rest.
        fast_bytes, slow_bytes = (reused - slow) * site.token_bytes, slow * site.token_bytes
        load_ms = estimators.load_ms(node_id, fast_bytes, slow_bytes)
        transfer_ms = recompute_ms = 0.0
        if source:
            size, in_flight = (reused - own_tokens) * site.token_bytes, self.ledger.pulls.get(source, 0)
            transfer_ms = estimators.pull_ms(source, node_id, size, in_flight)
        prefill_ms = site.models.prefill.predict(prompt, reused)
        if not site.hands_over and site.record.role is Role.PREFILL:
            recompute_ms = site.models.prefill.predict(prompt, 0)
        queue_ms = site.load.queue_ms(now_ms)
        return PrefillTerms(
            instance_id=site.instance_id,
            node_id=site.record.node_id,
            rank=self.fleet.rank(site, ask.avoid, now_ms),
            own_tokens=own_tokens,
            reused_tokens=reused,
            pull_from=source,
            queued=len(site.load.prefill),
            queue_ms=queue_ms,
            load_ms=load_ms,
            transfer_ms=transfer_ms,
            prefill_ms=prefill_ms,
            recompute_ms=recompute_ms,
            ttft_ms=queue_ms + load_ms + transfer_ms + prefill_ms + recompute_ms,
        )

    def _prefill_costs(
        self, ask: Ask, sites: Sequence[Site], found: Found, now_ms: float, costs: PrefillCosts
    ) -> None:
        """Append the costs of `sites`, all of one family."""
        if found.match.slow or not self.fleet.all_hand_over(sites):
            for site in sites:
                terms = self.prefill_terms(ask, site, found, now_ms)
                costs.own_tokens.append(terms.own_tokens)
                costs.queue_ms.append(terms.queue_ms)
                costs.ttft_ms.append(terms.ttft_ms)
        else:
            self._prefill_sums(ask.prompt_tokens, sites, found, now_ms, costs)

    def _prefill_sums(
        self, prompt: int, sites: Sequence[Site], found: Found, now_ms: float, costs: PrefillCosts
    ) -> None:
        depths, estimators = found.depths, self.estimators
        source = found.order[0] if found.order else ""
        plans = {own: self._plan(prompt, own, sites[0], found) for own in {0, *depths.values()}}
        links, any_link = estimators.link_rates.get(source, _NO_RATES), estimators.any_link_rate
        drams, any_dram = estimators.dram_rates, estimators.any_dram_rate
        own_tokens_of = costs.own_tokens.append
        queue_of, ttft_of = costs.queue_ms.append, costs.ttft_ms.append
        for site in sites:
            node_id, load = site.node_id, site.load
            own_tokens, load_bytes, pull_bytes, x, y = plans[depths.get(node_id, 0)]
            a, b, c = site.models.prefill_coefficients
            ms = a + b * x + c * y
            if ms < 0.0:
                ms = 0.0
            if load_bytes:
                ms += load_bytes / drams.get(node_id, any_dram)
            if pull_bytes:
                ms += PULL_LATENCY_MS + pull_bytes / links.get(node_id, any_link)
            queue = load.free_at_ms - now_ms
            if queue < load.behind_ms:
                queue = load.behind_ms
            queue_of(queue)
            ttft_of(queue + ms)
            own_tokens_of(own_tokens)

    def _plan(self, prompt: int, own: int, site: Site, found: Found) -> tuple[int, int, int, float, float]:
        """(own tokens, bytes to load, bytes to pull, and the two variables of the prefill model) for those
        instances whose node holds `own` blocks. In one family, all agree on the bytes of a token."""
        own_tokens = reused = own * site.block_tokens
        pull_bytes, best = 0, found.match.deepest()
        if best > own * self.policy.pull_ratio:
            reused = best * site.block_tokens
        if reused >= prompt:
            reused = prompt - 1
            own_tokens = min(own_tokens, reused)
        if reused > own_tokens:
            in_flight = self.ledger.pulls.get(found.order[0], 0)
            pull_bytes = (reused - own_tokens) * site.token_bytes * (1 + in_flight)
        new = prompt - reused
        x, y = new * 1e-3, new * (prompt + reused) * 1e-6
        return own_tokens, reused * site.token_bytes, pull_bytes, x, y

    # --- decode --------------------------------------------------------------------------------------

    def choose_decode(
        self,
        ask: Ask,
        sites: Sequence[Site],
        prefill: PrefillTerms,
        found: Found,
        expected: int,
        now_ms: float,
    ) -> Site:
        """The policy's choice among those of `sites` that have the best rank, with KV room if any has."""
        candidates = self.fleet.best_ranked(sites, ask.avoid, now_ms)
        if len(candidates) == 1:
            return candidates[0]
        if prefill.rank == RANK_NODE_AWAY or not self.fleet.all_hand_over(candidates):
            terms = [self.decode_terms(ask, s, prefill, found, expected, now_ms) for s in candidates]
            sums = [t.total_ms if t.room else math.inf for t in terms]
        else:
            sums = self._decode_sums(ask, candidates, prefill.node_id or "", found, expected)
        return candidates[self.policy.decode(DecodeCosts(sums))]

    def decode_terms(
        self, ask: Ask, site: Site, prefill: PrefillTerms, found: Found, expected: int, now_ms: float
    ) -> DecodeTerms:
        """What decoding on `site` would be like, for a prompt that was prefilled as `prefill` says. What the
        request itself has reserved there already is left out."""
        load, prompt = site.load, ask.prompt_tokens
        batch, kv_tokens = len(load.decode), load.kv_tokens
        if (mine := load.decode.get(ask.request_id)) is not None:
            batch, kv_tokens = batch - 1, kv_tokens - mine.kv_tokens
        need = kv_tokens + prompt + expected
        tbt_ms = site.models.step.predict(min(batch + 1, site.batch_max), need)
        holder = prefill.node_id if prefill.rank != RANK_NODE_AWAY else None
        handoff_ms = self._handoff_ms(prompt, site, holder, found)
        return DecodeTerms(
            instance_id=site.instance_id,
            node_id=site.record.node_id,
            rank=self.fleet.rank(site, ask.avoid, now_ms),
            batch=batch,
            kv_tokens=kv_tokens,
            room=need <= site.kv_capacity,
            handoff_ms=handoff_ms,
            tbt_ms=tbt_ms,
            total_ms=handoff_ms + tbt_ms * expected,
        )

    def _handoff_ms(self, prompt: int, site: Site, holder: str | None, found: Found) -> float:
        """Until a decode instance has the prompt's KV that lies on node `holder`."""
        if holder is None or not site.hands_over:
            return site.models.prefill.predict(prompt, 0)
        node_id, estimators = site.node_id, self.estimators
        load_ms = estimators.load_ms(node_id, prompt * site.token_bytes, 0)
        missing = prompt - found.depths.get(node_id, 0) * site.block_tokens
        if holder == node_id or missing <= 0:
            return load_ms
        size, in_flight = missing * site.token_bytes, self.ledger.pulls.get(holder, 0)
        return load_ms + estimators.pull_ms(holder, node_id, size, in_flight)

    def _decode_sums(
        self, ask: Ask, sites: Sequence[Site], holder: str, found: Found, expected: int
    ) -> list[float]:
        """`total_ms` of each site, infinite where there is no KV room."""
        prompt, step, token_bytes = ask.prompt_tokens, sites[0].block_tokens, sites[0].token_bytes
        estimators, depths, request_id = self.estimators, found.depths, ask.request_id
        links, any_link = estimators.link_rates.get(holder, _NO_RATES), estimators.any_link_rate
        drams, any_dram = estimators.dram_rates, estimators.any_dram_rate
        load_bytes, more = prompt * token_bytes, prompt + expected
        pull_scale = token_bytes * (1 + self.ledger.pulls.get(holder, 0))
        sums = []
        for site in sites:
            load, node_id = site.load, site.node_id
            batch, need = len(load.decode) + 1, load.kv_tokens + more
            if request_id in load.decode:
                batch, need = batch - 1, need - load.decode[request_id].kv_tokens
            if need > site.kv_capacity:
                sums.append(math.inf)
                continue
            a, b, c = site.models.step_coefficients
            tbt_ms = a + b * (batch if batch < site.batch_max else site.batch_max) + c * need * 1e-3
            total_ms = load_bytes / drams.get(node_id, any_dram)
            missing = prompt - depths.get(node_id, 0) * step
            if missing > 0 and node_id != holder:
                total_ms += PULL_LATENCY_MS + missing * pull_scale / links.get(node_id, any_link)
            sums.append(total_ms + tbt_ms * expected if tbt_ms > 0.0 else total_ms)
        return sums

    # --- hints ---------------------------------------------------------------------------------------

    def prefill_sources(self, prefill: PrefillTerms, found: Found) -> list[str]:
        """Where the prefill instance should pull from, best first; empty when the plan is not to pull."""
        if not prefill.pull_from:
            return []
        return [name for name in found.order if name != prefill.node_id][:SOURCES_MAX]

    def decode_sources(self, prefill: PrefillTerms, decode_node: str | None, found: Found) -> list[str]:
        """Where the prompt's KV is once it has been prefilled: the prefill node, then other deep holders."""
        names = [] if prefill.node_id is None else [prefill.node_id]
        deep = found.match.deepest() // 2
        names += [n for n in found.order if found.depths[n] > deep and n not in names]
        return [name for name in names if name != decode_node][:SOURCES_MAX]

    def prefetches(self, ask: Ask, family: Family, instances: Sequence[str], found: Found) -> list[Prefetch]:
        """What the nodes of `instances` should bring into memory: blocks of the prompt that they have on
        disks alone. Nothing for a node that is away, or that its engine cannot read from."""
        if not found.match.slow:
            return []
        sites = [self.fleet.sites[name] for name in instances]
        nodes = dict.fromkeys(site.node_id for site in sites if site.hands_over)
        keys, wanted = ask.chains[family], []
        for node_id in nodes:
            slow = self.index.slow_positions(found.match, node_id, found.depths.get(node_id, 0))
            if slow:
                names = [keys[position] for position in slow]
                wanted.append(Prefetch(node_id=node_id, namespace=family.namespace, keys=names))
        return wanted


def _by_family(sites: Sequence[Site]) -> list[Sequence[Site]]:
    """`sites` in groups of one family each."""
    if len({site.family_number for site in sites}) == 1:
        return [sites]
    groups: dict[int, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.family_number, []).append(site)
    return list(groups.values())
