"""The prefix index against a model that is too simple to be wrong."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from mooncaked.conductor.index import Holder, PrefixIndex
from mooncaked.types import BlockEvent, Tier

NODES = [f"n{i}" for i in range(5)]
NAMESPACES = ["a", "b"]
KEYS = [bytes([i]) * 16 for i in range(8)]

Blocks = set[tuple[str, bytes, Tier]]


def size_of(namespace: str, key: bytes) -> int:
    """A value never changes, so neither does its size; some differ within a namespace."""
    return 100 if key[0] % 3 else 200 + len(namespace)


class Model:
    """Sets of blocks by source."""

    def __init__(self) -> None:
        self.sources: dict[int, tuple[str, Blocks]] = {}
        self.published: dict[str, int] = {}
        self.hidden: set[int] = set()

    def visible(self) -> dict[str, Blocks]:
        return {n: self.sources[s][1] for n, s in self.published.items() if s not in self.hidden}

    def depth(self, node_id: str, namespace: str, keys: list[bytes]) -> int:
        blocks = self.visible().get(node_id, set())
        for i, key in enumerate(keys):
            if not any((namespace, key, tier) in blocks for tier in Tier):
                return i
        return len(keys)


class IndexMachine(RuleBasedStateMachine):
    """Sources come, tell, hide, return and go, in any order, with sweeps in between."""

    sources = Bundle("sources")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.refusing = False  # the index was full once: it may know less than the model

    @initialize(blocks_max=st.sampled_from([6, 1000, 1000, 1000]))
    def make(self, blocks_max: int) -> None:
        self.index = PrefixIndex(blocks_max)

    @rule(
        target=sources,
        node_id=st.sampled_from(NODES),
        namespace=st.sampled_from(NAMESPACES),
        n=st.integers(0, 8),
    )
    def join(self, node_id: str, namespace: str, n: int) -> int:
        """A node comes and has a part of the chain, as nodes mostly do."""
        source = self.begin(node_id)
        self.apply(source, True, namespace, KEYS[:n], Tier.DRAM)
        self.publish(source)
        return source

    @rule(target=sources, node_id=st.sampled_from(NODES))
    def begin(self, node_id: str) -> int:
        source = self.index.begin(node_id)
        self.model.sources[source] = (node_id, set())
        return source

    @rule(
        source=sources,
        stored=st.booleans(),
        namespace=st.sampled_from(NAMESPACES),
        keys=st.lists(st.sampled_from(KEYS), max_size=6),
        tier=st.sampled_from(list(Tier)),
    )
    def apply(self, source: int, stored: bool, namespace: str, keys: list[bytes], tier: Tier) -> None:
        if source not in self.model.sources:
            return
        before = self.index.refused
        events = [BlockEvent(stored, namespace, k, None, size_of(namespace, k), tier) for k in keys]
        self.index.apply(source, events)
        self.refusing |= self.index.refused > before
        blocks = self.model.sources[source][1]
        for key in keys:
            (blocks.add if stored else blocks.discard)((namespace, key, tier))

    @rule(
        source=sources,
        namespace=st.sampled_from(NAMESPACES),
        key=st.sampled_from(KEYS),
        tier=st.sampled_from([Tier.GPU, Tier.SSD]),
    )
    def move(self, source: int, namespace: str, key: bytes, tier: Tier) -> None:
        """A block goes from DRAM to another tier, as nodes demote and promote."""
        if source in self.model.sources and (namespace, key, Tier.DRAM) in self.model.sources[source][1]:
            self.apply(source, True, namespace, [key], tier)
            self.apply(source, False, namespace, [key], Tier.DRAM)

    @rule(source=sources)
    def publish(self, source: int) -> None:
        if source not in self.model.sources:
            return
        node_id = self.model.sources[source][0]
        before = self.model.published.get(node_id)
        self.index.publish(source)
        if before is not None and before != source:
            self._forget(before)
        self.model.published[node_id] = source
        self.model.hidden.discard(source)

    @rule(source=sources)
    def hide(self, source: int) -> None:
        if source in self.model.sources:
            self.index.hide(source)
            self.model.hidden.add(source)

    @rule(source=consumes(sources))
    def retire(self, source: int) -> None:
        if source in self.model.sources:
            self.index.retire(source)
            self._forget(source)

    @rule(node_id=st.sampled_from(NODES))
    def drop_node(self, node_id: str) -> None:
        self.index.drop_node(node_id)
        if (source := self.model.published.get(node_id)) is not None:
            self._forget(source)

    @rule(steps=st.integers(1, 5), keys_max=st.integers(1, 6))
    def sweep(self, steps: int, keys_max: int) -> None:
        for _ in range(steps):
            self.index.sweep(keys_max)

    def _forget(self, source: int) -> None:
        node_id, _ = self.model.sources.pop(source)
        self.model.hidden.discard(source)
        if self.model.published.get(node_id) == source:
            del self.model.published[node_id]

    @rule(namespace=st.sampled_from([*NAMESPACES, "none"]), keys=st.permutations(KEYS))
    def lookup_anything(self, namespace: str, keys: list[bytes]) -> None:
        self._check_lookup(namespace, keys)

    @invariant()
    def looks_up_the_chain(self) -> None:
        for namespace in NAMESPACES:
            self._check_lookup(namespace, KEYS)

    def _check_lookup(self, namespace: str, keys: list[bytes]) -> None:
        match = self.index.lookup(namespace, keys)
        depths = self.index.depths(match)
        groups = [depth for depth, _ in match.groups]
        assert groups == sorted(set(groups))
        assert 0 not in groups
        assert match.deepest() == max(depths.values(), default=0)
        for node_id in NODES:
            expected = self.model.depth(node_id, namespace, keys)
            if self.refusing:
                assert depths.get(node_id, 0) <= expected
                continue
            assert depths.get(node_id, 0) == expected
            blocks = self.model.visible().get(node_id, set())
            slow = sum(
                (namespace, key, Tier.DRAM) not in blocks and (namespace, key, Tier.GPU) not in blocks
                for key in keys[:expected]
            )
            assert self.index.slow_blocks(match, node_id, expected) == slow

    @rule(namespace=st.sampled_from(NAMESPACES), key=st.sampled_from(KEYS))
    def holders(self, namespace: str, key: bytes) -> None:
        expected = {
            Holder(node_id, tier, size_of(namespace, key))
            for node_id, blocks in self.model.visible().items()
            for tier in Tier
            if (namespace, key, tier) in blocks
        }
        found = self.index.holders(namespace, key)
        assert len(found) == len(set(found))
        assert set(found) <= expected if self.refusing else set(found) == expected

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        assert self.index.blocks <= self.index.blocks_max

    def teardown(self) -> None:
        """When everything is gone, nothing is left."""
        for source in list(self.model.sources):
            self.index.retire(source)
        while self.index.sweep(3):
            pass
        self.index.check_integrity()
        assert self.index.blocks == 0
        assert self.index.sources() == []


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
