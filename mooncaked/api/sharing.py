"""What one connection shares with its client: the regions, a page, posted writes, reserved room."""

from __future__ import annotations

import asyncio
import os

import msgspec

from mooncaked.api import shm
from mooncaked.api.engine import EngineRequests
from mooncaked.api.pages import ClientPages
from mooncaked.api.protocol import DirectInfo, RegionInfo


class SharedRegion(msgspec.Struct, frozen=True):
    """A region of the pool, and the memfd that clients map."""

    info: RegionInfo
    fd: int

    def read_only_fd(self) -> int:
        """A descriptor through which the region cannot be written; the caller closes it. Who may open the
        file itself anew, as its owner may, could change that: clients are to run under users of their own."""
        os.fchmod(self.fd, 0o600)
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)


class Sharing:
    """Of a client that reads through shared memory. On the event loop."""

    def __init__(self, pages: ClientPages, *, writable: bool, reserved_s: float) -> None:
        """`writable`: the client may write into the regions; `reserved_s`: without use, after which room that
        it has reserved is taken back."""
        self._pages = pages
        self._page = pages.open(writable=writable)
        self._reserved_s = reserved_s
        self._loop = asyncio.get_running_loop()
        self._used_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def describe(self) -> DirectInfo:
        """For the greeting."""
        slot = self._page.slot
        return DirectInfo(
            index_bytes=self._pages.index.size,
            page_bytes=shm.PAGE_BYTES,
            posted_bytes=0 if slot is None else shm.POSTED_BYTES,
            slot=slot,
        )

    def fds(self) -> list[int]:
        """The descriptors that go with it."""
        posted = [] if self._page.slot is None else [self._pages.posted_fd]
        return [self._pages.index.fd, self._page.fd, *posted]

    def sent(self) -> None:
        """The client has its descriptors."""
        self._page.close_fd()

    def posted(self) -> None:
        """A posted frame was obeyed, or refused."""
        self._used_at_s = self._loop.time()
        self._pages.applied(self._page)

    def reserved(self, engine: EngineRequests) -> None:
        """Room was reserved: it is the client's until it lies unused for a while."""
        self._used_at_s = self._loop.time()
        self._pages.allow(self._page)
        if self._timer is None:
            self._timer = self._loop.call_later(self._reserved_s, self._take_back, engine)

    def _take_back(self, engine: EngineRequests) -> None:
        self._timer = None
        if not engine.reserved:
            return
        left_s = self._used_at_s + self._reserved_s - self._loop.time()
        if left_s <= 0 and self._pages.revoke(self._page):
            engine.take_back()
            return
        delay_s = max(left_s, self._reserved_s / 2)
        self._timer = self._loop.call_later(delay_s, self._take_back, engine)

    def ended(self) -> None:
        """The connection has ended; nothing is taken back any more but all, by `let_go`."""
        if self._timer is not None:
            self._timer.cancel()

    def let_go(self) -> None:
        """The client cannot be looking at anything any more."""
        self._pages.drop(self._page)
