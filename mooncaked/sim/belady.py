"""What could be had by somebody who knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from mooncaked.sim.evict import Report
from mooncaked.sim.traces import Request

_NEVER = 1 << 60
_PROGRESS_STEP = 100


def next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request the number of the next request that has it."""
    last: dict[int, int] = {}
    uses: list[list[int]] = [[]] * len(requests)
    for number in range(len(requests) - 1, -1, -1):
        chain = requests[number].chain
        uses[number] = [last.get(block, _NEVER) for block in chain]
        last.update(dict.fromkeys(chain, number))
    return uses


class _Pool:
    """The pool of the clairvoyant: of the blocks without a child, the one with the farthest next use goes,
    which may be one that just came."""

    def __init__(self) -> None:
        self.next_use: dict[int, int] = {}
        self._children: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._heap: list[tuple[int, int]] = []  # minus the next use, block; stale where the next use differs

    def request(self, chain: Sequence[int], uses: Sequence[int]) -> int:
        """Use and store a chain; how many of its leading blocks were there."""
        hits, parent = 0, None
        for block, use in zip(chain, uses, strict=True):
            if block in self.next_use:
                hits += 1
            else:
                self._children[block] = 0
                self._parent[block] = parent
                if parent is not None:
                    self._children[parent] += 1
            self.next_use[block] = use
            parent = block
        if parent is not None:
            self._offer(parent)
        return hits

    def shrink(self, capacity: int) -> None:
        """Evict down to `capacity` blocks."""
        while len(self.next_use) > capacity:
            use, block = heappop(self._heap)
            if self.next_use.get(block) != -use or self._children[block]:
                continue
            del self.next_use[block], self._children[block]
            if (parent := self._parent.pop(block)) is not None:
                self._children[parent] -= 1
                self._offer(parent)

    def _offer(self, block: int) -> None:
        if not self._children[block]:
            heappush(self._heap, (-self.next_use[block], block))


def count_best_hits(requests: Sequence[Request], capacity: int, report: Report = lambda _: None) -> int:
    """The blocks of `requests` that Belady's choice, leaf before root, finds in a pool of `capacity` blocks.
    It is the optimum for chains that do not share blocks, and a very good choice for those that do."""
    uses = next_uses(requests)
    pool = _Pool()
    hits = 0
    for number, request in enumerate(requests):
        hits += pool.request(request.chain, uses[number])
        pool.shrink(capacity)
        if (number + 1) % _PROGRESS_STEP == 0:
            report(_PROGRESS_STEP)
    report(len(requests) % _PROGRESS_STEP)
    return hits
