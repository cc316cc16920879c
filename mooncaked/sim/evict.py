"""What an eviction policy makes of a sequence of requests: one pool of equal blocks that starts empty.

A request looks up its blocks; the leading ones that are there are its hits and count as used. Then the rest
is stored, and blocks are evicted until the pool holds no more than its capacity. A real pool keeps that
much free ahead of need, so it stores before it evicts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncaked.errors import IntegrityError
from mooncaked.eviction import Policy
from mooncaked.sim.traces import Request

Report = Callable[[int], None]  # is told how many more requests are done
_PROGRESS_STEP = 100


@dataclass(slots=True, eq=False)
class SimBlock:
    """A block of the simulated pool."""

    number: int
    key: bytes
    parent: bytes | None
    above: SimBlock | None
    namespace: str = ""
    size: int = 1
    pins: int = 0
    children: int = 0
    touched: int = 0
    policy: object | None = None


class SimPool:
    """Blocks under one policy."""

    def __init__(self, policy: Policy[SimBlock], capacity: int) -> None:
        self.policy = policy
        self._capacity = capacity  # blocks
        self._blocks: dict[int, SimBlock] = {}

    def request(self, chain: Sequence[int]) -> int:
        """Look up and store the blocks of a request, root first; how many of the leading ones were there."""
        blocks = self._blocks
        found: list[SimBlock] = []
        for number in chain:
            if (block := blocks.get(number)) is None:
                break
            found.append(block)
        if found:
            self.policy.touch(found)
        if len(found) < len(chain):
            self.policy.touch(self._store(chain[len(found) :], found[-1] if found else None))
        while len(blocks) > self._capacity:
            self._evict()
        return len(found)

    def _store(self, rest: Sequence[int], above: SimBlock | None) -> list[SimBlock]:
        stored: list[SimBlock] = []
        for number in rest:
            if above is not None:
                above.children += 1
            key = b"%d" % number
            above = SimBlock(number, key, above.key if above else None, above)
            self._blocks[number] = above
            stored.append(above)
        return stored

    def _evict(self) -> None:
        block = self.policy.victim()
        if block is None:
            raise IntegrityError(what="simulated pool", detail="no block may go, though none is pinned")
        del self._blocks[block.number]
        self.policy.discard(block)
        if (above := block.above) is not None:
            above.children -= 1
            if not above.children:
                self.policy.released(above)


def count_hits(
    policy: Policy[SimBlock], requests: Sequence[Request], capacity: int, report: Report = lambda _: None
) -> int:
    """The blocks of `requests` that are found in a pool of `capacity` blocks."""
    pool = SimPool(policy, capacity)
    hits = 0
    for done, request in enumerate(requests, 1):
        hits += pool.request(request.chain)
        if done % _PROGRESS_STEP == 0:
            report(_PROGRESS_STEP)
    report(len(requests) % _PROGRESS_STEP)
    return hits
