"""Orders of the conductor, and the fence that keeps out those of one which leads no longer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from mooncaked.api.protocol import Order, OrderReply
from mooncaked.api.service import check_keys
from mooncaked.clock import Clock, Deadline
from mooncaked.errors import InvalidRequest, StaleTerm
from mooncaked.store import Store

log = logging.getLogger(__name__)

ORDER_SECONDS_MAX = 600.0
Expect = Callable[[str, Sequence[bytes]], list[bool]]
FetchBlocking = Callable[[str, Sequence[bytes], Sequence[str], Deadline], dict[bytes, str]]


class Fence:
    """The highest term that this node has obeyed. Safe from any thread.

    It begins anew with the daemon, as do the blocks that a stale order could harm."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.highest = 0

    def pass_(self, term: int) -> None:
        """Take note of an order's term; raises `StaleTerm` for one lower than was seen before."""
        with self._lock:
            if term < self.highest:
                raise StaleTerm(term=term, highest=self.highest)
            self.highest = term


class Orders:
    """Executes orders. `fetch` may block, like `Fetcher.fetch_from_thread`; without it, none is fetched.
    `expect` has blocks brought into memory from elsewhere on this node, later."""

    def __init__(
        self, store: Store, fetch: FetchBlocking | None, clock: Clock, expect: Expect | None = None
    ) -> None:
        self._store = store
        self._fetch = fetch
        self._expect = expect
        self._clock = clock
        self.fence = Fence()

    def obey(self, order: Order, peer: str) -> OrderReply:
        """Do it, in the calling thread; raises `StaleTerm`, or `InvalidRequest` for what makes no sense."""
        check_keys(order.namespace, order.keys, peer)
        self.fence.pass_(order.term)
        if order.action == "drop":
            done = self._store.remove(order.namespace, order.keys)
        elif order.action == "fetch":
            done = self._fetched(order)
        elif order.action == "prefetch":
            expect = self._expect or self._store.exists
            done = expect(order.namespace, order.keys)
        else:
            problem = f"an order is to fetch, to prefetch or to drop, not to {order.action!r}"
            raise InvalidRequest(problem=problem)
        log.info(
            "order obeyed peer=%s term=%d action=%s done=%d keys=%d",
            peer,
            order.term,
            order.action,
            sum(done),
            len(done),
        )
        return OrderReply(done=done)

    def _fetched(self, order: Order) -> list[bool]:
        here = self._store.exists(order.namespace, order.keys)
        missing = [key for key, found in zip(order.keys, here, strict=True) if not found]
        if missing and self._fetch is not None:
            deadline = Deadline(self._clock, min(max(order.deadline_ms, 0) / 1000, ORDER_SECONDS_MAX))
            self._fetch(order.namespace, missing, [order.source], deadline)
        return self._store.exists(order.namespace, order.keys)
