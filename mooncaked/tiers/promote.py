"""Blocks that are asked for, or will be, are brought up to where they can be read: once each, however many
ask, and in time or not at all.

Threads take them from two queues: what somebody waits for, then what is only expected to be needed. Both are
bounded. What does not come is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from mooncaked.clock import Clock, Deadline
from mooncaked.tiers.raising import Raised, Raiser

log = logging.getLogger(__name__)

THREADS = 4
QUEUE_KEYS_MAX = 1 << 16  # in each queue
AHEAD_S = 10.0  # what was expected to be needed, and has not come by then, is not brought up any more
_TAKE_KEYS = 256
_CLOSE_S = 5.0  # for a disk that does not answer


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """What came of questions since the start, and what is waiting."""

    raised: Raised
    dropped: int  # keys that somebody waited for, and that the queue had no place for, or no time
    expected: int  # keys that were to be brought up ahead of need
    stale: int  # of them: there was no place in the queue, or no time
    queued: int  # keys


class Ask:
    """One question for several keys. `done` is set when all are decided; `found` has those that can be
    pinned, at any time."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.found: list[bytes] = []
        self.done: Future[None] = Future()
        self._left = len(keys)

    def decide(self, key: bytes, found: bool) -> None:
        """One of the keys is decided. Under the promoter's lock."""
        if found:
            self.found.append(key)
        self._left -= 1
        if not self._left:
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class _Job:
    namespace: str
    key: bytes
    until_s: float  # monotonic
    asks: list[Ask] = field(default_factory=list)
    taken: bool = False


class Promoter:
    """Brings blocks up by `raiser`. Safe from any thread."""

    def __init__(self, raiser: Raiser, clock: Clock, threads: int = THREADS) -> None:
        self._raiser = raiser
        self._clock = clock
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Condition()
        self._jobs: dict[tuple[str, bytes], _Job] = {}  # waiting or under way
        self._urgent: deque[_Job] = deque()  # may name a job that was taken already
        self._ahead: deque[_Job] = deque()  # likewise
        self._closed = False
        self._dropped = self._expected = self._stale = 0

    def ask(self, namespace: str, keys: Sequence[bytes], deadline: Deadline) -> Ask:
        """Have `keys`, of a chain root first, brought up by `deadline`. Only for keys that could be, see
        `Store.below`. Waits for nothing."""
        keys = list(dict.fromkeys(keys))
        ask = Ask(keys)
        until_s = self._clock.monotonic() + deadline.left()
        with self._lock:
            if not keys:
                ask.done.set_result(None)
            for key in keys:
                job = self._jobs.get((namespace, key))
                if job is None and (self._closed or len(self._urgent) >= QUEUE_KEYS_MAX):
                    self._dropped += 1
                    ask.decide(key, False)
                    continue
                if job is None:
                    job = self._jobs[namespace, key] = _Job(namespace, key, until_s)
                    self._urgent.append(job)
                elif not job.taken and not job.asks:
                    self._urgent.append(job)  # it was only expected until now
                job.until_s = max(job.until_s, until_s)
                job.asks.append(ask)
            self._work()
        return ask

    def bring_up(self, namespace: str, keys: Sequence[bytes], deadline: Deadline) -> list[bytes]:
        """`ask`, for a thread that may wait: which of `keys` can be pinned when it is over."""
        ask = self.ask(namespace, keys, deadline)
        try:
            ask.done.result(deadline.left())
        except TimeoutError:
            log.info("blocks were not brought up in time count=%d", len(keys) - len(ask.found))
        return list(ask.found)

    def expect(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Bring `keys` up when nobody waits for others; how many were noted. Waits for nothing."""
        noted = 0
        until_s = self._clock.monotonic() + AHEAD_S
        with self._lock:
            self._expected += len(keys)
            for key in keys:
                if (namespace, key) in self._jobs:
                    noted += 1
                elif not self._closed and len(self._ahead) < QUEUE_KEYS_MAX:
                    job = self._jobs[namespace, key] = _Job(namespace, key, until_s)
                    self._ahead.append(job)
                    noted += 1
            self._stale += len(keys) - noted
            self._work()
        return noted

    def stats(self) -> Promoted:
        """The figures now."""
        with self._lock:
            return Promoted(
                raised=self._raiser.stats(),
                dropped=self._dropped,
                expected=self._expected,
                stale=self._stale,
                queued=sum(not job.taken for job in self._jobs.values()),
            )

    def close(self) -> None:
        """Decide whatever is waiting, and end; a read that has begun is waited for, but not for ever."""
        with self._lock:
            self._closed = True
            for job in [job for job in self._jobs.values() if not job.taken]:
                self._decide(job, False)
            self._lock.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(_CLOSE_S)

    # --- the threads ----------------------------------------------------------------------------------

    def _work(self) -> None:
        """There may be something to do. Under the lock."""
        if self._jobs and len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._run, name=f"promote-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._lock.notify()

    def _run(self) -> None:
        try:
            while batch := self._take():
                found: dict[bytes, bool] = {}
                try:
                    namespace, keys = batch[0].namespace, [job.key for job in batch]
                    count = self._raiser.batch(namespace, keys)
                    self._give_back(batch[count:])
                    batch = batch[:count]
                    found = self._raiser.bring_up(namespace, keys[:count])
                finally:
                    self._settle(batch, found)
        finally:
            with self._lock:
                self._threads.remove(threading.current_thread())

    def _take(self) -> list[_Job]:
        """The next jobs, all of one namespace; none when it is over."""
        with self._lock:
            while True:
                for queue in (self._urgent, self._ahead):
                    if batch := self._take_from(queue):
                        return batch
                if self._closed:
                    return []
                self._lock.wait()

    def _take_from(self, queue: deque[_Job]) -> list[_Job]:
        batch: list[_Job] = []
        now = self._clock.monotonic()
        while queue and len(batch) < _TAKE_KEYS:
            job = queue[0]
            if not job.taken and batch and job.namespace != batch[0].namespace:
                break
            queue.popleft()
            if job.taken:
                continue
            job.taken = True
            if job.until_s <= now:
                self._stale += not job.asks
                self._dropped += bool(job.asks)
                self._decide(job, False)
            else:
                batch.append(job)
        return batch

    def _give_back(self, jobs: Sequence[_Job]) -> None:
        """They are more than one thread is to take at once."""
        with self._lock:
            for job in reversed(jobs):
                if self._closed:
                    self._decide(job, False)
                else:
                    job.taken = False
                    (self._urgent if job.asks else self._ahead).appendleft(job)
            if jobs:
                self._work()

    def _settle(self, batch: Sequence[_Job], found: dict[bytes, bool]) -> None:
        with self._lock:
            for job in batch:
                self._decide(job, found.get(job.key, False))

    def _decide(self, job: _Job, found: bool) -> None:
        job.taken = True
        self._jobs.pop((job.namespace, job.key), None)
        for ask in job.asks:
            ask.decide(job.key, found)
