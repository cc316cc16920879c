"""A store and its journal that crash at any byte of any record, and start again in the same memory.

Whatever was acknowledged is there after it; a change in whose record the crash fell counts whole or not at
all; and no block is read whose bytes are not those that were stored under its key.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncaked.api.protocol import PutItem
from mooncaked.pools import journal as module
from mooncaked.pools.journal import Journal, read_journal
from mooncaked.pools.records import Header, RegionShape
from mooncaked.store import Restored, Store
from mooncaked.verifier import Verifier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
PAGES = 12
KEYS = st.integers(0, 9).map(lambda n: b"%d" % n)
SIZES = st.sampled_from([0, 1, 100, 1500, PAGE, 2 * PAGE, 5 * PAGE])


class Crash(BaseException):
    """The process ends here."""


class RestartMachine(RuleBasedStateMachine):
    """One namespace, one region that outlives the stores, and the journal's two files."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HeapPool(PAGES * PAGE)
        self.fds = [os.memfd_create("a"), os.memfd_create("b")]
        self.random = random.Random(3)
        self.values: dict[bytes, bytes] = {}  # acknowledged
        self.history: set[tuple[bytes, bytes]] = set()  # every key and value that there ever was
        self.writes: list[tuple[bytes, int, memoryview]] = []
        self.crash_after: int | None = None  # bytes of the write in which it falls
        self.crash_skips = 0  # writes before that one
        self.store = self.journal = None  # type: ignore[assignment]
        module.write_all = self._write_all  # type: ignore[assignment]
        self._start()

    def teardown(self) -> None:
        module.write_all = WRITE_ALL
        self.journal.close()
        for fd in self.fds:
            os.close(fd)

    # --- lives ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        kept = read_journal(self.fds)
        generation, file = (kept.header.generation + 1, 1 - kept.file) if kept else (1, 0)
        header = Header(
            generation=generation,
            node_id="n",
            epoch=generation,
            grain=PAGE,
            huge_pages="off",
            regions=[RegionShape(0, PAGES * PAGE, "off")],
        )
        self.journal: Journal = Journal([os.dup(fd) for fd in self.fds], header, file)
        clock = StepClock()
        self.store: Store = Store(
            self.pool,
            high_watermark=0.9,
            low_watermark=0.5,
            epoch=generation,
            clock=clock,
            followers=[self.journal],
        )
        if kept is not None:
            records = [
                Restored(
                    namespace=b.namespace,
                    key=b.key,
                    parent=b.parent,
                    meta=b.meta,
                    region=b.region,
                    offset=b.offset,
                    size=b.size,
                    checksum=b.checksum,
                )
                for b in kept.blocks
            ]
            self.report = self.store.restore(records)
        self.journal.commit()
        self.verifier = Verifier(self.store, clock)
        self.owner = self.store.new_owner()
        self.writes = []

    def _write_all(self, fd: int, data: bytes, offset: int) -> None:
        if self.crash_after is None or self.crash_skips:
            self.crash_skips = max(0, self.crash_skips - 1)
            WRITE_ALL(fd, data, offset)
            return
        WRITE_ALL(fd, data[: min(self.crash_after, len(data) - 1)], offset)
        raise Crash

    def _restart(self) -> None:
        self.crash_after = None
        self.journal.close()
        self._start()

    def _readable(self) -> dict[bytes, bytes]:
        _, events = self.store.snapshot()
        keys = [event.key for event in events]
        pinned = self.store.pin(self.owner, "ns", keys)
        found = {}
        for key, block in zip(keys, pinned, strict=True):
            assert block is not None
            found[key] = bytes(self.store.view(block.region, block.offset, block.size))
            self.store.unpin(self.owner, [block.pin])
        return found

    def _either(self, change: Callable[[], None], after: int | None, skips: int = 0) -> None:
        """Make a change; with `after`, crash after so many bytes of its first write, or of one `skips` on."""
        self.crash_after, self.crash_skips = after, skips
        try:
            change()
        except Crash:
            self._restart()
            assert self.report.dropped == 0
            self.verifier.run(threading.Event())
            assert self._readable() == self.values, "as if the change had not been"
        self.crash_after = None
        self._learn()

    def _learn(self) -> None:
        """What was evicted is learnt from the contents."""
        here = {event.key for event in self.store.snapshot()[1]}
        self.values = {key: value for key, value in self.values.items() if key in here}

    # --- rules ----------------------------------------------------------------------------------------

    @rule(key=KEYS, parent=st.none() | KEYS, size=SIZES, after=st.none() | st.integers(0, 60))
    def begin(self, key: bytes, parent: bytes | None, size: int, after: int | None) -> None:
        """Take room, which may evict others, and write half of the value."""

        def change() -> None:
            item = PutItem(key=key, size=size, parent=parent if parent != key else None)
            (slot,) = self.store.begin_put(self.owner, "ns", [item])
            if slot.status == "ok":
                view = self.store.view(slot.region, slot.offset, size)
                view[: size // 2] = self.random.randbytes(size // 2)
                self.writes.append((key, slot.token, view))

        self._either(change, after)

    @rule(after=st.none() | st.integers(0, 60))
    def finish(self, after: int | None) -> None:
        """The rest of the oldest value, and its commit."""
        if not self.writes:
            return
        key, token, view = self.writes.pop(0)
        view[:] = self.random.randbytes(len(view))
        value = bytes(view)
        self.history.add((key, value))

        def change() -> None:
            self.store.commit(self.owner, [token], [xxhash.xxh3_64_intdigest(value)])
            self.values[key] = value

        self._either(change, after)

    @rule(keys=st.lists(KEYS, max_size=3, unique=True), after=st.none() | st.integers(0, 60))
    def remove(self, keys: list[bytes], after: int | None) -> None:
        self._either(lambda: self.store.remove("ns", keys) and None, after)

    @rule()
    def evict(self) -> None:
        self.store.evict_to_low()
        self._learn()

    @rule(after=st.none() | st.integers(0, 200), skips=st.integers(0, 2))
    def compact(self, after: int | None, skips: int) -> None:
        """The crash falls into the summary, or into the header that makes it count."""
        self._either(lambda: self.journal.compact() and None, after, skips)

    @rule()
    def crash(self) -> None:
        self._restart()
        assert (self.report.blocks, self.report.dropped) == (len(self.values), 0)
        self.verifier.run(threading.Event())
        assert self._readable() == self.values

    @rule(part=st.floats(0, 1), byte=st.integers(0, 255))
    def damage(self, part: float, byte: int) -> None:
        """Worse than any crash: a byte of the journal is another one. What is read is right nevertheless."""
        file = self.journal._file
        at = int(part * (self.journal.size - 1))
        os.pwrite(self.fds[file], bytes([byte]), at)
        self.journal.close()
        try:
            self._start()
        except module.Unreadable:
            for fd in self.fds:
                os.truncate(fd, 0)
            self._start()
        self.verifier.run(threading.Event())
        found = self._readable()
        assert set(found.items()) <= self.history
        self.values = found

    @invariant()
    def books_agree(self) -> None:
        self.store.check_integrity()


WRITE_ALL = module.write_all


@pytest.mark.timeout(120)
def test_restart_machine() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        RestartMachine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None)
    )
