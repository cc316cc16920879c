"""The daemon's side of what clients write into shared memory: what they look at, have used, and have posted.

A client's page is written by the client, so nothing in it is believed: an id that is none is nobody's block,
a counter can only be wrong by what the ring of notes holds. What a client writes into the words `posted` can
only make others ask where they need not.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence

from mooncaked import fences
from mooncaked.api import shm
from mooncaked.block import Block
from mooncaked.clock import Clock, Deadline
from mooncaked.pools.shared_index import SharedIndex
from mooncaked.store import DirectUses

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NO_HAZARDS = bytes(shm.HAZARDS * shm.WORD)
_MISSES_MAX = 1 << 20  # believed per page and look
_CAUGHT_UP_S = 0.5  # for frames that lie in the daemon's sockets to be read
_TURNS = 50  # of the loop, after which it is waited in steps of time
_STEP_S = 0.001


class Page:
    """One connection's page. `fd` is for the client; close it once it is sent."""

    def __init__(self, slot: int | None) -> None:
        self.slot = slot  # its word in `posted` and `applied`; None: it cannot post
        self.fd, self._map = _make_memory("mooncaked-page", shm.PAGE_BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._hazards = memoryview(self._map)[shm.HAZARDS_AT * shm.WORD : shm.NOTES_AT * shm.WORD]
        self._notes = self.words[shm.NOTES_AT : shm.NOTES_AT + shm.NOTES]
        self._noted = 0
        self._misses = 0

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays as long as this object."""
        os.close(self.fd)

    def looked_at(self) -> tuple[int, ...]:
        """The ids in the hazards that are in use."""
        if (raw := self._hazards.tobytes()) == _NO_HAZARDS:
            return ()
        return tuple(number for number in memoryview(raw).cast("Q") if number)

    def take_notes(self) -> tuple[list[int], int]:
        """The ids that were noted since the last call, oldest first, and how many keys were found missing.
        Notes that were overwritten meanwhile are lost."""
        noted, misses = self.words[shm.P_NOTES], self.words[shm.P_MISSES]
        count = min((noted - self._noted) & ((1 << 64) - 1), shm.NOTES)
        ids = [self._notes[(noted - back) % shm.NOTES] for back in range(count, 0, -1)]
        missed = min((misses - self._misses) & ((1 << 64) - 1), _MISSES_MAX)
        self._noted, self._misses = noted, misses
        return ids, missed


class ClientPages:
    """The pages of all connections; the store asks it about those who read directly. Connections come and go
    on the event loop, the store asks from any thread."""

    def __init__(self, index: SharedIndex) -> None:
        self.index = index
        self.posted_fd, self._posted_map = _make_memory("mooncaked-posted", shm.POSTED_BYTES)
        self._posted = memoryview(self._posted_map).cast("Q")
        self._pages: tuple[Page, ...] = ()  # replaced, never changed: threads look at it
        self._free = deque(
            range(shm.CONNECTIONS_MAX)
        )  # used in turn, so that a slot rests before it comes again
        self._owners: dict[int, Page] = {}  # by slot
        self._last_notes: deque[tuple[list[int], int]] = deque()  # of connections that have ended

    def close(self) -> None:
        """Close the descriptor for clients."""
        os.close(self.posted_fd)

    # --- connections ---------------------------------------------------------------------------------------

    def open(self, *, writable: bool) -> Page:
        """A page for a new connection, which can post if it may write into the pool."""
        slot = None
        if writable and self._free:
            slot = self._free.popleft()
            self._set_counts(slot)
        page = Page(slot)
        if slot is not None:
            self._owners[slot] = page
            self.index.set_connections(max(self._owners) + 1)
        self._pages = (*self._pages, page)
        return page

    def drop(self, page: Page) -> None:
        """The connection has ended, and with it what it looked at."""
        self._last_notes.append(page.take_notes())
        self._pages = tuple(other for other in self._pages if other is not page)
        if page.slot is not None:
            del self._owners[page.slot]
            self._set_counts(page.slot)
            self._free.append(page.slot)
            self.index.set_connections(max(self._owners, default=-1) + 1)

    def _set_counts(self, slot: int) -> None:
        self._posted[slot] = self.index.applied[slot] = 0

    # --- the store asks ------------------------------------------------------------------------------------

    def reading(self, blocks: Sequence[Block]) -> list[bool]:
        """Which of these blocks, just taken out of the index, somebody still looks at. The others are
        forgotten."""
        index = self.index
        ids = [index.id_of(block) for block in blocks]
        if not any(ids):
            return [False] * len(blocks)
        looked_at = self._looked_at()
        answers = [number in looked_at for number in ids]
        for block, reading in zip(blocks, answers, strict=True):
            if not reading:
                index.forget(block)
        return answers

    def _looked_at(self) -> set[int]:
        if not self.index.fenced:
            return set()  # and nobody was told that hazards are looked at
        fences.barrier()
        return {number for page in self._pages for number in page.looked_at()}

    def drain(self) -> DirectUses:
        """What was read since the last call."""
        blocks: list[Block] = []
        misses = 0
        notes = [self._last_notes.popleft() for _ in range(len(self._last_notes))]
        notes += [page.take_notes() for page in self._pages]
        for ids, missed in notes:
            misses += missed
            found = map(self.index.block_of, ids)
            blocks += [block for block in found if block is not None]
        return DirectUses(blocks, misses)

    def viewing(self) -> int:
        """How many blocks clients look at just now."""
        return sum(len(page.looked_at()) for page in self._pages)

    # --- posted writes -------------------------------------------------------------------------------------

    def applied(self, page: Page) -> None:
        """A posted frame of this connection was obeyed, or refused."""
        if page.slot is not None:
            self.index.applied[page.slot] += 1

    def behind(self) -> dict[int, int]:
        """What was posted and not read yet: the count to wait for, by slot."""
        applied, posted = self.index.applied, self._posted
        return {slot: posted[slot] for slot in self._owners if posted[slot] != applied[slot]}

    async def caught_up(self, clock: Clock) -> None:
        """Return when all that was posted before this call has been obeyed. A client that says that it posted
        what it has not is waited for once, for half a second."""
        waiting = self.behind()
        owners = {slot: self._owners[slot] for slot in waiting}
        deadline = Deadline(clock, _CAUGHT_UP_S)
        turn = 0
        while waiting := self._still(waiting, owners):
            if deadline.passed():
                for slot in waiting:
                    self._posted[slot] = self.index.applied[slot]
                return
            turn += 1
            await (asyncio.sleep(0) if turn < _TURNS else clock.sleep(_STEP_S))

    def _still(self, waiting: dict[int, int], owners: dict[int, Page]) -> dict[int, int]:
        """Those whose connection is still there and has not got that far. The counts run on for ever."""
        applied = self.index.applied
        return {
            slot: count
            for slot, count in waiting.items()
            if self._owners.get(slot) is owners[slot] and applied[slot] < count
        }

    # --- reserved places -----------------------------------------------------------------------------------

    def revoke(self, page: Page) -> bool:
        """Tell a client that the places which it has reserved are no longer its own; False if it is just
        filling or posting one, and nothing has changed. `allow` ends it."""
        if page.slot is None or not self.index.fenced:
            return False
        page.words[shm.P_REVOKED] = 1
        fences.barrier()
        if page.words[shm.P_WRITING] or self._posted[page.slot] != self.index.applied[page.slot]:
            page.words[shm.P_REVOKED] = 0
            return False
        return True

    def allow(self, page: Page) -> None:
        """What the client reserves from now on is its own."""
        page.words[shm.P_REVOKED] = 0


def _make_memory(name: str, size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise
