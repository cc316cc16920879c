"""Bringing blocks into this node's memory, from its own disks and from other nodes: once each, however many
ask, and in time or not at all.

The event loop decides what is fetched from where; threads move the bytes. A fetch writes like any other
writer: what is not complete and right by the end is aborted, and so a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

from mooncaked.api.counters import ApiCounters
from mooncaked.api.protocol import FetchedBlock, PutItem, PutSlot
from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.errors import MooncakeError
from mooncaked.keys import show_key
from mooncaked.store import Store
from mooncaked.transports.base import Outcome, Transport

log = logging.getLogger(__name__)

THREADS_MAX = 16
KEYS_MAX = 1024  # in one exchange with a peer
_LOCATE_S = 2.0
_BUSY_S = 1.0  # for a writer of this node that stores the same key just now
_ROUNDS = 2  # whoever waited in vain for another's fetch tries its own sources once

Resolve: TypeAlias = Callable[[str], str | None]
Locate: TypeAlias = Callable[[str, Sequence[bytes]], Awaitable[dict[bytes, list[str]]]]


class Asked(Protocol):
    """A question for blocks that have to be brought up here. `done` is set when all are decided; `found` are
    those that can be read, at any time."""

    found: list[bytes]
    done: Future[None]


Ask: TypeAlias = Callable[[str, Sequence[bytes], Deadline], Asked]


class Fetcher:
    """Fetches blocks into the store. Belongs to the event loop that runs when it is made."""

    def __init__(
        self,
        store: Store,
        transport: Transport,
        resolve: Resolve,
        locate: Locate | None = None,
        *,
        node_id: str,
        counters: ApiCounters | None = None,
        clock: Clock | None = None,
        threads_max: int = THREADS_MAX,
        ask: Ask | None = None,
    ) -> None:
        """`resolve` gives the peer address of a node id, or None if it has none now. `locate` gives the nodes
        that hold each key, as far as the conductor knows. `node_id` is this node, which is never asked over
        the network; `ask` brings up what lies here, but not in memory."""
        self._counters = counters or ApiCounters()
        self._pull = Pull(store, transport, self._counters)
        self._resolve = resolve
        self._locate = locate
        self._node_id = node_id
        self._ask = ask
        self._store = store
        self._clock = clock or SystemClock()
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="fetch")
        self._loop = asyncio.get_running_loop()
        self._under_way: dict[tuple[str, bytes], asyncio.Task[dict[bytes, str]]] = {}

    async def fetch(
        self, namespace: str, keys: Sequence[bytes], sources: Sequence[str], locate: bool, deadline: Deadline
    ) -> dict[bytes, str]:
        """Bring `keys` here: up from this node's own disks, from `sources` in that order and then, with
        `locate`, from whoever the conductor names. Returns when that is done, or at the deadline, which key
        came from which node ("": from this one, or it was being written here already). All others are misses.
        """
        began_s = self._clock.monotonic()
        found: dict[bytes, str] = {}
        todo = list(dict.fromkeys(keys))
        for _ in range(_ROUNDS):
            others = [key for key in todo if (namespace, key) in self._under_way]
            self._begin(namespace, [key for key in todo if key not in set(others)], sources, locate, deadline)
            await self._wait(namespace, todo, deadline, found)
            todo = [key for key in others if key not in found]
            if not todo or deadline.passed():
                break
        self._counters.fetch_seconds.observe(self._clock.monotonic() - began_s)
        return found

    def fetch_from_thread(
        self, namespace: str, keys: Sequence[bytes], sources: Sequence[str], deadline: Deadline
    ) -> dict[bytes, str]:
        """`fetch`, for a thread that may wait for it."""
        work = self.fetch(namespace, keys, sources, False, deadline)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(
                deadline.left() + 1.0
            )  # it ends by itself at the deadline, if the loop lives
        except TimeoutError:
            future.cancel()
            return {}

    async def close(self) -> None:
        """Give up what is under way; close the transport before this, so that its threads wake."""
        tasks = set(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _begin(
        self, namespace: str, keys: Sequence[bytes], sources: Sequence[str], locate: bool, deadline: Deadline
    ) -> None:
        """Start fetches that belong to nobody: they go on for others when whoever asked first has gone. What
        lies on a disk of this node is a fetch of its own, so that neither waits for the other."""
        if not keys:
            return
        below = self._store.below(namespace, keys) if self._ask is not None else [False] * len(keys)
        for near in (False, True):
            group = [key for key, low in zip(keys, below, strict=True) if low is near]
            if group:
                task = self._loop.create_task(self._run(namespace, group, sources, locate, deadline, near))
                self._under_way.update(dict.fromkeys([(namespace, key) for key in group], task))

    async def _wait(
        self, namespace: str, keys: Sequence[bytes], deadline: Deadline, found: dict[bytes, str]
    ) -> None:
        tasks = {task for key in keys if (task := self._under_way.get((namespace, key))) is not None}
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks, timeout=deadline.left())
        wanted = set(keys)
        for task in done:
            if not task.cancelled():
                found.update((key, source) for key, source in task.result().items() if key in wanted)

    # --- one fetch ---------------------------------------------------------------------------------

    async def _run(
        self,
        namespace: str,
        keys: Sequence[bytes],
        sources: Sequence[str],
        locate: bool,
        deadline: Deadline,
        near: bool,
    ) -> dict[bytes, str]:
        found: dict[bytes, str] = {}
        try:
            if near:
                await self._bring_up(namespace, keys, deadline, found)
            for source in dict.fromkeys(sources):
                await self._from(source, namespace, keys, deadline, found)
            if locate and len(found) < len(keys):
                await self._from_located(namespace, keys, set(sources), deadline, found)
        finally:
            for key in keys:
                self._under_way.pop((namespace, key), None)
        return found

    async def _bring_up(
        self, namespace: str, keys: Sequence[bytes], deadline: Deadline, found: dict[bytes, str]
    ) -> None:
        """From a disk of this node; what that does not give in time is asked for elsewhere."""
        if self._ask is None:
            return
        asked = self._ask(namespace, keys, deadline)
        await asyncio.wait([asyncio.wrap_future(asked.done)], timeout=deadline.left())
        found.update(dict.fromkeys(list(asked.found), ""))

    async def _from_located(
        self,
        namespace: str,
        keys: Sequence[bytes],
        tried: set[str],
        deadline: Deadline,
        found: dict[bytes, str],
    ) -> None:
        """Ask the nodes that the conductor names, the one with most of what is missing first."""
        places = await self._ask_places(namespace, [key for key in keys if key not in found], deadline)
        while True:
            counts = Counter(
                node for key in keys if key not in found for node in places.get(key, []) if node not in tried
            )
            if not counts or deadline.passed():
                return
            source = counts.most_common(1)[0][0]
            tried.add(source)
            held = [key for key in keys if source in places.get(key, [])]
            await self._from(source, namespace, held, deadline, found)

    async def _ask_places(
        self, namespace: str, keys: Sequence[bytes], deadline: Deadline
    ) -> dict[bytes, list[str]]:
        if self._locate is None or deadline.passed():
            return {}
        try:
            async with asyncio.timeout(min(_LOCATE_S, deadline.left())):
                return await self._locate(namespace, keys)
        except (MooncakeError, OSError, TimeoutError) as error:
            log.info("blocks not located count=%d cause=%s", len(keys), error or "it took too long")
            return {}

    async def _from(
        self, source: str, namespace: str, keys: Sequence[bytes], deadline: Deadline, found: dict[bytes, str]
    ) -> None:
        """Fetch from one node what is still missing."""
        missing = [key for key in keys if key not in found]
        address = self._resolve(source) if source != self._node_id else None
        if not missing or address is None or deadline.passed():
            return
        pulled = await self._loop.run_in_executor(
            self._threads, self._pull.run, address, namespace, missing, deadline
        )
        found.update((key, source if fetched else "") for key, fetched in pulled.items())


class Pull:
    """The part of a fetch that moves bytes, in a thread."""

    def __init__(self, store: Store, transport: Transport, counters: ApiCounters) -> None:
        self._store = store
        self._transport = transport
        self._counters = counters

    def run(
        self, address: str, namespace: str, keys: Sequence[bytes], deadline: Deadline
    ) -> dict[bytes, bool]:
        """Bring here what the node at `address` has of `keys`; those here now, and whether by this."""
        result: dict[bytes, bool] = {}
        busy: list[bytes] = []
        owner = self._store.new_owner()
        try:
            start = 0
            while start < len(keys) and not deadline.passed():
                round_ = _Round(self._store, owner, namespace, keys[start : start + KEYS_MAX])
                outcome = self._transport.fetch(address, namespace, round_.keys, round_.place, deadline)
                self._settle(round_, outcome, address, result)
                busy += round_.with_status("busy")
                start += len(outcome.landed)
                if outcome.error is not None or not outcome.landed:
                    break
        finally:
            self._store.drop_owner(owner)
        if busy and self._store.wait_settled(namespace, busy, min(_BUSY_S, deadline.left())):
            here = self._store.exists(namespace, busy)
            result.update((key, False) for key, exists in zip(busy, here, strict=True) if exists)
        return result

    def _settle(self, round_: _Round, outcome: Outcome, address: str, result: dict[bytes, bool]) -> None:
        """Make visible what has landed, give back the rest, and count."""
        stored, size = round_.commit(outcome.landed)
        result.update((key, False) for key in round_.with_status("exists"))
        result.update((key, True) for key in stored)
        self._counters.fetched_blocks.inc(len(stored))
        self._counters.fetched_bytes.inc(size)
        if outcome.error is not None:
            self._counters.fetch_failures.labels(outcome.error.code).inc()
            log.debug("fetch failed peer=%s cause=%s", address, outcome.error)
        if full := round_.with_status("full"):
            log.info("no room for fetched blocks count=%d first=%s", len(full), show_key(full[0]))


class _Round:
    """The blocks of one exchange with a peer, on their way into the store."""

    def __init__(self, store: Store, owner: int, namespace: str, keys: Sequence[bytes]) -> None:
        self._store = store
        self._owner = owner
        self._namespace = namespace
        self.keys = keys
        self._coming: dict[int, tuple[FetchedBlock, PutSlot]] = {}  # by place in `keys`

    def place(self, blocks: Sequence[FetchedBlock | None]) -> list[memoryview | None]:
        """Room for each block that is wanted."""
        present = [(index, block) for index, block in enumerate(blocks) if block is not None]
        items = [
            PutItem(key=self.keys[index], size=block.size, parent=block.parent, meta=block.meta)
            for index, block in present
        ]
        slots = self._store.begin_put(self._owner, self._namespace, items, raising=True)
        self._coming = {index: (block, slot) for (index, block), slot in zip(present, slots, strict=True)}
        views: list[memoryview | None] = [None] * len(blocks)
        for index, (block, slot) in self._coming.items():
            if slot.status == "ok":
                views[index] = self._store.view(slot.region, slot.offset, block.size)
        return views

    def commit(self, landed: Sequence[bool]) -> tuple[list[bytes], int]:
        """Commit what has landed and abort the rest; the keys that are readable now, and their bytes."""
        ours = {index: pair for index, pair in self._coming.items() if pair[1].status == "ok"}
        good = [index for index in ours if index < len(landed) and landed[index]]
        bad = [index for index in ours if index not in set(good)]
        self._store.commit(self._owner, [ours[i][1].token for i in good], [ours[i][0].checksum for i in good])
        self._store.abort(self._owner, [ours[i][1].token for i in bad])
        return [self.keys[i] for i in good], sum(ours[i][0].size for i in good)

    def with_status(self, status: str) -> list[bytes]:
        """The keys whose slots have this status."""
        return [self.keys[index] for index, (_, slot) in self._coming.items() if slot.status == status]
