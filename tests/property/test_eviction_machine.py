"""LRU against a model that sorts all blocks anew each time, and what must hold for every policy."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mooncaked.eviction import POLICIES, LruPolicy, Policy, make_policy

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


PARENTS = [None, 0, 1, 2, 1, 4, 4, None, 7, 8, None, 10]  # of the places of a small forest; two namespaces


class Place:
    """A block for any policy, and what the model knows of it."""

    def __init__(self, number: int) -> None:
        space, place = divmod(number, len(PARENTS))
        parent = PARENTS[place]
        self.number = number
        self.namespace = f"space {space}"
        self.key = b"%d" % place
        self.parent = None if parent is None else b"%d" % parent
        self.above = None if parent is None else space * len(PARENTS) + parent
        self.size = 1 + place
        self.pins = self.children = self.touched = 0
        self.policy: object | None = None
        self.present = self.known = False

    def __repr__(self) -> str:
        return f"{self.namespace}/{self.key!r}"


PLACES = st.integers(0, 2 * len(PARENTS) - 1)


class AnyPolicyMachine(RuleBasedStateMachine):
    """Blocks of a forest are written, used, pinned, removed and evicted in any order. Whatever the policy's
    order is, it knows what it was told of, and names nothing that must stay."""

    name = ""

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy[Place] = make_policy(self.name)
        self.places = [Place(number) for number in range(2 * len(PARENTS))]

    def count_children(self, place: Place) -> None:
        """The block above `place` after it has come or gone."""
        if place.above is not None:
            above = self.places[place.above]
            above.children = sum(other.present for other in self.places if other.above == place.above)
            if not above.children and above.known:
                self.policy.released(above)

    @rule(number=PLACES)
    def begin(self, number: int) -> None:
        place = self.places[number]
        if not place.present:
            place.present = True
            place.pins = 0
            self.count_children(place)

    @rule(number=PLACES)
    def complete(self, number: int) -> None:
        place = self.places[number]
        if place.present and not place.known:
            place.known = True
            self.policy.touch([place])

    @rule(number=PLACES)
    def abort(self, number: int) -> None:
        place = self.places[number]
        if place.present and not place.known:
            place.present = False
            self.count_children(place)

    @rule(number=PLACES)
    def store_chain(self, number: int) -> None:
        new: list[Place] = []
        step: int | None = number
        while step is not None and not self.places[step].present:
            new.insert(0, self.places[step])
            step = self.places[step].above
        for place in new:
            place.present = place.known = True
        for place in new:
            self.count_children(place)
        self.policy.touch(new)

    @rule(number=PLACES)
    def use_chain(self, number: int) -> None:
        chain: list[Place] = []
        step: int | None = number
        while step is not None:
            chain.insert(0, self.places[step])
            step = self.places[step].above
        self.policy.touch([place for place in chain if place.known])

    @rule(numbers=st.lists(PLACES, max_size=5))
    def use_some(self, numbers: list[int]) -> None:
        self.policy.touch(self.places[number] for number in numbers if self.places[number].known)

    @rule(number=PLACES)
    def pin(self, number: int) -> None:
        if self.places[number].known:
            self.places[number].pins += 1

    @rule(number=PLACES)
    def unpin(self, number: int) -> None:
        place = self.places[number]
        if place.pins:
            place.pins -= 1
            if not place.pins and place.known:
                self.policy.released(place)

    @rule(number=PLACES, released_first=st.booleans())
    def remove(self, number: int, released_first: bool) -> None:
        place = self.places[number]
        if not place.known:
            return
        place.present = False
        if released_first:
            self.count_children(place)
        self.policy.discard(place)
        place.known = False
        assert not place.touched
        if not released_first:
            self.count_children(place)

    @rule(count=st.integers(0, 9), released_first=st.booleans())
    def evict(self, count: int, released_first: bool) -> None:
        for _ in range(count):
            known = [place for place in self.places if place.known]
            victim = self.policy.victim()
            if victim is None:
                assert not [place for place in known if not place.pins and not place.children]
                inner = self.policy.inner_victim()
                assert inner in [place for place in known if not place.pins] or (
                    inner is None and all(place.pins for place in known)
                )
                return
            assert victim.known
            assert not victim.pins
            assert not victim.children
            assert self.policy.victim() is victim
            self.remove(victim.number, released_first)

    @invariant()
    def agrees(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == sum(place.known for place in self.places)
        assert all(bool(place.touched) == place.known for place in self.places)


def run(name: str) -> None:
    machine = type("Machine", (AnyPolicyMachine,), {"name": name})
    budget = settings(max_examples=40, stateful_step_count=50, deadline=None)
    run_state_machine_as_test(machine, settings=budget)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_names_only_what_may_go(name: str) -> None:
    run(name)


@pytest.mark.timeout(600)
def test_so_does_the_learnt_order_that_changes_with_each_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.eviction.duel._LOSS_MIN", 0)
    monkeypatch.setattr("mooncaked.eviction.prefix_aware._LEARN_MIN", 4)
    run("prefix-aware")
