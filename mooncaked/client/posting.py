"""Writes without waiting for the daemon: fill room that was reserved before, and post the name of the value.

Room is reserved once values of one size come again, for a growing number of them at a time. A put is then a
look into the index, a copy, and one frame without a reply; the daemon works out the checksum. That the value
is seen by everybody as soon as the put has returned is the readers' part: they count what was posted (see
`mooncaked.client.direct`).

Two writers of one key that do not see each other both succeed, and the value of one of them stays. The daemon
takes back what is not used for a while: it says so in the page, unless it sees there that a value is being
written, in the way that hazards work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager

import msgspec

from mooncaked.api import shm
from mooncaked.api.protocol import (
    Kind,
    PutAbort,
    PutAbortReply,
    PutStored,
    Reserve,
    ReserveReply,
    StoredItem,
)
from mooncaked.client.buffers import copy_in
from mooncaked.client.connection import Connection
from mooncaked.client.direct import Direct
from mooncaked.client.operations import PutResult, Source
from mooncaked.client.shared import SharedWords
from mooncaked.clock import Clock
from mooncaked.errors import ConnectionLost

RESERVE_MAX = 64  # places at a time
RESERVE_BYTES_MAX = 32 << 20  # of one size at a time, unless one batch needs more
_SIZES_MAX = 64  # sizes that are remembered
_PENDING_MAX = 256  # keys that are remembered as posted, before those are sorted out that were obeyed
_FULL_S = 1.0  # after a refusal, until it is tried again

Lend = Callable[[], AbstractContextManager[Connection | None]]


class PostCounts:
    """The words in which everybody sees how much was posted on a connection, and how much the daemon
    obeyed."""

    def __init__(self, shared: SharedWords, words: memoryview, slot: int) -> None:
        self._shared = shared
        self._words = words
        self._slot = slot
        self.count: int = words[slot]  # frames posted

    def posted(self) -> None:
        """One more frame."""
        self.count += 1
        self._words[self._slot] = self.count

    def applied(self) -> int:
        """How many frames the daemon has obeyed."""
        return self._shared.applied(self._slot)


class Place(msgspec.Struct, frozen=True):
    """Reserved room."""

    token: int
    view: memoryview


class Posting:
    """Posted writes in one namespace on one connection. Any thread may use it.

    `put` says None for each value that is to be written in the other way."""

    def __init__(
        self,
        namespace: str,
        connection: Connection,
        direct: Direct,
        counts: PostCounts,
        lend: Lend,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        """`lend` gives this connection for an exchange, or None while another thread has it."""
        self._namespace = namespace
        self._connection = connection
        self._mapping = connection.mapping
        self._direct = direct
        self._counts = counts
        self._lend = lend
        self._timeout_s = timeout_s
        self._clock = clock
        self._words = direct.page.words
        self._lock = threading.Lock()
        self._stock: dict[int, list[Place]] = {}  # by size
        self._goals: dict[int, int] = {}  # places to reserve at the next occasion, by size
        self._writing = 0
        self._refused_at_s = float("-inf")
        self._pending: dict[
            bytes, int
        ] = {}  # keys posted and perhaps not obeyed, with the count that was posted

    def put_one(self, key: bytes, value: memoryview, parent: bytes | None) -> PutResult | None:
        """As `put`, in the plainest case: there is room in stock. In as few steps as can be, see
        `Direct.copy_to`."""
        if parent == key or key in self._pending or self._direct.listed(key):
            return None
        size = len(value)
        with self._lock:
            stock = self._stock.get(size)
            if not stock:
                return None
            self._set_writing(1)
            if self._words[shm.P_REVOKED]:
                self._set_writing(-1)
                return None
            place = stock.pop()
        items: list[StoredItem] = []
        try:
            checksum = copy_in(place.view, (value,))
            items.append(StoredItem(token=place.token, key=key, size=size, parent=parent, checksum=checksum))
        finally:
            sent = self._post(items)
        return PutResult.STORED if sent else None

    def put(self, sources: Sequence[Source]) -> list[PutResult | None]:
        """Store values; all that can be are posted together."""
        results: list[PutResult | None] = [None] * len(sources)
        if len({source.item.key for source in sources}) < len(sources):
            return results
        todo = [index for index in range(len(sources)) if not self._known(sources, index, results)]
        if not todo:
            return results
        places = self._take_places([sources[index].item.size for index in todo])
        filled = [(n, place) for n, place in zip(todo, places, strict=True) if place is not None]
        items: list[StoredItem] = []
        try:
            items += self._fill(sources, filled)
        finally:
            sent = self._post(items)
        for index, _ in filled if sent else ():
            results[index] = PutResult.STORED
        return results

    # --- one batch -----------------------------------------------------------------------------------------

    def _known(self, sources: Sequence[Source], index: int, results: list[PutResult | None]) -> bool:
        """Whether it needs no room: its key has a value, or is to be written in the other way."""
        source = sources[index]
        key = source.item.key
        if source.item.hold:
            return True
        if self._direct.use(key) or self._is_pending(key):
            if self._direct.connected():
                results[index] = PutResult.EXISTS
            return True
        return False

    def _fill(self, sources: Sequence[Source], filled: Sequence[tuple[int, Place]]) -> list[StoredItem]:
        """Copy values to their places; how they are to be named."""
        items = []
        for index, place in filled:
            item = sources[index].item
            checksum = copy_in(place.view, sources[index].views)
            items.append(
                StoredItem(
                    token=place.token,
                    key=item.key,
                    size=item.size,
                    parent=item.parent,
                    meta=item.meta,
                    checksum=checksum,
                    ttl_ms=item.ttl_ms,
                )
            )
        return items

    # --- what was posted -----------------------------------------------------------------------------------

    def _post(self, items: list[StoredItem]) -> bool:
        """Let all see that a frame is posted, and send it; False: the connection is gone, or there was
        nothing to send. Ends one use of places in any case.

        It is counted first: else the frame of another thread, obeyed but not counted yet, would stand for
        this one, counted but not obeyed."""
        sent = False
        try:
            if items:
                with self._lock:
                    self._counts.posted()
                body = PutStored(namespace=self._namespace, items=items)
                self._connection.post(Kind.PUT_STORED, body, self._timeout_s)
                sent = True
        except ConnectionLost:
            return False
        finally:
            with self._lock:
                self._set_writing(-1)
                if sent:
                    self._remember(items)
        return sent

    def _remember(self, items: list[StoredItem]) -> None:
        count, pending = self._counts.count, self._pending
        for item in items:
            pending[item.key] = count
        if len(pending) > _PENDING_MAX:
            applied = self._counts.applied()
            self._pending = {key: count for key, count in pending.items() if count > applied}

    def _is_pending(self, key: bytes) -> bool:
        count = self._pending.get(key)
        return count is not None and count > self._counts.applied()

    # --- room ----------------------------------------------------------------------------------------------

    def _take_places(self, sizes: Sequence[int]) -> list[Place | None]:
        """Room for values of these sizes; None for which there is none. The daemon takes nothing back until
        `_post` has ended, which must follow."""
        with self._lock:
            self._set_writing(1)
            if self._words[shm.P_REVOKED]:
                self._stock.clear()
            places, missing = self._take(sizes)
        try:
            if missing and self._reserve(missing):
                rest = [index for index, place in enumerate(places) if place is None]
                with self._lock:
                    more, _ = self._take([sizes[index] for index in rest])
                for index, place in zip(rest, more, strict=True):
                    places[index] = place
        except BaseException:
            with self._lock:
                self._set_writing(-1)
            raise
        return places

    def _set_writing(self, change: int) -> None:
        """Say how many uses of places there are; after what was posted is counted. Under the lock."""
        self._writing += change
        self._words[shm.P_WRITING] = self._writing

    def _take(self, sizes: Sequence[int]) -> tuple[list[Place | None], dict[int, int]]:
        """Places from the stock, and how many are missing, by size. Under the lock."""
        places: list[Place | None] = []
        missing: dict[int, int] = {}
        for size in sizes:
            stock = self._stock.get(size)
            places.append(stock.pop() if stock else None)
            if not stock and places[-1] is None:
                missing[size] = missing.get(size, 0) + 1
        return places, missing

    def _reserve(self, missing: dict[int, int]) -> bool:
        """Reserve room for what is missing and for what is likely to come; whether there is more now."""
        wanted = self._wanted(missing)
        if not wanted or self._clock.monotonic() - self._refused_at_s < _FULL_S:
            return False
        with self._lend() as connection:
            if connection is None:
                return False
            try:
                if self._ask(connection, wanted):
                    return True
                if self._give_back(connection, keep=wanted.keys()) and self._ask(connection, wanted):
                    return True
            except ConnectionLost:  # the other way of writing finds a new one
                return False
        self._refused_at_s = self._clock.monotonic()
        return False

    def _wanted(self, missing: dict[int, int]) -> dict[int, int]:
        """How many places to reserve, by size: for each size that comes again."""
        wanted = {}
        for size, count in missing.items():
            goal = self._goals.get(size, 0)
            if len(self._goals) >= _SIZES_MAX and not goal:
                self._goals.pop(next(iter(self._goals)))
            likely = min(goal, RESERVE_MAX, max(1, RESERVE_BYTES_MAX // size))
            self._goals[size] = max(1, min(2 * max(goal, count), RESERVE_MAX))
            if goal or count > 1:
                wanted[size] = max(count, likely)
        return wanted

    def _ask(self, connection: Connection, wanted: dict[int, int]) -> bool:
        sizes = [size for size, count in wanted.items() for _ in range(count)]
        reply = connection.call(Kind.RESERVE, Reserve(sizes=sizes), ReserveReply, self._timeout_s)
        with self._lock:
            for size, slot in zip(sizes, reply.slots, strict=True):
                if slot.status == "ok":
                    view = self._mapping.view(slot.region, slot.offset, size)
                    self._stock.setdefault(size, []).append(Place(slot.token, view))
        return any(slot.status == "ok" for slot in reply.slots)

    def _give_back(self, connection: Connection, keep: Container[int]) -> bool:
        """End reservations of other sizes; whether there were any."""
        with self._lock:
            others = [size for size in self._stock if size not in keep]
            tokens = [place.token for size in others for place in self._stock.pop(size)]
        if not tokens:
            return False
        connection.call(Kind.PUT_ABORT, PutAbort(tokens=tokens), PutAbortReply, self._timeout_s)
        return True
