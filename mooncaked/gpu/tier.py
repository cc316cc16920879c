"""The tier at work: a thread copies blocks into GPU memory, readers pin them there.

Lock order: nothing is called while `_lock` is held, so `contains` and `forget` may be called under a lock of
the caller's. `report` is called under `_telling`, which keeps the events in the order of the changes; it may
take the store's lock, so what is called under that lock leaves the telling to the copying thread.

Room is made by the copying thread, when it needs some: no request waits for it, so there is no need to make
any ahead of time. A block that goes is simply dropped: what is here are copies, and the store, which has the
block as well, says when one has to be forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from mooncaked.api.protocol import PinnedBlock
from mooncaked.block import as_pinned
from mooncaked.errors import GpuFailed, IntegrityError, InvalidRequest, Unhealthy
from mooncaked.gpu.books import Evict, GpuBooks, Placed, Source
from mooncaked.gpu.parts import Batch, Flight, GpuTierStats, Item, as_event, await_copy
from mooncaked.pools.gpu import GpuPool
from mooncaked.pools.gpu_device import Copy
from mooncaked.types import BlockEvent

log = logging.getLogger(__name__)

QUEUE_BLOCKS_MAX = 4096
QUEUE_BYTES_MAX = 1 << 30  # of host memory that is pinned for the queue
IN_FLIGHT_BYTES_MAX = 256 << 20
_BATCH_BYTES = 32 << 20  # what is started at once
_BATCH_BLOCKS = 64


class GpuTier:
    """Blocks in `pools`. Any thread may call anything but `work`, which the tier's own thread does after
    `start`. `report` hears of each block that came or went, in order."""

    def __init__(
        self,
        pools: Sequence[GpuPool],
        report: Callable[[list[BlockEvent]], None],
        *,
        policy: str = "lru",
        seed: int = 0,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
        queue_blocks_max: int = QUEUE_BLOCKS_MAX,
    ) -> None:
        self._pools = {pool.region: pool for pool in pools}
        if len(self._pools) != len(pools) or not pools:
            raise InvalidRequest(problem=f"a GPU tier of {len(pools)} pools needs as many region numbers")
        self._report = report
        self._in_flight_max = in_flight_bytes_max
        self._queue_max = queue_blocks_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._telling = threading.Lock()  # keeps reports in order
        self._books = GpuBooks([(pool.region, pool.size) for pool in pools], policy, seed)
        self._events: list[BlockEvent] = []  # not reported yet
        self._queue: deque[Item] = deque()
        self._queue_bytes = 0
        self._flights: deque[Flight] = deque()  # the copying thread's
        self._in_flight_bytes = 0
        self._busy = False  # the copying thread has something in hand
        self._closing = False
        self._failure = ""
        self._hits = self._misses = self._promoted = self._promoted_bytes = self._evicted = 0
        self._thread: threading.Thread | None = None

    # --- readers --------------------------------------------------------------------------------------

    def new_owner(self) -> int:
        """A number for someone who reads; ends with `end_owner`, and all its pins with it."""
        with self._lock:
            return self._books.table.new_owner()

    def end_owner(self, owner: int) -> None:
        """Forget an owner. One that has ended before has nothing left."""
        with self._lock:
            self._books.end_owner(owner)

    def lookup(self, owner: int, namespace: str, keys: Sequence[bytes]) -> list[PinnedBlock | None]:
        """Pin what is in GPU memory of `keys`, of a prefix chain root first; None is a miss. Raises
        `InvalidRequest` for an owner that has ended."""
        with self._lock:
            found = self._books.read(owner, namespace, keys)
            hits = sum(one is not None for one in found)
            self._hits += hits
            self._misses += len(found) - hits
            return [None if one is None else as_pinned(*one) for one in found]

    def unpin(self, owner: int, pins: Sequence[int]) -> None:
        """End reads; raises `InvalidRequest` for a pin that is not this owner's, before anything is done."""
        with self._lock:
            self._books.unpin(owner, pins)

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are in GPU memory."""
        with self._lock:
            visible = self._books.table.visible(namespace)
            return [key in visible for key in keys]

    def blocks(self) -> list[BlockEvent]:
        """Everything that is here, as events."""
        with self._lock:
            blocks = self._books.table.all_visible()
        return [as_event(block, stored=True) for block in blocks]

    # --- the store ------------------------------------------------------------------------------------

    def mark(self) -> int:
        """To be taken before the bytes of what is promoted are looked up, and given to `promote`."""
        with self._lock:
            return self._books.mark

    def promote(self, mark: int, sources: Sequence[Source], release: Callable[[], None]) -> int:
        """Bring blocks in, some time; how many of them were queued. `release` is called once, by whichever
        thread, when the bytes of none of them are needed any more, at once if none was queued."""
        batch = Batch(mark, len(sources) + 1, release)  # one more: this call, so that it is not over before
        with self._changed:
            taken = 0 if self._failure or self._closing else self._take_in(batch, sources)
            self._books.refused["busy"] += len(sources) - taken
            self._changed.notify_all()
        self._settle([(batch, len(sources) - taken + 1)])
        return taken

    def _take_in(self, batch: Batch, sources: Sequence[Source]) -> int:
        for count, source in enumerate(sources):
            if len(self._queue) >= self._queue_max or self._queue_bytes > QUEUE_BYTES_MAX:
                return count
            self._queue.append(Item(batch, source))
            self._queue_bytes += source.view.nbytes
        return len(sources)

    def forget(self, namespace: str, keys: Sequence[bytes]) -> None:
        """Hide `keys`, also those that are on their way in: what their bytes were counts no more. Does not
        wait, and reports later, so it may be called under the lock under which the bytes change."""
        with self._changed:
            dropped = [self._books.drop(namespace, key) for key in keys]
            self._events += [as_event(block, stored=False) for block in dropped if block is not None]
            if self._events:
                self._changed.notify_all()

    def stats(self) -> GpuTierStats:
        """The tier now."""
        with self._lock:
            room, table = self._books.room, self._books.table
            return GpuTierStats(
                capacity_bytes=room.capacity,
                used_bytes=room.used_bytes,
                blocks=table.visible_count,
                pinned_blocks=table.pinned_count,
                queued_blocks=len(self._queue),
                in_flight_bytes=self._in_flight_bytes,
                hits=self._hits,
                misses=self._misses,
                promoted=self._promoted,
                promoted_bytes=self._promoted_bytes,
                evicted=self._evicted,
                refused=dict(self._books.refused),
                failure=self._failure,
            )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the tier's books agree with themselves. O(blocks)."""
        with self._lock:
            self._books.check_integrity()
            queued = sum(item.source.view.nbytes for item in self._queue)
            flying = sum(flight.bytes for flight in self._flights)
            if queued != self._queue_bytes or flying != self._in_flight_bytes:
                detail = (
                    f"{queued} bytes are queued and {flying} in flight, counted are {self._queue_bytes} and "
                    f"{self._in_flight_bytes}"
                )
                raise IntegrityError(what="GPU tier", detail=detail)

    # --- the copying thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Copy in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="gpu-tier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what it has in hand; what is queued is released. The pools stay."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._empty_queue()

    def check_alive(self) -> None:
        """Raise `Unhealthy` when the thread has ended without being told to."""
        if self._thread is not None and not self._thread.is_alive():
            raise Unhealthy(what="the GPU tier", cause="the thread that copies has ended")

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in flight; False when `timeout_s` passed first."""

        def idle() -> bool:
            return not (self._queue or self._in_flight_bytes or self._busy)

        with self._changed:
            return self._changed.wait_for(idle, timeout_s)

    def work(self) -> None:
        """Copy all that is queued, and report what was forgotten, in this thread."""
        while self._work_once():
            continue
        self.tell()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._events or self._closing)
                if self._closing:
                    return
            self.work()

    def _work_once(self) -> bool:
        """Start the next batch, or end the oldest one; whether there was either."""
        with self._changed:
            batch = [] if self._closing else self._next_batch()
            self._busy = bool(batch or self._flights)
            if not self._busy:
                self._changed.notify_all()
                return False
        try:
            if batch:
                self._start(batch)
            while self._flights and (not batch or self._in_flight_bytes > self._in_flight_max):
                self._finish()
        except GpuFailed as error:
            self._fail(error)
        return True

    def _next_batch(self) -> list[Item]:
        batch: list[Item] = []
        size = 0
        while self._queue and len(batch) < _BATCH_BLOCKS and size < _BATCH_BYTES:
            batch.append(self._queue.popleft())
            size += batch[-1].source.view.nbytes
        self._queue_bytes -= size
        return batch

    def _start(self, batch: list[Item]) -> None:
        """Find room for each and start the copies."""
        flying: list[tuple[Item, Placed]] = []
        copies: list[tuple[str, Copy]] = []
        size = 0
        try:
            for item in batch:
                placed = self._place(item)
                if placed is not None:
                    flying.append((item, placed))
                    size += placed.block.size
            for region, pool in self._pools.items():
                pieces = [
                    (p.block.offset, item.source.view) for item, p in flying if p.block.region == region
                ]
                if pieces:
                    copies.append((pool.device, pool.copy_batch_in(pieces)))
        finally:
            with self._lock:
                self._in_flight_bytes += size
                self._flights.append(Flight(flying, copies, size))
            here = {id(item) for item, _ in flying}
            self._settle([(item.batch, 1) for item in batch if id(item) not in here])

    def _place(self, item: Item) -> Placed | None:
        with self._lock:
            while isinstance(step := self._books.step(item.batch.mark, item.source), Evict):
                self._books.room.hide(step.block)
                self._evicted += 1
                self._events.append(as_event(step.block, stored=False))
        self.tell()
        return step if isinstance(step, Placed) else None

    def _finish(self) -> None:
        """Wait for the oldest copies; their blocks are visible then."""
        flight = self._flights[0]
        for device, copy in flight.copies:
            await_copy(device, copy)
        with self._changed:
            self._flights.popleft()
            self._in_flight_bytes -= flight.bytes
            for item, placed in flight.items:
                if self._books.arrived(item.batch.mark, item.source, placed):
                    self._promoted += 1
                    self._promoted_bytes += placed.block.size
                    self._events.append(as_event(placed.block, stored=True))
            self._changed.notify_all()
        self.tell()
        self._settle([(item.batch, 1) for item, _ in flight.items])

    def _fail(self, error: GpuFailed) -> None:
        """A device is broken: nothing that was copied can be trusted, and nobody else can be served."""
        log.error(
            'GPU tier is out of use cause="%s" remedy="see dmesg for Xid errors; restart mooncaked when the '
            'GPU works again"',
            error,
        )
        with self._changed:
            self._failure = str(error)
            flights, self._flights = self._flights, deque()
            self._in_flight_bytes = 0
            for flight in flights:
                for _, placed in flight.items:
                    self._books.gave_up(placed)
            self._events += [as_event(block, stored=False) for block in self._books.clear()]
            self._changed.notify_all()
        self.tell()
        self._settle([(item.batch, 1) for flight in flights for item, _ in flight.items])
        self._empty_queue()

    def _empty_queue(self) -> None:
        with self._changed:
            items, self._queue = list(self._queue), deque()
            self._queue_bytes = 0
            self._changed.notify_all()
        self._settle([(item.batch, 1) for item in items])

    # --- telling --------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Report what has changed and was not reported yet."""
        with self._telling:
            with self._lock:
                events, self._events = self._events, []
            if events:
                self._report(events)

    def _settle(self, parts: Sequence[tuple[Batch, int]]) -> None:
        """So many sources of these batches are needed no more."""
        over = []
        with self._lock:
            for batch, count in parts:
                batch.left -= count
                if not batch.left:
                    over.append(batch)
        for batch in over:
            batch.release()
