"""The instances and nodes as scheduling sees them: who can serve which model, and who is fit for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mooncaked.conductor.cost import Estimators, InstanceModels
from mooncaked.conductor.ledger import Ledger, Load
from mooncaked.conductor.messages import Family, family_of
from mooncaked.types import InstanceRecord, NodePhase, NodeRecord, Role

RANK_FIT = 0
RANK_NODE_AWAY = 1  # its node's daemon is dead, draining or starting: works, but cannot hand KV over
RANK_FAILED = 2  # it refused a connection or broke a moment ago
RANK_AVOID = 3  # it failed this very request
_SERVED_MAX = 1000


@dataclass(slots=True)
class Site:
    """One instance, with what decisions read of it close at hand."""

    record: InstanceRecord
    family: Family
    family_number: int  # equal numbers, equal families: cheaper to compare
    models: InstanceModels
    limit_tokens: int  # prompt and answer together
    instance_id: str
    node_id: str  # "" without a node
    block_tokens: int
    token_bytes: int  # of KV
    kv_capacity: float  # tokens; infinite where the instance does not say
    batch_max: int  # at least 1
    load: Load
    fit: bool = True  # its node is there and ready, or it has none by design
    hands_over: bool = True  # it has a node that is there and ready: KV can come and go


@dataclass(slots=True)
class Model:
    """All instances that serve one model."""

    prefill: list[Site] = field(default_factory=list)
    usable_prefill: list[Site] = field(default_factory=list)  # aggregated, or with a decode instance beside
    decode: dict[Family, list[Site]] = field(default_factory=dict)
    limit_tokens: int = 0  # of the instance with the longest context
    limit_tokens_min: int = 1 << 62  # of the one with the shortest

    def sites(self) -> list[Site]:
        """Every instance once, those that prefill first."""
        decode = (site for sites in self.decode.values() for site in sites)
        return self.prefill + [site for site in decode if site.record.role is Role.DECODE]

    def families(self) -> set[Family]:
        """Every way to name the blocks of a prompt for this model."""
        return {site.family for site in self.prefill}


class Fleet:
    """Kept up to date by `update` (etcd), `set_away` (subscriptions) and `mark_failed` (gateways)."""

    def __init__(self, estimators: Estimators, ledger: Ledger) -> None:
        self._estimators = estimators
        self._ledger = ledger
        self._families: dict[Family, int] = {}
        self.sites: dict[str, Site] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self._models: dict[str, Model] = {}
        self._away: frozenset[str] = frozenset()
        self._failed: dict[str, float] = {}  # instance -> until when it counts as failed, in ms
        self._served: dict[str, None] = {}  # names of models that have been served, the last ones
        self._all_hand_over = True  # every instance has a node that is there and ready

    def update(self, instances: Mapping[str, InstanceRecord], nodes: Mapping[str, NodeRecord]) -> None:
        """Take over what etcd says."""
        self.nodes = dict(nodes)
        self._models, self._families = {}, {}
        self.sites = {key: self._site(record) for key, record in sorted(instances.items())}
        self._judge_all()
        for site in self.sites.values():
            self._enlist(site)
        self._served = dict(list((self._served | dict.fromkeys(self._models)).items())[-_SERVED_MAX:])
        for model in self._models.values():
            model.usable_prefill = [
                s for s in model.prefill if s.record.role is Role.BOTH or model.decode.get(s.family)
            ]

    def set_away(self, node_ids: frozenset[str]) -> None:
        """These nodes are in etcd, but do not answer."""
        self._away = node_ids
        self._judge_all()

    def mark_failed(self, instance_id: str, until_ms: float) -> None:
        """Prefer others to this instance until then."""
        self._failed[instance_id] = until_ms

    def failed(self, now_ms: float) -> list[str]:
        """The instances that count as failed now."""
        self._failed = {key: until for key, until in self._failed.items() if until > now_ms}
        return list(self._failed)

    def rank(self, site: Site, avoid: frozenset[str], now_ms: float) -> int:
        """How much is against this instance, see the `RANK_` constants."""
        instance_id = site.instance_id
        if instance_id in avoid:
            return RANK_AVOID
        if self._failed and self._failed.get(instance_id, 0.0) > now_ms:
            return RANK_FAILED
        return RANK_FIT if site.fit else RANK_NODE_AWAY

    def best_ranked(self, sites: Sequence[Site], avoid: frozenset[str], now_ms: float) -> Sequence[Site]:
        """The sites of the lowest rank; `sites` is not empty."""
        if not avoid and not self._failed:
            if self._all_hand_over:
                return sites
            return [site for site in sites if site.fit] or list(sites)
        ranks = [self.rank(site, avoid, now_ms) for site in sites]
        best = min(ranks)
        return [site for site, rank in zip(sites, ranks, strict=True) if rank == best]

    def model(self, name: str) -> Model | None:
        """The instances that serve `name`; None when there is none."""
        return self._models.get(name)

    def was_served(self, name: str) -> bool:
        """Whether some instance has served this model since this process began."""
        return name in self._served

    def models(self) -> list[str]:
        """Names of all models that some instance serves."""
        return sorted(self._models)

    def _site(self, record: InstanceRecord) -> Site:
        family = family_of(record)
        number = self._families.setdefault(family, len(self._families))
        return Site(
            record=record,
            family=family,
            family_number=number,
            models=self._estimators.of(record),
            limit_tokens=min(record.context_tokens, record.kv_capacity_tokens or record.context_tokens),
            instance_id=record.instance_id,
            node_id=record.node_id or "",
            block_tokens=record.block_tokens,
            token_bytes=record.kv_bytes_per_token,
            kv_capacity=record.kv_capacity_tokens or math.inf,
            batch_max=max(1, record.batch_max),
            load=self._ledger.load(record.instance_id),
        )

    def _judge_all(self) -> None:
        for site in self.sites.values():
            node = self.nodes.get(site.node_id)
            ready = node is not None and node.phase is NodePhase.READY and site.node_id not in self._away
            site.fit, site.hands_over = ready or not site.node_id, ready
        self._all_hand_over = all(site.hands_over for site in self.sites.values())

    def all_hand_over(self, sites: Sequence[Site]) -> bool:
        """Whether KV can come and go at each of `sites`."""
        return self._all_hand_over or all(site.hands_over for site in sites)

    def _enlist(self, site: Site) -> None:
        model = self._models.setdefault(site.record.model, Model())
        model.limit_tokens = max(model.limit_tokens, site.limit_tokens)
        model.limit_tokens_min = min(model.limit_tokens_min, site.limit_tokens)
        if site.record.role is not Role.DECODE:
            model.prefill.append(site)
        if site.record.role is not Role.PREFILL:
            model.decode.setdefault(site.family, []).append(site)
