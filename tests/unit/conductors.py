"""Small clusters for tests of the conductor's pure parts: no I/O, and a clock that the test moves."""

from __future__ import annotations

import random
from typing import Any

from mooncaked.conductor.admission import Limits
from mooncaked.conductor.core import Conductor, Settings
from mooncaked.conductor.index import PrefixIndex
from mooncaked.conductor.messages import Ask, Family
from mooncaked.conductor.policies import make_policy
from mooncaked.keys import chain_keys
from mooncaked.types import BlockEvent, InstanceRecord, NodeRecord, Role, Tier
from tests.fakes.cluster_view import node_record
from tests.fakes.step_clock import StepClock

STEP = 10  # tokens of a block
FAMILY = Family("ns", STEP)


def instance(instance_id: str, role: Role, node_id: str | None, **changes: Any) -> InstanceRecord:
    fields: dict[str, Any] = {
        "instance_id": instance_id,
        "url": f"http://{instance_id}",
        "role": role,
        "model": "m",
        "engine": "fake",
        "node_id": node_id,
        "namespace": FAMILY.namespace,
        "hash_name": FAMILY.hash_name,
        "block_tokens": STEP,
        "kv_bytes_per_token": 1000,
        "context_tokens": 10_000,
        "kv_capacity_tokens": 100_000,
        "batch_max": 8,
        "pid": 1,
        "started_at_s": 0.0,
    }
    return InstanceRecord(**(fields | changes))


class Small:
    """A conductor over `p1, p2, ...` and `d1, d2, ...`, each on the node `n<instance id>`."""

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 1,
        *,
        policy: str = "algorithm1",
        admission: str = "off",
        threshold: float = 4.0,
        slo_ttft_ms: float = 30_000.0,
        slo_tbt_ms: float = 100.0,
    ) -> None:
        self.clock = StepClock()
        self.index = PrefixIndex(10_000)
        settings = Settings(
            admission=admission,
            limits=Limits(slo_ttft_ms=slo_ttft_ms, slo_tbt_ms=slo_tbt_ms),
            reservation_ttl_ms=600_000.0,
        )
        chosen = make_policy(policy, threshold, random.Random(1))
        self.conductor = Conductor(self.index, chosen, settings, self.clock)
        self.instances: dict[str, InstanceRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        for i in range(1, prefill + 1):
            self.put(instance(f"p{i}", Role.PREFILL, f"np{i}"))
        for i in range(1, decode + 1):
            self.put(instance(f"d{i}", Role.DECODE, f"nd{i}"))
        self._sources: dict[str, int] = {}

    def put(self, record: InstanceRecord) -> None:
        """Register an instance and its node."""
        self.instances[record.instance_id] = record
        if record.node_id is not None:
            self.nodes.setdefault(record.node_id, node_record(record.node_id))
        self.conductor.update(self.instances, self.nodes)

    def hold(self, node_id: str, tokens: list[int], tier: Tier = Tier.DRAM) -> None:
        """A node has all full blocks of `tokens`."""
        if node_id not in self._sources:
            self._sources[node_id] = self.index.begin(node_id)
            self.index.publish(self._sources[node_id])
        keys = chain_keys(FAMILY.namespace, tokens, STEP)
        events = [BlockEvent(True, FAMILY.namespace, key, None, 10_000, tier) for key in keys]
        self.index.apply(self._sources[node_id], events)

    def forget(self, node_id: str, key: bytes, tier: Tier = Tier.SSD) -> None:
        """A node has one block no longer."""
        self.index.apply(
            self._sources[node_id], [BlockEvent(False, FAMILY.namespace, key, None, 10_000, tier)]
        )

    def ask(self, request_id: str = "r", tokens: list[int] | int = 100, **fields: Any) -> Ask:
        """A request for `tokens`, or for so many that nobody has seen."""
        if isinstance(tokens, int):
            prompt_tokens, chains = tokens, {}
        else:
            prompt_tokens, chains = len(tokens), {FAMILY: chain_keys(FAMILY.namespace, tokens, STEP)}
        base: dict[str, Any] = {"max_tokens": 10, "chains": chains}
        return Ask(request_id=request_id, model="m", prompt_tokens=prompt_tokens, **(base | fields))

    def schedule(self, request_id: str = "r", tokens: list[int] | int = 100, **fields: Any) -> Any:
        """Decide and reserve."""
        decision = self.conductor.schedule(self.ask(request_id, tokens, **fields), term=1)
        self.conductor.ledger.check_integrity()
        return decision

    def learn_prefill(self, instance_id: str, ms_per_token: float, samples: int = 20) -> None:
        """The instance has shown how fast it is."""
        models = self.conductor.fleet.sites[instance_id].models
        for i in range(samples):
            n = 100 + 37 * i
            models.learn_prefill(n, 0, n * ms_per_token)


def text(start: int, length: int) -> list[int]:
    """Token ids that are no prefix of a text with another start."""
    return list(range(start, start + length))
