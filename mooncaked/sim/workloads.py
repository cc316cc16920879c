"""Requests made from a seed: the ways in which prefixes are used again, each by itself and all at once.

A workload is a list of requests in the order of time. Equal names, seeds and counts give equal requests.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import accumulate, islice

from mooncaked.errors import InvalidRequest
from mooncaked.sim.traces import Request

Chain = tuple[int, ...]
Workload = Callable[[int], Iterator[Request]]  # of a seed, without end
_PER_S = 3.0  # requests, on average
_SHIFT = 10_000_000  # between the blocks of parts that share none


class Maker:
    """Source of chance, of time and of new blocks for one workload."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._blocks = 0

    def blocks(self, low: int, high: int) -> Chain:
        """From `low` to `high` blocks that nobody has had yet."""
        first = self._blocks
        self._blocks += self.random.randint(low, high)
        return tuple(range(first, self._blocks))

    def zipf(self, count: int, exponent: float) -> Callable[[], int]:
        """A choice below `count`, where the first are the most popular."""
        weights = list(accumulate((i + 1) ** -exponent for i in range(count)))
        return lambda: bisect(weights, self.random.random() * weights[-1])

    def request(self, chain: Chain, per_s: float = _PER_S) -> Request:
        """A request some time after the last one."""
        self.now_s += self.random.expovariate(per_s)
        return Request(self.now_s, chain)


def conversations(seed: int, gap_s: float = 60.0, grain_s: float = 0.0) -> Iterator[Request]:
    """Chats of several turns below a few system prompts. The last block of a turn is filled up by the next,
    so it is not used again. `grain_s`: arrivals come all at once, every so many seconds."""
    make = Maker(seed)
    systems = [make.blocks(1, 8) for _ in range(8)]
    popular = make.zipf(len(systems), 1.0)
    waiting: list[tuple[float, int, Chain, float]] = []  # when its next turn comes
    turns = 0

    def turn(at_s: float, chain: Chain, stays: float) -> Request:
        nonlocal turns
        turns += 1
        if make.random.random() < stays:
            due_s = at_s + make.random.lognormvariate(0.0, 1.0) * gap_s
            heappush(waiting, (due_s, turns, chain[:-1], stays))
        return Request(at_s // grain_s * grain_s if grain_s else at_s, chain)

    while True:
        make.now_s += make.random.expovariate(_PER_S / 2)
        while waiting and waiting[0][0] <= make.now_s:
            at_s, _, chain, stays = heappop(waiting)
            yield turn(at_s, chain + make.blocks(1, 12), stays)
        stays = min(0.95, max(0.05, make.random.gauss(0.6, 0.25)))
        yield turn(make.now_s, systems[popular()] + make.blocks(1, 12), stays)


def system_prompts(seed: int) -> Iterator[Request]:
    """Single questions below system prompts of very different popularity and length."""
    make = Maker(seed)
    prompts = [make.blocks(2, 40) for _ in range(300)]
    popular = make.zipf(len(prompts), 1.1)
    while True:
        yield make.request(prompts[popular()] + make.blocks(1, 6))


def documents(seed: int, exponent: float = 0.9) -> Iterator[Request]:
    """New questions about documents of very different popularity."""
    make = Maker(seed)
    texts = [make.blocks(4, 60) for _ in range(1500)]
    popular = make.zipf(len(texts), exponent)
    while True:
        yield make.request(texts[popular()] + make.blocks(1, 4))


def repeats(seed: int) -> Iterator[Request]:
    """The same requests again and again, some more often."""
    make = Maker(seed)
    texts = [make.blocks(2, 30) for _ in range(3000)]
    popular = make.zipf(len(texts), 0.8)
    while True:
        yield make.request(texts[popular()])


def tool_loops(seed: int, agents: int = 60) -> Iterator[Request]:
    """Agents that come back with the whole chain and a little more, many times and soon."""
    make = Maker(seed)
    systems = [make.blocks(12, 12) for _ in range(4)]
    active: list[tuple[Chain, int]] = []
    while True:
        if len(active) < agents:
            active.append((make.random.choice(systems) + make.blocks(1, 6), make.random.randint(2, 50)))
        i = int(make.random.random() ** 1.5 * len(active))
        chain, left = active[i]
        chain += make.blocks(1, 5)
        yield make.request(chain)
        if left == 1:
            active.pop(i)
        else:
            active[i] = (chain, left - 1)


def scans(seed: int) -> Iterator[Request]:
    """Conversations, and long prompts between them that never come back."""
    make = Maker(seed)
    for request in conversations(seed):
        yield request
        if make.random.random() < 0.12:
            yield Request(request.at_s, tuple(b + _SHIFT for b in make.blocks(60, 250)))


def cyclic(seed: int) -> Iterator[Request]:
    """The same documents round and round: what was used last is needed last."""
    make = Maker(seed)
    texts = [make.blocks(5, 40) for _ in range(220)]
    while True:
        for text in texts:
            yield make.request(text)


def recent(seed: int) -> Iterator[Request]:
    """What was used last is what is used next."""
    make = Maker(seed)
    history: list[Chain] = []
    while True:
        if history and make.random.random() < 0.7:
            back = min(len(history) - 1, int(make.random.expovariate(1 / 15)))
            chain = history.pop(-1 - back)[:-1] + make.blocks(2, 2)
        else:
            chain = make.blocks(5, 30)
        history = [*history[-1999:], chain]
        yield make.request(chain)


def edits(seed: int) -> Iterator[Request]:
    """Chats whose last parts are cut off and tried anew."""
    make = Maker(seed)
    history: list[Chain] = []
    while True:
        if history and make.random.random() < 0.65:
            i = len(history) - 1 - int(make.random.random() ** 2 * len(history))
            cut = make.random.choice((0, 0, 1, 1, 4, 10))
            chain = history[i][: max(1, len(history[i]) - cut)] + make.blocks(1, 8)
            history[i] = chain
        else:
            chain = make.blocks(5, 30)
            history = [*history[-399:], chain]
        yield make.request(chain)


def flips(seed: int, every: int = 1000) -> Iterator[Request]:
    """Popular documents that are replaced by others all at once, again and again."""
    make = Maker(seed)
    popular = make.zipf(400, 0.9)
    while True:
        texts = [make.blocks(4, 40) for _ in range(400)]
        for _ in range(every):
            yield make.request(texts[popular()] + make.blocks(2, 2))


def bursts(seed: int) -> Iterator[Request]:
    """Conversations whose turns arrive in bursts."""
    return conversations(seed, gap_s=30.0, grain_s=10.0)


def phases(seed: int, each: int = 3000) -> Iterator[Request]:
    """Documents, then conversations, then others, without end."""
    kinds: Sequence[Workload] = (documents, conversations, tool_loops, system_prompts)
    start_s, number = 0.0, 0
    while True:
        part = _apart(islice(kinds[number % len(kinds)](seed + number), each), number)
        last_s = 0.0
        for request in part:
            last_s = request.at_s
            yield Request(start_s + request.at_s, request.chain)
        start_s += last_s
        number += 1


def mixed(seed: int) -> Iterator[Request]:
    """Four kinds at the same time."""
    kinds: Sequence[Workload] = (conversations, documents, tool_loops, recent)
    parts = [_apart(kind(seed + number), number) for number, kind in enumerate(kinds)]
    return merge(*parts, key=lambda request: request.at_s)


def _apart(requests: Iterable[Request], number: int) -> Iterator[Request]:
    """The requests of part `number`, with blocks of their own."""
    shift = (number + 1) * 2 * _SHIFT
    return (Request(r.at_s, tuple(block + shift for block in r.chain)) for r in requests)


WORKLOADS: dict[str, Workload] = {
    "conversations": conversations,
    "system-prompts": system_prompts,
    "documents": documents,
    "repeats": repeats,
    "tool-loops": tool_loops,
    "scans": scans,
    "cyclic": cyclic,
    "recent": recent,
    "edits": edits,
    "flips": flips,
    "bursts": bursts,
    "phases": phases,
    "mixed": mixed,
}


def make_workload(name: str, seed: int, count: int) -> list[Request]:
    """The first `count` requests of a workload. Raises `InvalidRequest` when there is none of that name."""
    if name not in WORKLOADS:
        names = ", ".join(WORKLOADS)
        raise InvalidRequest(problem=f"there is no workload {name!r}; there are {names}")
    return list(islice(WORKLOADS[name](seed), count))
