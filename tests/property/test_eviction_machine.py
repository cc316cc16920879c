"""The eviction order against a model that sorts all blocks anew each time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncaked.eviction import LruPolicy

BLOCKS = 7
SOME = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4)
ONE = st.integers(0, BLOCKS - 1)


class Node:
    """A block for the policy, and when the model thinks that it was touched last (0: not known)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pins = self.children = self.touched = self.last = 0

    def __repr__(self) -> str:
        return f"node {self.number}"


class PolicyMachine(RuleBasedStateMachine):
    """Pins and children come and go at random; the policy is told only of the last one that goes."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: LruPolicy[Node] = LruPolicy()
        self.nodes = [Node(number) for number in range(BLOCKS)]
        self.now = 0

    def known(self) -> list[Node]:
        return sorted((node for node in self.nodes if node.last), key=lambda node: node.last)

    @rule(numbers=SOME)
    def touch(self, numbers: list[int]) -> None:
        self.policy.touch(self.nodes[number] for number in numbers)
        for number in reversed(numbers):
            self.now += 1
            self.nodes[number].last = self.now

    @rule(number=ONE)
    def pin(self, number: int) -> None:
        self.nodes[number].pins += 1

    @rule(number=ONE)
    def unpin(self, number: int) -> None:
        node = self.nodes[number]
        if node.pins:
            node.pins -= 1
            if not node.pins:
                self.policy.released(node)

    @rule(number=ONE)
    def child_comes(self, number: int) -> None:
        self.nodes[number].children += 1

    @rule(number=ONE)
    def child_goes(self, number: int) -> None:
        node = self.nodes[number]
        if node.children:
            node.children -= 1
            if not node.children:
                self.policy.released(node)

    @rule(number=ONE)
    def discard(self, number: int) -> None:
        if self.nodes[number].last:
            self.policy.discard(self.nodes[number])
            self.nodes[number].last = 0

    @rule(evict=st.booleans())
    def victim(self, evict: bool) -> None:
        leaves = [node for node in self.known() if not node.pins and not node.children]
        victim = self.policy.victim()
        assert victim is (leaves[0] if leaves else None)
        if victim is None:
            inner = self.policy.inner_victim()
            candidates = [node for node in self.known() if not node.pins]
            assert inner in candidates if candidates else inner is None
        elif evict:
            self.discard(victim.number)

    @invariant()
    def agrees(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.known())


TestPolicy = pytest.mark.timeout(600)(PolicyMachine.TestCase)  # a failure takes long to shrink
TestPolicy.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
