"""KV blocks from and to the block pool of this node, through `mooncaked.client`.

The store is a cache, so nothing that goes wrong with it fails a request: a daemon that is away, a miss, a
value of the wrong size are all "not there", and what is not there is computed. After a failure the store is
left alone for a moment, so that a hung daemon does not cost every request its time limit.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import msgspec

from mooncaked.client import PutResult
from mooncaked.clock import Clock, Deadline
from mooncaked.engines.reference.kv_cache import PagedKV
from mooncaked.errors import MooncakeError
from mooncaked.transports.breaker import Breaker

log = logging.getLogger(__name__)

EXCHANGE_S = 3.0  # time limit of one exchange with the daemon
LOAD_S = 5.0  # after it, no further blocks of a prompt are asked for
_GROUP_BYTES = 32 << 20  # asked for at once: after a miss, this much at most was asked for in vain
_LOAD_THREADS = 4
_BUSY_TRIES, _BUSY_PAUSE_S = 25, 0.02  # another writer is storing the same block: wait until it is there


class BlockClient(Protocol):
    """What is needed of `mooncaked.client.Client`."""

    def get_into_batch(
        self,
        keys: Sequence[bytes],
        targets: Sequence[object],
        *,
        sources: Sequence[str] = (),
        locate: bool = False,
    ) -> list[int | None]: ...

    def put_batch(
        self,
        keys: Sequence[bytes],
        values: Sequence[object],
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> list[PutResult]: ...

    def close(self) -> None: ...


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one prompt."""

    keys: list[bytes]
    blocks: list[int]  # where in the KV cache
    tokens: list[int]  # in each: all full but perhaps the last
    parent: bytes | None = None  # key of the block before the first
    sources: list[str] | None = None  # for loading: nodes to ask; None: those that the conductor names


class StoreCounts:
    """Totals since the start. Read by metrics; a lost update among threads is prevented by the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loaded_blocks = 0
        self.loaded_bytes = 0
        self.missed_blocks = 0
        self.saved_blocks = 0
        self.failures = 0

    def add(self, **counts: int) -> None:
        """Add to the named totals."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class KvStore:
    """Loads and saves in threads of its own. `close` it when the engine has stopped."""

    def __init__(self, client: BlockClient, cache: PagedKV, clock: Clock) -> None:
        self._client, self._cache, self._clock = client, cache, clock
        self._breaker = Breaker(clock, random.Random())
        self._breaker_lock = threading.Lock()
        self._closing = threading.Event()
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, "kv-load")
        # A single thread, first in first out: a parent is stored before its children.
        self._savers = ThreadPoolExecutor(1, "kv-save")
        self.counts = StoreCounts()

    def close(self) -> None:
        """Drop what has not begun, wait for what has, and close the connections."""
        self._closing.set()
        self._loaders.shutdown(cancel_futures=True)
        self._savers.shutdown(cancel_futures=True)
        self._client.close()

    # --- for the step thread -----------------------------------------------------------------------

    def start_load(self, run: BlockRun, done: Callable[[int], None]) -> None:
        """Load the longest prefix of `run`; then `done(blocks loaded)`, on another thread."""
        _begin(self._loaders, self.load, run, done)

    def start_save(self, run: BlockRun, done: Callable[[int], None]) -> None:
        """Save the blocks of `run`; then `done(blocks that the store now has)`, on another thread. They must
        not change until then."""
        _begin(self._savers, self.save, run, done)

    # --- on the threads ----------------------------------------------------------------------------

    def load(self, run: BlockRun) -> int:
        """How many blocks, from the first on, were loaded. Never raises `MooncakeError`."""
        loaded, deadline = 0, Deadline(self._clock, LOAD_S)
        group = max(1, _GROUP_BYTES // self._cache.block_bytes)
        while loaded < len(run.keys) and not deadline.passed():
            upto = min(len(run.keys), loaded + group)
            found = self._attempt(partial(self._load_group, run, loaded, upto))
            loaded += found or 0
            if found is None or loaded < upto:
                break
        self.counts.add(loaded_blocks=loaded, missed_blocks=len(run.keys) - loaded)
        return loaded

    def _load_group(self, run: BlockRun, first: int, upto: int) -> int:
        window = self._cache.window(run.blocks[first:upto], run.tokens[first:upto])
        sizes = self._client.get_into_batch(
            run.keys[first:upto], window.buffers, sources=run.sources or (), locate=run.sources is None
        )
        expected = [sum(part.nbytes for part in parts) for parts in window.buffers]
        count = 0
        while count < len(sizes) and sizes[count] == expected[count]:
            count += 1
        window.push(count)
        self.counts.add(loaded_bytes=sum(expected[:count]))
        return count

    def save(self, run: BlockRun) -> int:
        """How many of the blocks the store now has. Never raises `MooncakeError`."""
        saved = self._attempt(partial(self._save, run)) or 0
        self.counts.add(saved_blocks=saved)
        return saved

    def _save(self, run: BlockRun) -> int:
        window = self._cache.window(run.blocks, run.tokens)
        window.pull()
        parents = [run.parent, *run.keys[:-1]]
        todo, kept = list(range(len(run.keys))), 0
        for _ in range(_BUSY_TRIES):
            results = self._client.put_batch(
                [run.keys[i] for i in todo],
                [window.buffers[i] for i in todo],
                parents=[parents[i] for i in todo],
            )
            kept += sum(result in (PutResult.STORED, PutResult.EXISTS) for result in results)
            todo = [i for i, result in zip(todo, results, strict=True) if result is PutResult.BUSY]
            if not todo or self._closing.wait(_BUSY_PAUSE_S):
                break
        return kept

    def _attempt(self, exchange: Callable[[], int]) -> int | None:
        """The exchange's result; None when the store fails, or has failed a moment ago."""
        with self._breaker_lock:
            if not self._breaker.allow():
                return None
        try:
            result = exchange()
        except MooncakeError as error:
            self.counts.add(failures=1)
            with self._breaker_lock:
                news = self._breaker.failed()
            if news:
                log.warning("store does not work, KV is computed instead cause=%s", error)
            return None
        except BaseException:
            with self._breaker_lock:
                self._breaker.undecided()
            raise
        with self._breaker_lock:
            if self._breaker.failures:
                log.info("store works again")
            self._breaker.succeeded()
        return result


def _begin(
    pool: ThreadPoolExecutor, work: Callable[[BlockRun], int], run: BlockRun, done: Callable[[int], None]
) -> None:
    """Do `work` on a thread and call `done` with its result, whatever happens: a sequence must never wait
    for ever. 0 stands for a failure, and for a store that is closed."""

    def ended(future: Future[int]) -> None:
        if future.cancelled():
            done(0)
        elif error := future.exception():
            log.error("unexpected error with the store, KV is computed instead", exc_info=error)
            done(0)
        else:
            done(future.result())

    try:
        future = pool.submit(work, run)
    except RuntimeError:  # the pool has been shut down
        done(0)
    else:
        future.add_done_callback(ended)
