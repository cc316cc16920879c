"""The store as its callers use it: writers, readers, what is refused, and the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from mooncaked.api.protocol import META_BYTES_MAX, PinnedBlock, PutItem, PutSlot
from mooncaked.errors import InvalidKey, InvalidRequest
from mooncaked.store import Store
from mooncaked.types import BlockEvent, Tier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
NS = "tenant/model"


class Node:
    """A store of 8 pages with one owner, and short ways to do common things."""

    def __init__(self, pages: int = 8, events_kept: int = 1000) -> None:
        self.clock = StepClock()
        self.store = Store(
            HeapPool(pages * PAGE, region=2),
            high_watermark=0.9,
            low_watermark=0.5,
            epoch=77,
            clock=self.clock,
            events_kept=events_kept,
        )
        self.owner = self.store.new_owner()

    def begin(self, *keys: bytes, size: int = PAGE, owner: int | None = None) -> list[PutSlot]:
        items = [PutItem(key=key, size=size) for key in keys]
        return self.store.begin_put(owner or self.owner, NS, items)

    def put(self, *keys: bytes, size: int = PAGE) -> None:
        """Put one after the other, so that the last one is the most recent."""
        for key in keys:
            (slot,) = self.begin(key, size=size)
            self.store.commit(self.owner, [slot.token], [0])

    def put_chain(self, *keys: bytes) -> None:
        parents = [None, *keys[:-1]]
        items = [
            PutItem(key=key, size=PAGE, parent=parent) for key, parent in zip(keys, parents, strict=True)
        ]
        slots = self.store.begin_put(self.owner, NS, items)
        self.store.commit(self.owner, [slot.token for slot in slots], [0] * len(slots))

    def pin(self, *keys: bytes) -> list[int]:
        return [block.pin for block in self.store.pin(self.owner, NS, keys) if block is not None]

    def here(self, *keys: bytes) -> list[bool]:
        return self.store.exists(NS, keys)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.store.check_integrity()


def statuses(slots: Sequence[PutSlot]) -> list[str]:
    return [slot.status for slot in slots]


# --- a value's way through ---------------------------------------------------------------------------


def test_a_value_is_written_in_place_and_read_in_place(node: Node) -> None:
    store = node.store
    (slot,) = store.begin_put(node.owner, NS, [PutItem(key=b"k", size=5, parent=b"p", meta=b"shape")])
    store.view(slot.region, slot.offset, 5)[:] = b"hello"
    assert node.here(b"k") == [False]
    assert store.commit(node.owner, [slot.token], [1 << 63]) == [True]
    (block,) = store.pin(node.owner, NS, [b"k"])
    assert block == PinnedBlock(
        pin=block.pin if block else 0, region=2, offset=slot.offset, size=5, checksum=1 << 63, meta=b"shape"
    )
    assert bytes(store.view(block.region, block.offset, block.size)) == b"hello"
    store.unpin(node.owner, [block.pin])


def test_an_empty_value_is_a_value(node: Node) -> None:
    (slot,) = node.begin(b"empty", size=0)
    assert slot.status == "ok"
    node.store.commit(node.owner, [slot.token], [5])
    (block,) = node.store.pin(node.owner, NS, [b"empty"])
    assert block is not None
    assert (block.size, block.checksum) == (0, 5)
    assert bytes(node.store.view(block.region, block.offset, 0)) == b""
    assert node.store.stats().used_bytes == PAGE, "it takes room, so that their number is bounded"


def test_an_empty_batch_does_nothing(node: Node) -> None:
    assert node.store.begin_put(node.owner, NS, []) == []
    assert node.store.commit(node.owner, [], []) == []
    assert node.store.abort(node.owner, []) == 0
    assert node.store.pin(node.owner, NS, []) == []
    node.store.unpin(node.owner, [])
    assert node.store.sequence == 0


def test_an_aborted_value_was_never_there(node: Node) -> None:
    (slot,) = node.begin(b"k")
    assert node.store.abort(node.owner, [slot.token]) == 1
    assert node.here(b"k") == [False]
    assert (node.store.sequence, node.store.stats().used_bytes) == (0, 0)
    assert statuses(node.begin(b"k")) == ["ok"]


def test_namespaces_keep_equal_keys_apart(node: Node) -> None:
    node.put(b"k")
    assert node.store.exists("other", [b"k"]) == [False]
    assert node.store.pin(node.owner, "other", [b"k"]) == [None]
    assert node.store.remove("other", [b"k"]) == [False]
    assert statuses(node.store.begin_put(node.owner, "other", [PutItem(key=b"k", size=1)])) == ["ok"]


# --- statuses of a put -------------------------------------------------------------------------------


def test_a_complete_value_is_not_written_again(node: Node) -> None:
    node.put(b"k")
    assert node.begin(b"k") == [PutSlot(status="exists")]


def test_a_value_that_is_being_written_is_busy_for_everybody(node: Node) -> None:
    other = node.store.new_owner()
    node.begin(b"k")
    assert node.begin(b"k") == [PutSlot(status="busy")]
    assert node.begin(b"k", owner=other) == [PutSlot(status="busy")]


def test_the_second_of_two_equal_keys_in_a_batch_is_busy(node: Node) -> None:
    assert statuses(node.begin(b"k", b"j", b"k")) == ["ok", "ok", "busy"]


def test_a_value_larger_than_the_pool_is_too_large(node: Node) -> None:
    node.put(b"kept")
    assert statuses(node.begin(b"k", size=8 * PAGE + 1)) == ["too_large"]
    assert node.here(b"kept") == [True]
    assert statuses(node.begin(b"k", size=8 * PAGE)) == ["ok"]
    assert node.here(b"kept") == [False]


def test_each_item_of_a_batch_succeeds_or_fails_by_itself(node: Node) -> None:
    node.put(b"a")
    items = [
        PutItem(key=b"a", size=1),
        PutItem(key=b"huge", size=1 << 40),
        PutItem(key=b"b", size=7 * PAGE),
        PutItem(key=b"c", size=2 * PAGE),
        PutItem(key=b"d", size=PAGE),
        PutItem(key=b"b", size=1),
    ]
    slots = node.store.begin_put(node.owner, NS, items)
    assert statuses(slots) == ["exists", "too_large", "ok", "full", "ok", "busy"]


def test_a_full_pool_evicts_and_refuses_only_what_nothing_can_make_room_for(node: Node) -> None:
    node.put(*(b"%d" % n for n in range(8)))
    node.put(*(b"new%d" % n for n in range(8)))
    assert node.store.stats().evicted == 8
    node.pin(*(b"new%d" % n for n in range(7)))
    assert statuses(node.begin(b"x", b"y")) == ["ok", "full"]
    assert node.here(b"new7") == [False]


def test_what_was_refused_fits_once_a_writer_commits(node: Node) -> None:
    slots = node.begin(*(b"%d" % n for n in range(8)))
    assert statuses(node.begin(b"x")) == ["full"]
    node.store.commit(node.owner, [slots[3].token], [0])
    assert statuses(node.begin(b"x")) == ["ok"]


def test_a_batch_does_not_evict_what_it_has_just_been_given(node: Node) -> None:
    keys = [b"%d" % n for n in range(12)]
    assert statuses(node.begin(*keys)) == ["ok"] * 8 + ["full"] * 4


def test_putting_what_exists_protects_it_from_the_rest_of_the_batch(node: Node) -> None:
    node.put(b"old")
    node.put(*(b"%d" % n for n in range(7)))
    assert statuses(node.begin(*(b"n%d" % n for n in range(7)), b"old")) == ["ok"] * 7 + ["exists"]
    assert node.here(b"old") == [True]


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (PutItem(key=b"", size=1), InvalidKey),
        (PutItem(key=b"k" * 513, size=1), InvalidKey),
        (PutItem(key=b"k", size=1, parent=b""), InvalidKey),
        (PutItem(key=b"k", size=1, parent=b"p" * 513), InvalidKey),
        (PutItem(key=b"k", size=-1), InvalidRequest),
        (PutItem(key=b"k", size=1, parent=b"k"), InvalidRequest),
        (PutItem(key=b"k", size=1, meta=b"m" * (META_BYTES_MAX + 1)), InvalidRequest),
    ],
)
def test_a_malformed_item_refuses_its_batch_before_anything_is_done(
    node: Node, item: PutItem, error: type[Exception]
) -> None:
    with pytest.raises(error):
        node.store.begin_put(node.owner, NS, [PutItem(key=b"good", size=1), item])
    assert node.store.stats().filling == 0


def test_items_at_the_limits_are_fine(node: Node) -> None:
    item = PutItem(key=b"k" * 512, size=8 * PAGE, parent=b"p" * 512, meta=b"m" * META_BYTES_MAX)
    assert statuses(node.store.begin_put(node.owner, "n" * 128, [item])) == ["ok"]


@pytest.mark.parametrize("namespace", ["", "n" * 129, "a\nb"])
def test_a_malformed_namespace_is_refused(node: Node, namespace: str) -> None:
    with pytest.raises(InvalidKey):
        node.store.begin_put(node.owner, namespace, [PutItem(key=b"k", size=1)])


# --- owners ------------------------------------------------------------------------------------------


def test_a_writer_that_disconnects_takes_its_unfinished_writes_along(node: Node) -> None:
    leaving = node.store.new_owner()
    node.begin(b"a", b"b", owner=leaving)
    node.store.drop_owner(leaving)
    node.store.drop_owner(leaving)
    assert (node.store.stats().used_bytes, node.store.stats().aborted) == (0, 2)
    assert statuses(node.begin(b"a")) == ["ok"]


def test_what_a_writer_has_committed_stays_when_it_disconnects(node: Node) -> None:
    node.put(b"k")
    node.store.drop_owner(node.owner)
    assert node.here(b"k") == [True]


def test_a_reader_that_disconnects_ends_its_pins(node: Node) -> None:
    node.put(b"k")
    reader = node.store.new_owner()
    node.store.pin(reader, NS, [b"k", b"k"])
    assert node.store.stats().pinned == 1
    node.store.drop_owner(reader)
    assert node.store.stats().pinned == 0


CALLS: list[Callable[[Store, int, int, int], object]] = [
    lambda store, owner, token, pin: store.commit(owner, [token], [0]),
    lambda store, owner, token, pin: store.abort(owner, [token]),
    lambda store, owner, token, pin: store.unpin(owner, [pin]),
    lambda store, owner, token, pin: store.pinned_info(owner, [pin]),
]


@pytest.mark.parametrize("call", CALLS)
def test_nobody_can_use_what_belongs_to_another(
    node: Node, call: Callable[[Store, int, int, int], object]
) -> None:
    node.put(b"k")
    (pin,) = node.pin(b"k")
    (slot,) = node.begin(b"w")
    with pytest.raises(InvalidRequest, match="another connection"):
        call(node.store, node.store.new_owner(), slot.token, pin)
    stats = node.store.stats()
    assert (stats.filling, stats.pinned) == (1, 1)
    call(node.store, node.owner, slot.token, pin)


ENDED: list[Callable[[Store, int], object]] = [
    lambda store, owner: store.begin_put(owner, NS, [PutItem(key=b"x", size=1)]),
    lambda store, owner: store.pin(owner, NS, [b"k"]),
    lambda store, owner: store.commit(owner, [], []),
    lambda store, owner: store.unpin(owner, []),
]


@pytest.mark.parametrize("call", ENDED)
def test_an_owner_that_has_ended_can_begin_nothing(node: Node, call: Callable[[Store, int], object]) -> None:
    node.put(b"k")
    node.store.drop_owner(node.owner)
    with pytest.raises(InvalidRequest, match="has ended"):
        call(node.store, node.owner)
    assert node.store.stats().pinned == node.store.stats().filling == 0


@pytest.mark.parametrize("checksums", [[], [1, 2], [-1], [1 << 64]])
def test_a_commit_needs_one_checksum_per_token(node: Node, checksums: list[int]) -> None:
    (slot,) = node.begin(b"k")
    with pytest.raises(InvalidRequest, match="checksum"):
        node.store.commit(node.owner, [slot.token], checksums)
    assert node.store.commit(node.owner, [slot.token], [(1 << 64) - 1]) == [True]


def test_a_commit_with_one_bad_token_commits_nothing(node: Node) -> None:
    slots = node.begin(b"a", b"b")
    with pytest.raises(InvalidRequest, match="unknown"):
        node.store.commit(node.owner, [slots[0].token, 999], [0, 0])
    with pytest.raises(InvalidRequest, match="twice"):
        node.store.commit(node.owner, [slots[0].token, slots[0].token], [0, 0])
    assert node.here(b"a", b"b") == [False, False]
    node.store.commit(node.owner, [slot.token for slot in slots], [0, 0])


def test_an_owner_has_a_limit_of_pins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncaked.store.reading.PINS_PER_OWNER_MAX", 3)
    node.put(b"k")
    pins = node.pin(b"k", b"k", b"k")
    with pytest.raises(InvalidRequest, match="can hold 3 pins"):
        node.store.pin(node.owner, NS, [b"k"])
    node.store.unpin(node.owner, pins[:1])
    assert len(node.pin(b"k")) == 1


# --- reading -----------------------------------------------------------------------------------------


def test_a_miss_is_none_in_its_place(node: Node) -> None:
    node.put(b"a", b"c")
    found = node.store.pin(node.owner, NS, [b"a", b"b", b"c"])
    assert [block is not None for block in found] == [True, False, True]


def test_a_prefix_ends_at_its_first_gap(node: Node) -> None:
    node.put(b"a", b"b", b"d")
    match = node.store.prefix_match
    assert match(NS, [b"a", b"b", b"c", b"d"]) == 2
    assert match(NS, [b"c", b"d"]) == 0
    assert match(NS, []) == 0
    assert match(NS, [b"a", b"b"]) == 2
    assert match("nobody's", [b"a"]) == 0


def test_a_removed_value_that_is_read_stays_in_memory_until_its_last_reader_ends(node: Node) -> None:
    store = node.store
    (slot,) = node.begin(b"k", size=PAGE)
    store.view(slot.region, slot.offset, 4)[:] = b"kept"
    store.commit(node.owner, [slot.token], [0])
    first, second = store.pin(node.owner, NS, [b"k", b"k"])
    assert first is not None
    assert second is not None
    assert store.remove(NS, [b"k"]) == [False]
    assert node.here(b"k") == [False]
    assert store.events_since(0) == store.snapshot()[1] + [event(b"k", True), event(b"k", False)]
    assert statuses(node.begin(b"k", size=8 * PAGE)) == ["full"], "the name is free, the memory not"
    store.unpin(node.owner, [first.pin])
    assert bytes(store.view(first.region, first.offset, 4)) == b"kept"
    assert store.pinned_info(node.owner, [second.pin])[0].key == b"k"
    store.unpin(node.owner, [second.pin])
    assert statuses(node.begin(b"k", size=8 * PAGE)) == ["ok"]


def test_removing_says_what_was_freed(node: Node) -> None:
    node.put(b"a", b"b")
    node.begin(b"w")
    assert node.store.remove(NS, [b"a", b"a", b"nothing", b"w", b"b"]) == [True, False, False, False, True]
    assert node.store.stats().removed == 2


def test_block_info_tells_all_and_is_no_use_of_it(node: Node) -> None:
    item = PutItem(key=b"k", size=3, parent=b"p", meta=b"m")
    (slot,) = node.store.begin_put(node.owner, NS, [item])
    node.store.commit(node.owner, [slot.token], [9])
    node.clock.now += 5
    info = node.store.block_info(NS, b"k")
    assert info is not None
    assert (info.parent, info.size, info.checksum, info.meta) == (b"p", 3, 9, b"m")
    assert (info.region, info.offset, info.pins, info.idle_s) == (2, slot.offset, 0, 5.0)
    assert node.store.block_info(NS, b"x") is None


@pytest.mark.parametrize(
    ("region", "offset", "size"), [(0, 0, 1), (2, -1, 1), (2, 0, -1), (2, 8 * PAGE, 1), (2, 0, 8 * PAGE + 1)]
)
def test_memory_outside_the_pool_cannot_be_named(node: Node, region: int, offset: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match="not memory of this node"):
        node.store.view(region, offset, size)


# --- eviction ----------------------------------------------------------------------------------------


def test_a_used_prefix_outlives_an_unused_one(node: Node) -> None:
    node.put_chain(b"a1", b"a2", b"a3")
    node.put_chain(b"b1", b"b2", b"b3")
    node.store.unpin(node.owner, node.pin(b"a1", b"a2", b"a3"))
    node.put(b"x", b"y", b"z")
    assert node.here(b"a1", b"a2", b"a3", b"b1", b"b2", b"b3") == [True, True, True, True, True, False]
    node.put(b"u", b"v")
    assert node.here(b"a1", b"a2", b"a3", b"b1", b"b2") == [True, True, True, False, False]
    node.put(b"w")
    assert node.here(b"a1", b"a2", b"a3") == [True, True, False]


def test_the_first_key_of_a_batch_is_its_most_recent_even_without_parents(node: Node) -> None:
    keys = [b"%d" % n for n in range(8)]
    node.store.commit(node.owner, [slot.token for slot in node.begin(*keys)], [0] * 8)
    node.put(b"x")
    assert node.here(*keys) == [True] * 7 + [False]
    node.store.unpin(node.owner, node.pin(*reversed(keys[:7])))
    node.put(b"y", b"z")
    assert node.here(*keys, b"x") == [False] + [True] * 6 + [False, False]


def test_a_small_value_gets_the_room_of_a_smaller_one_beside_a_pinned_one() -> None:
    node = Node(pages=1)
    node.put(b"pinned", b"first", size=2000)
    node.pin(b"pinned")
    node.store.remove(NS, [b"first"])
    node.put(b"tiny", size=10)
    assert statuses(node.begin(b"second", size=2000)) == ["ok"]
    assert node.here(b"tiny") == [False]
    assert statuses(node.begin(b"third", size=10)) == ["full"]


def test_probes_do_not_protect(node: Node) -> None:
    node.put(b"probed")
    node.put(*(b"%d" % n for n in range(7)))
    node.here(b"probed")
    node.store.prefix_match(NS, [b"probed"])
    node.store.block_info(NS, b"probed")
    node.put(b"new")
    assert node.here(b"probed") == [False]


def test_eviction_ahead_of_need_starts_over_the_high_mark_and_ends_at_the_low_one(node: Node) -> None:
    node.put(*(b"%d" % n for n in range(7)))
    assert node.store.evict_to_low() == 0, "7 of 8 pages are under 90 %"
    node.put(b"7")
    assert node.store.evict_to_low() == 4
    assert node.here(*(b"%d" % n for n in range(8))) == [False] * 4 + [True] * 4
    assert node.store.evict_to_low() == 0


def test_eviction_ahead_of_need_leaves_what_is_read(node: Node) -> None:
    node.put(*(b"%d" % n for n in range(8)))
    node.pin(*(b"%d" % n for n in range(7)))
    assert node.store.evict_to_low() == 1


def test_eviction_ahead_of_need_can_be_stopped_between_slices() -> None:
    node = Node(pages=400)
    node.put(*(b"%d" % n for n in range(400)))
    answers = iter([False, True])
    assert node.store.evict_to_low(lambda: next(answers)) == 64


def test_watermarks_can_change(node: Node) -> None:
    node.put(*(b"%d" % n for n in range(4)))
    node.store.set_watermarks(high=0.25, low=0.125)
    assert node.store.evict_to_low() == 3
    with pytest.raises(InvalidRequest):
        node.store.set_watermarks(high=0.1, low=0.2)


# --- events ------------------------------------------------------------------------------------------


def event(key: bytes, stored: bool, size: int = PAGE, parent: bytes | None = None) -> BlockEvent:
    return BlockEvent(stored, NS, key, parent, size, Tier.DRAM)


def test_every_visible_change_is_an_event_with_a_number(node: Node) -> None:
    node.begin(b"w")
    node.put_chain(b"a", b"b")
    node.store.remove(NS, [b"b", b"nothing"])
    node.put(b"large", size=7 * PAGE)
    assert node.store.sequence == 5
    assert node.store.events_since(0) == [
        event(b"a", True),
        event(b"b", True, parent=b"a"),
        event(b"b", False, parent=b"a"),
        event(b"a", False),
        event(b"large", True, size=7 * PAGE),
    ]
    assert node.store.events_since(3, count_max=1) == [event(b"a", False)]
    assert node.store.events_since(5) == []


def test_a_snapshot_and_what_follows_it_give_the_contents(node: Node) -> None:
    node.put(b"a", b"b")
    node.begin(b"w")
    sequence, blocks = node.store.snapshot()
    assert (sequence, blocks) == (2, [event(b"a", True), event(b"b", True)])
    node.store.remove(NS, [b"a"])
    assert node.store.events_since(sequence) == [event(b"a", False)]


def test_events_that_are_no_longer_kept_are_a_gap() -> None:
    node = Node(events_kept=4)
    node.put(*(b"%d" % n for n in range(6)))
    assert node.store.events_since(1) is None
    assert node.store.events_since(2) == [event(b"%d" % n, True) for n in range(2, 6)]
    assert node.store.events_since(7) is None, "a number of another epoch"


def test_waiting_for_events_ends_at_once_when_there_are_some_and_in_time_when_not(node: Node) -> None:
    node.put(b"a")
    assert node.store.wait_events(0, timeout_s=60) == 1
    assert node.store.wait_events(1, timeout_s=0.01) == 1


def test_a_closed_store_lets_nobody_wait(node: Node) -> None:
    node.begin(b"w")
    node.store.close()
    assert node.store.wait_events(0, timeout_s=60) == 0
    assert not node.store.wait_settled(NS, [b"w"], timeout_s=60)


def test_waiting_for_a_writer_ends_at_once_when_there_is_none(node: Node) -> None:
    node.put(b"a")
    assert node.store.wait_settled(NS, [b"a", b"nothing"], timeout_s=60)
    node.begin(b"w")
    assert not node.store.wait_settled(NS, [b"w"], timeout_s=0.01)


# --- counters ----------------------------------------------------------------------------------------


def test_a_hit_is_a_key_that_a_reader_asked_for_and_that_was_here(node: Node) -> None:
    node.put(b"a", b"b")
    node.store.pin(node.owner, NS, [b"a", b"b", b"c"])
    node.store.pin(node.owner, NS, [b"a", b"c"], count=False)
    node.here(b"a", b"c")
    stats = node.store.stats()
    assert (stats.hits, stats.misses) == (2, 1)


def test_stats_tell_how_full_it_is_and_what_happened(node: Node) -> None:
    node.begin(b"w", size=100)
    node.put(b"a", b"b")
    node.pin(b"a")
    node.begin(b"x", size=1 << 40)
    node.begin(b"y", size=7 * PAGE)
    node.clock.now += 2.5
    node.put(b"z", size=6 * PAGE)
    node.store.abort(node.owner, [slot.token for slot in node.begin(b"v", size=1)])
    stats = node.store.stats()
    assert (stats.capacity_bytes, stats.used_bytes, stats.largest_free_bytes) == (8 * PAGE, 8 * PAGE, 128)
    assert (stats.blocks, stats.pinned, stats.filling, stats.hidden, stats.owners) == (2, 1, 1, 0, 1)
    assert (stats.pinned_bytes, stats.filling_bytes) == (PAGE, 100)
    assert (stats.stored, stats.stored_bytes, stats.aborted) == (3, 8 * PAGE, 1)
    assert (stats.evicted, stats.evicted_bytes, stats.evicted_idle_s) == (1, PAGE, 2.5)
    assert (stats.refused_too_large, stats.refused_full, stats.sequence) == (1, 1, 4)
