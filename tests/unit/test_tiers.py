"""Blocks between memory and disks: written when they leave, brought up when they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import xxhash

from mooncaked.api.protocol import PutItem
from mooncaked.clock import Deadline
from mooncaked.pools.ssd import DeviceState, WriteStatus
from mooncaked.store import Restored, Store
from mooncaked.tiers import Tiers
from mooncaked.tiers.admission import ALL, REUSED
from mooncaked.tiers.promote import QUEUE_KEYS_MAX
from mooncaked.types import Tier
from mooncaked.verifier import Verifier
from tests.fakes.fake_disks import FakeDisks
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock
from tests.node.daemons import until

PAGE = 4096
NS = "ns"


def value(key: str) -> bytes:
    return (key.encode() * PAGE)[:PAGE]


def keys(text: str) -> list[bytes]:
    return [key.encode() for key in text]


class Node:
    """A small pool with disks below."""

    def __init__(
        self, pages: int = 40, admission: str = ALL, attached: bool = True, rate: float = 0.0
    ) -> None:
        self.clock = StepClock()
        self.store = Store(
            HeapPool(pages * PAGE), high_watermark=0.5, low_watermark=0.2, epoch=1, clock=self.clock
        )
        verify = Verifier(self.store, self.clock).verify_keys
        self.tiers = Tiers(self.store, self.clock, verify, admission=admission, bytes_per_s=rate)
        self.disks = FakeDisks(self.tiers.lost)
        self.owner = self.store.new_owner()
        if attached:
            self.tiers.attach(self.disks)

    def put(self, text: str, chained: bool = False, **terms: int) -> None:
        """A block for each letter."""
        parent: bytes | None = None
        for key in text:
            item = PutItem(key=key.encode(), size=PAGE, parent=parent, **terms)
            (slot,) = self.store.begin_put(self.owner, NS, [item])
            assert slot.status == "ok", slot
            self.store.view(slot.region, slot.offset, PAGE)[:] = value(key)
            self.store.commit(self.owner, [slot.token], [xxhash.xxh3_64_intdigest(value(key))])
            parent = key.encode() if chained else None

    def get(self, text: str) -> str:
        """The letters of those that can be read now, each checked."""
        found = ""
        for key in text:
            (block,) = self.store.pin(self.owner, NS, [key.encode()])
            if block is not None:
                assert bytes(self.store.view(block.region, block.offset, block.size)) == value(key)
                self.store.unpin(self.owner, [block.pin])
                found += key
        return found

    def bring_up(self, text: str, seconds: float = 10.0) -> str:
        found = self.tiers.bring_up(NS, keys(text), Deadline(self.clock, seconds))
        return "".join(sorted(key.decode() for key in found))

    def on_disk(self) -> str:
        return "".join(sorted(key.decode() for _, key in self.disks.values))

    def settled(self) -> None:
        """Wait until what had to leave has left, and nothing is on its way."""

        def rests() -> bool:
            stats, demoted = self.store.stats(), self.tiers.stats().demoted
            assert demoted is not None
            done = stats.used_bytes <= 0.5 * stats.capacity_bytes and not self.store._shrinking
            return done and not demoted.queued_blocks

        until(rests, "the pool coming down", 10)


ABC = "abcdefghijklmnopqrstuvwxyz"
Make = Callable[..., Node]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Node] = []

    def make_node(**options: object) -> Node:
        made.append(Node(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make_node
    for node in made:
        node.disks.writing.set()
        node.disks.reading.set()
        node.tiers.close()
        node.store.check_integrity()
    assert not [t for t in threading.enumerate() if t.name.startswith(("demote", "promote"))]


# --- down ----------------------------------------------------------------------------------------------


def test_what_leaves_memory_is_on_disk_and_can_be_brought_up(make: Make) -> None:
    node = make()
    node.put(ABC)
    node.settled()
    gone = [key for key in ABC if not node.get(key)]
    assert len(gone) >= 18
    assert set(gone) <= set(node.on_disk())
    assert node.store.exists(NS, keys(ABC)) == [True] * 26
    assert node.store.stats().evicted_unsaved == 0
    assert node.bring_up("abcd") == "abcd"
    assert node.get("abcd") == "abcd"
    promoted = node.tiers.stats().promoted.raised
    assert (promoted.blocks, promoted.size) == (4, 4 * PAGE)
    assert node.store.block_info(NS, b"a") is not None


def test_blocks_that_were_used_once_do_not_reach_the_disk(make: Make) -> None:
    node = make(admission=REUSED)
    node.put("ab")
    assert node.get("ab") == "ab"
    node.put(ABC[2:])
    node.settled()
    assert node.on_disk() == "ab"
    stats = node.tiers.stats()
    assert (stats.missed_blocks, node.store.stats().evicted_unsaved) == (0, 16)
    node.put("cdef")
    node.put("0123456789ABCDE")
    node.settled()
    assert set("cdef") & set(node.on_disk()), "they had to go, and came again"


def test_a_chain_comes_to_the_disk_whole_with_parents_and_meta(make: Make) -> None:
    node = make()
    node.put(ABC, chained=True)
    node.settled()
    entry, data = node.disks.values[NS, b"y"]
    assert (entry.parent, data) == (b"x", value("y"))
    assert node.store.prefix_match(NS, keys(ABC)) == 26
    assert len(node.disks.writes) < len(node.on_disk()) / 2, "not a leaf for each wait"


def test_foreground_puts_never_wait_for_a_slow_disk(make: Make) -> None:
    node = make()
    node.disks.writing.clear()
    for round_ in range(8):
        node.put("".join(chr(0x100 + 40 * round_ + n) for n in range(40)))
    stats = node.tiers.stats()
    assert stats.demoted is not None
    assert stats.demoted.queued_bytes <= 40 * PAGE / 8
    assert stats.missed_blocks > 200
    assert stats.missed_bytes == stats.missed_blocks * PAGE


def test_what_a_full_disk_does_not_take_is_evicted(make: Make) -> None:
    node = make()
    node.disks.refuses = WriteStatus.FULL
    node.put(ABC)
    until(lambda: node.store.stats().used_bytes <= 8 * PAGE, "the pool coming down", 10)
    stats = node.tiers.stats()
    assert stats.demoted is not None
    assert 0 < stats.demoted.failed <= 10, "after a failure, it is left alone for a while"
    assert stats.missed_blocks >= 16
    node.disks.refuses = None
    node.clock.now += 5
    node.put("0123456789ABCDEFGH")
    node.settled()
    assert node.on_disk()


@pytest.mark.parametrize("state", [DeviceState.READ_ONLY, DeviceState.FAILED])
def test_nothing_is_written_to_a_device_that_took_itself_out(make: Make, state: DeviceState) -> None:
    node = make()
    node.disks.state = state
    node.put(ABC)
    until(lambda: node.store.stats().used_bytes <= 8 * PAGE, "the pool coming down", 10)
    assert node.disks.writes == []


def test_a_block_that_no_segment_can_hold_is_tried_once(make: Make) -> None:
    node = make()
    node.disks.refuses = WriteStatus.TOO_LARGE
    node.put(ABC)
    until(lambda: node.store.stats().used_bytes <= 8 * PAGE, "the pool coming down", 10)
    assert sum(map(len, node.disks.writes)) <= 5


def test_a_write_that_raises_keeps_nothing_pinned(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()

    def write(_: object) -> list[WriteStatus]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(node.disks, "write", write)
    node.put(ABC)
    until(lambda: (s := node.store.stats()).used_bytes <= 20 * PAGE and not s.pinned, "coming down", 10)
    demoted = node.tiers.stats().demoted
    assert demoted is not None
    assert demoted.queued_bytes == 0


def test_no_more_is_written_in_a_second_than_allowed(make: Make) -> None:
    node = make(rate=8.0 * PAGE)  # a burst of two blocks
    node.put(ABC)
    until(lambda: node.on_disk() != "", "a first write", 10)
    node.tiers.close()
    assert len(node.on_disk()) <= 2 + 40 // 8, "the debt of one batch"


def test_removal_reaches_a_block_on_its_way_to_the_disk(make: Make) -> None:
    node = make()
    node.disks.writing.clear()
    node.put(ABC)
    until(lambda: bool(node.disks.writes), "a write beginning", 10)
    victim = node.disks.writes[0][0]
    node.store.remove(NS, [victim])
    assert node.store.exists(NS, [victim]) == [False]
    node.disks.writing.set()
    node.settled()
    assert node.store.exists(NS, [victim]) == [False]
    assert victim.decode() not in node.on_disk()


def test_draining_writes_what_is_on_its_way_and_no_more(make: Make) -> None:
    node = make()
    node.disks.writing.clear()
    node.put(ABC)
    until(lambda: bool(node.disks.writes), "a write beginning", 10)
    threading.Timer(0.2, node.disks.writing.set).start()
    node.tiers.drain(Deadline(node.clock, 10))
    demoted = node.tiers.stats().demoted
    assert demoted is not None
    assert (demoted.queued_blocks, demoted.blocks) == (0, len(node.on_disk()))


# --- what the disks lose ---------------------------------------------------------------------------------


def test_what_a_disk_gives_up_is_a_miss_and_subscribers_hear_of_it(make: Make) -> None:
    node = make()
    node.put(ABC)
    node.settled()
    lost = [key for key in ABC if not node.get(key)][:2]
    sequence = node.store.sequence
    node.disks.lose(NS, keys("".join(lost)))
    assert node.store.exists(NS, keys("".join(lost))) == [False, False]
    events = node.store.events_since(sequence)
    assert events is not None
    assert [(e.stored, e.key.decode(), e.tier) for e in events] == [(False, key, Tier.SSD) for key in lost]
    assert node.bring_up("".join(lost)) == ""


def test_a_damaged_block_is_a_miss_and_the_others_come(make: Make) -> None:
    node = make(attached=False)
    for key in "abc":
        node.disks.put(NS, key.encode(), value(key))
    node.tiers.attach(node.disks)
    node.disks.damaged = {b"b"}
    assert node.bring_up("abc") == "ac"
    assert node.get("abc") == "ac"
    assert node.store.exists(NS, keys("abc")) == [True, False, True]
    raised = node.tiers.stats().promoted.raised
    assert (raised.blocks, raised.failed) == (2, 1)
    node.put("b")
    assert node.get("b") == "b"


# --- up --------------------------------------------------------------------------------------------------


def disked(node: Node, text: str) -> None:
    parent: bytes | None = None
    for key in text:
        node.disks.put(NS, key.encode(), value(key), parent, b"meta")
        parent = key.encode()
    node.tiers.attach(node.disks)


def test_readers_of_one_key_share_one_read(make: Make) -> None:
    node = make(attached=False)
    disked(node, "ab")
    node.disks.reading.clear()
    asks = [node.tiers.ask(NS, keys("ab"), Deadline(node.clock, 10)) for _ in range(5)]
    until(lambda: bool(node.disks.reads), "a read beginning", 10)
    node.disks.reading.set()
    for ask in asks:
        ask.done.result(10)
        assert sorted(ask.found) == [b"a", b"b"]
    assert sum(map(len, node.disks.reads)) == 2


def test_who_has_waited_long_enough_has_a_miss_and_the_block_comes_all_the_same(make: Make) -> None:
    node = make(attached=False)
    disked(node, "a")
    node.disks.reading.clear()
    assert node.bring_up("a", seconds=0.05) == ""
    node.disks.reading.set()
    until(lambda: node.get("a") == "a", "a coming up", 10)


def test_a_question_whose_time_is_over_before_its_turn_reads_nothing(make: Make) -> None:
    node = make(attached=False)
    disked(node, "a")
    ask = node.tiers.ask(NS, keys("a"), Deadline(node.clock, 0.0))
    ask.done.result(10)
    assert (ask.found, node.disks.reads) == ([], [])
    assert node.tiers.stats().promoted.dropped == 1


def test_when_all_memory_is_being_read_it_is_a_miss(make: Make) -> None:
    node = make(attached=False, pages=4)
    disked(node, "a")
    node.put("wxyz")
    pins = [block.pin for block in node.store.pin(node.owner, NS, keys("wxyz")) if block]
    assert node.bring_up("a") == ""
    assert node.tiers.stats().promoted.raised.no_room == 1
    node.store.unpin(node.owner, pins)
    assert node.bring_up("a") == "a"


def test_more_than_one_batch_comes_root_first(make: Make) -> None:
    node = make(attached=False, pages=64)
    disked(node, ABC)
    assert node.bring_up(ABC) == ABC
    assert all(len(batch) <= 4 for batch in node.disks.reads), "a sixteenth of the pool at a time"


def test_a_block_that_somebody_stores_just_now_is_waited_for(make: Make) -> None:
    node = make(attached=False)
    (slot,) = node.store.begin_put(node.owner, NS, [PutItem(key=b"a", size=PAGE)])
    disked(node, "a")
    ask = node.tiers.ask(NS, keys("a"), Deadline(node.clock, 10))
    node.store.view(slot.region, slot.offset, PAGE)[:] = value("a")
    node.store.commit(node.owner, [slot.token], [0])
    ask.done.result(10)
    assert node.get("a") == "a"


def test_restored_blocks_are_compared_when_they_are_asked_for(make: Make) -> None:
    node = make(attached=False)
    node.store.view(0, 0, PAGE)[:] = value("a")
    rows = [
        Restored(
            namespace=NS,
            key=key,
            parent=None,
            meta=b"",
            region=0,
            offset=offset,
            size=PAGE,
            checksum=xxhash.xxh3_64_intdigest(value("a")),
        )
        for key, offset in ((b"a", 0), (b"b", PAGE))
    ]
    node.store.restore(rows)
    assert node.bring_up("abc") == "a"
    assert node.get("abc") == "a"
    assert node.store.exists(NS, keys("ab")) == [True, False]


def test_a_restored_block_that_is_damaged_comes_from_the_disk(make: Make) -> None:
    node = make(attached=False)
    row = Restored(namespace=NS, key=b"a", parent=None, meta=b"", region=0, offset=0, size=PAGE, checksum=1)
    node.store.restore([row])
    disked(node, "a")
    assert node.bring_up("a") == "a"
    assert node.get("a") == "a"


def test_closing_leaves_nobody_waiting(make: Make) -> None:
    node = make(attached=False)
    disked(node, ABC)
    node.disks.reading.clear()
    ask = node.tiers.ask(NS, keys(ABC), Deadline(node.clock, 10))
    until(lambda: len(node.disks.reads) == 4, "all threads reading", 10)
    threading.Timer(0.1, node.disks.reading.set).start()
    node.tiers.close()
    ask.done.result(10)
    assert node.tiers.ask(NS, keys("z"), Deadline(node.clock, 10)).found == []


# --- ahead of need -----------------------------------------------------------------------------------------


def test_a_question_for_a_prefix_brings_it_up(make: Make) -> None:
    node = make(attached=False)
    disked(node, "abcd")
    assert node.store.prefix_match(NS, keys("abcd!")) == 4
    until(lambda: node.get("abcd") == "abcd", "the prefix coming up", 10)
    promoted = node.tiers.stats().promoted
    assert (promoted.expected, promoted.stale, promoted.queued) == (4, 0, 0)


def test_what_somebody_waits_for_overtakes_what_is_expected(make: Make) -> None:
    node = make(attached=False, pages=64)
    disked(node, ABC + "0123456789")
    node.disks.reading.clear()
    node.tiers.expect(NS, keys(ABC))
    until(lambda: len(node.disks.reads) == 4, "all threads reading", 10)
    ask = node.tiers.ask(NS, keys("9"), Deadline(node.clock, 10))
    later = node.tiers.ask(NS, keys("z"), Deadline(node.clock, 10))
    node.disks.reading.set()
    ask.done.result(10)
    later.done.result(10)
    assert ask.found == [b"9"]
    assert b"9" in node.disks.reads[4]


def test_an_expectation_is_a_bounded_part_of_the_pool_and_goes_stale(make: Make) -> None:
    node = make(attached=False, pages=16)
    disked(node, ABC)
    assert node.tiers.expect(NS, keys("!" + ABC)) == [False] + [True] * 4 + [False] * 22
    until(lambda: node.get("abcd") == "abcd", "they coming up", 10)
    node.disks.reading.clear()
    node.tiers.ask(NS, keys("uvwxyz"), Deadline(node.clock, 10))
    until(lambda: len(node.disks.reads) >= 8, "all threads reading", 10)
    node.tiers.expect(NS, keys("pq"))
    node.clock.now += 60
    node.disks.reading.set()
    until(lambda: node.tiers.stats().promoted.queued == 0, "the queue emptying", 10)
    assert node.tiers.stats().promoted.stale == 2


def test_the_queues_are_bounded(make: Make) -> None:
    node = make(attached=False)
    disked(node, ABC)
    node.disks.reading.clear()
    many = [b"%d" % n for n in range(QUEUE_KEYS_MAX + 100)]
    promoter = node.tiers._promoter
    ask = promoter.ask(NS, many, Deadline(node.clock, 10))
    assert promoter.expect(NS, [b"x%d" % n for n in range(QUEUE_KEYS_MAX + 100)]) <= QUEUE_KEYS_MAX
    ask.done.result(30)
    assert node.tiers.stats().promoted.dropped >= 100


def test_a_key_may_come_twice_in_a_question(make: Make) -> None:
    node = make(attached=False)
    disked(node, "a")
    ask = node.tiers.ask(NS, keys("aa"), Deadline(node.clock, 10))
    ask.done.result(10)
    assert ask.found == [b"a"]
