"""The store and what is around its pool: further regions, the tier below, direct readers, a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import pytest

from mooncaked.api.protocol import PutItem
from mooncaked.block import Block
from mooncaked.errors import InvalidRequest
from mooncaked.store import DirectUses, Leaving, LowerBlock, Restored, Store
from mooncaked.types import Tier
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
NS = "n"


class Follower:
    """Keeps the readable keys, and what happened since the last flush."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.proved: list[bytes] = []
        self.changes = 0

    def stored(self, block: Block) -> None:
        self.keys.add(block.key)
        self.changes += 1

    def verified(self, block: Block) -> None:
        self.proved.append(block.key)

    def removed(self, block: Block) -> None:
        self.keys.remove(block.key)
        self.changes += 1

    def flush(self) -> None:
        self.changes = 0


class Readers:
    """Clients that look at blocks without asking."""

    def __init__(self) -> None:
        self.looking: set[bytes] = set()
        self.uses = DirectUses()

    def reading(self, blocks: Sequence[Block]) -> list[bool]:
        return [block.key in self.looking for block in blocks]

    def drain(self) -> DirectUses:
        uses, self.uses = self.uses, DirectUses()
        return uses


class Below:
    """A tier below that has what the test says."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = set(keys)
        self.needs: list[bytes] = []
        self.lacks: list[bytes] = []
        self.wants = ""

    def admits(self, block: Block) -> bool:
        return block.key.decode() in self.wants

    def evicted(self, block: Block) -> None:
        self.lacks.append(block.key)

    def needed(self, namespace: str, keys: Sequence[bytes]) -> None:
        self.needs += keys

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        return [namespace == NS and key in self.keys for key in keys]

    def remove(self, namespace: str, keys: Sequence[bytes]) -> None:
        self.keys -= set(keys)

    def blocks(self) -> list[LowerBlock]:
        return [LowerBlock(NS, key, None, PAGE) for key in sorted(self.keys)]


class Node:
    def __init__(self, pages: int = 4) -> None:
        self.clock = StepClock()
        self.follower = Follower()
        self.readers = Readers()
        self.store = Store(
            HeapPool(pages * PAGE),
            high_watermark=0.9,
            low_watermark=0.5,
            epoch=1,
            clock=self.clock,
            followers=[self.follower],
            readers=self.readers,
        )
        self.owner = self.store.new_owner()

    def put(self, keys: str, pages: int = 1) -> list[int]:
        """The region of each one-letter key; each is stored after the one before."""
        regions = []
        for key in keys:
            (slot,) = self.store.begin_put(self.owner, NS, [PutItem(key=key.encode(), size=pages * PAGE)])
            assert slot.status == "ok", slot
            self.store.commit(self.owner, [slot.token], [0])
            regions.append(slot.region)
        return regions

    def here(self, keys: str) -> str:
        found = self.store.exists(NS, [key.encode() for key in keys])
        return "".join(key for key, exists in zip(keys, found, strict=True) if exists)

    def block(self, key: str) -> Block:
        return self.store._table.visible(NS)[key.encode()]


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.store.check_integrity()
    assert node.follower.keys == {block.key for block in node.store._table.all_visible()}
    assert node.follower.changes == 0, "a change was not flushed"


# --- regions -----------------------------------------------------------------------------------------


def test_a_pool_grows_by_a_region(node: Node) -> None:
    node.put("abcd")
    node.store.add_region(HeapPool(2 * PAGE, region=5))
    assert node.store.stats().capacity_bytes == 6 * PAGE
    assert node.put("ef") == [5, 5]
    assert node.here("abcdef") == "abcdef"


def test_a_region_is_emptied_and_dropped(node: Node) -> None:
    node.store.add_region(HeapPool(2 * PAGE, region=5))
    node.put("abcdef")
    (block,) = node.store.pin(node.owner, NS, [b"e"])
    assert block is not None
    node.store.retire_region(5)
    assert node.put("g") == [0]
    while node.store.evacuate(5):
        pass
    assert node.here("f") == ""
    assert node.here("e") == "e", "it is being read"
    assert not node.store.drop_region(5)
    node.store.unpin(node.owner, [block.pin])
    assert node.store.evacuate(5) == 1
    assert node.store.drop_region(5)
    assert node.store.region_bytes(5) == 0, "it may be asked about until everybody knows"
    assert node.store.stats().capacity_bytes == 4 * PAGE
    with pytest.raises(InvalidRequest, match="is not memory of this node"):
        node.store.view(5, 0, 1)


def test_the_last_region_stays(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="the only one"):
        node.store.retire_region(0)
    with pytest.raises(InvalidRequest, match="not in use"):
        node.store.retire_region(9)


# --- direct readers --------------------------------------------------------------------------------------


def test_memory_that_is_looked_at_is_not_given_to_others(node: Node) -> None:
    node.put("abcd")
    node.readers.looking = {b"a"}
    before = node.block("a").offset
    node.put("e")
    assert node.here("abe") == "e", "the place of a was no use, so b went too"
    assert node.block("e").offset != before
    assert node.store.stats().hidden == 1
    node.readers.looking = set()
    node.store.look_after()
    assert node.store.stats().hidden == 0
    assert node.store.stats().used_bytes == 3 * PAGE


def test_what_was_read_directly_counts_as_used(node: Node) -> None:
    node.put("abcd")
    node.clock.now += 10
    node.readers.uses = DirectUses([node.block("a"), node.block("b")], misses=3)
    node.store.look_after()
    assert (node.store.stats().hits, node.store.stats().misses) == (2, 3)
    node.put("e")
    assert node.here("abcde") == "abde"
    info = node.store.block_info(NS, b"a")
    assert info is not None
    assert info.idle_s == 0


def test_the_root_of_a_chain_read_directly_is_the_most_recent(node: Node) -> None:
    items = [PutItem(key=b"r", size=PAGE), PutItem(key=b"s", size=PAGE, parent=b"r")]
    slots = node.store.begin_put(node.owner, NS, items)
    node.store.commit(node.owner, [slot.token for slot in slots], [0, 0])
    node.put("xy")
    node.readers.uses = DirectUses([node.block("x"), node.block("r"), node.block("s")])
    node.store.look_after()
    node.put("123")
    assert node.here("rsxy") == "r"


# --- the tier below ------------------------------------------------------------------------------------


def test_both_tiers_together_are_what_the_node_has(node: Node) -> None:
    node.store.attach_lower(Below(b"c", b"d"))
    node.put("ab")
    assert node.here("abcde") == "abcd"
    assert node.store.prefix_match(NS, [b"a", b"c", b"b", b"d", b"e", b"a"]) == 4
    assert node.store.pin(node.owner, NS, [b"c"]) == [None]
    assert node.store.below(NS, [b"a", b"c", b"e"]) == [False, True, False]
    _, blocks = node.store.snapshot()
    assert {(b.key, b.tier) for b in blocks} == {
        (b"a", Tier.DRAM), (b"b", Tier.DRAM), (b"c", Tier.SSD), (b"d", Tier.SSD),
    }  # fmt: skip


def test_remove_reaches_the_tier_below(node: Node) -> None:
    below = Below(b"a", b"c")
    node.put("ab")
    node.store.attach_lower(below)
    assert node.store.remove(NS, [b"a", b"b", b"c", b"d"]) == [True, True, True, False]
    assert not below.keys


def leave(node: Node, wanted: str, bytes_max: int = 1 << 20) -> list[Leaving]:
    return node.store.leave_or_evict(lambda block: block.key.decode() in wanted, bytes_max).leaving


def test_blocks_that_are_wanted_below_leave_through_the_hands_of_who_saves_them(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    node.put("abcd")
    leaving = leave(node, wanted="b")
    assert [each.info.key for each in leaving] == [b"b"]
    assert node.here("abcd") == "bcd", "a was not wanted, and went; b stays until it is saved"
    below.keys.add(b"b")
    node.store.left(leaving, [True])
    assert node.here("abcd") == "bcd"
    assert node.store.pin(node.owner, NS, [b"b"]) == [None]
    stats = node.store.stats()
    assert (stats.evicted, stats.evicted_unsaved, stats.used_bytes) == (2, 1, 2 * PAGE)
    events = node.store.events_since(4)
    assert events is not None
    assert [(e.stored, e.key, e.tier) for e in events] == [
        (False, b"a", Tier.DRAM), (True, b"b", Tier.SSD), (False, b"b", Tier.DRAM),
    ]  # fmt: skip


def test_a_block_that_was_used_while_it_was_saved_stays(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    node.put("abcd")
    leaving = leave(node, wanted="ab")
    below.keys.add(b"a")
    node.clock.now += 1
    node.store.unpin(node.owner, [b.pin for b in node.store.pin(node.owner, NS, [b"a"]) if b])
    node.store.left(leaving, [True, False])
    assert node.store.below(NS, [b"a", b"b"]) == [False, False], "both are in memory"
    assert [each.info.key for each in leave(node, wanted="abcd")] == [b"b", b"c"], (
        "a needs no saving, and is recent"
    )


def test_what_does_not_fit_into_the_queue_is_evicted_when_the_pool_is_nearly_full(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    node.put("abcd")
    assert len(leave(node, wanted="abcd", bytes_max=PAGE)) == 1
    assert node.here("abcd") == "acd"
    assert below.lacks == [b"b"]


def test_what_does_not_fit_into_the_queue_waits_while_there_is_room(node: Node) -> None:
    node.store.add_region(HeapPool(36 * PAGE, region=5))
    node.store.attach_lower(Below())
    node.put(
        "abcdefghijklmnopqrstuvwxyz0123456789A"
    )  # 37 of 40: over the high watermark, and not nearly full
    first = leave(node, wanted="abcdefgh", bytes_max=2 * PAGE)
    assert [each.info.key for each in first] == [b"a", b"b"]
    assert leave(node, wanted="abcdefgh", bytes_max=0) == []
    assert node.store.stats().evicted == 0
    node.store.left(first, [False, False])
    assert [each.info.key for each in leave(node, wanted="a")] == [b"a"]
    assert node.store.stats().used_bytes == 21 * PAGE, "once begun, it goes on down to the low watermark"


def test_a_block_that_is_larger_than_the_queue_is_saved_alone(node: Node) -> None:
    node.store.attach_lower(Below())
    node.put("a", pages=3)
    node.put("b")
    assert [each.info.key for each in leave(node, wanted="ab", bytes_max=PAGE)] == [b"a"]


def ahead(node: Node, bytes_max: int = 1 << 20) -> str:
    leaving = node.store.leave_ahead(lambda _: True, bytes_max)
    node.store.left(leaving, [False] * len(leaving))
    return "".join(each.info.key.decode() for each in leaving)


def test_blocks_are_saved_before_they_have_to_leave(node: Node) -> None:
    below = Below()
    node.put("a")
    below.wants = "ad"
    node.store.attach_lower(below)
    assert ahead(node) == "", "there is room enough"
    node.put("bcd")
    below.wants = "b"
    node.store.unpin(node.owner, [b.pin for b in node.store.pin(node.owner, NS, [b"b"]) if b])
    node.store.unpin(node.owner, [b.pin for b in node.store.pin(node.owner, NS, [b"b", b"c"]) if b])
    assert ahead(node, 2 * PAGE) == "ad"
    assert ahead(node) == "b"
    assert ahead(node) == "", "each is tried once"


def test_what_was_saved_ahead_of_need_leaves_at_once(node: Node) -> None:
    below = Below()
    below.wants = "abcd"
    node.store.attach_lower(below)
    node.put("abcd")
    leaving = node.store.leave_ahead(lambda _: True, 1 << 20)
    assert [each.goes for each in leaving] == [False] * 4
    below.keys = {b"a", b"b", b"c", b"d"}
    node.store.left(leaving, [True] * 4)
    assert node.store.stats().evicted == 0
    node.put("ef")
    assert node.store.stats().evicted_unsaved == 0
    assert node.here("abcdef") == "abcdef"


def test_what_is_gone_before_it_was_saved_is_forgotten(node: Node) -> None:
    below = Below()
    below.wants = "".join(chr(n) for n in range(0x100, 0x2000))
    node.store.attach_lower(below)
    for key in below.wants:
        node.put(key)
    assert len(node.store._ahead) < 2000
    assert ahead(node) == below.wants[-4:]


def chain(node: Node, keys: str) -> None:
    items = [
        PutItem(key=key.encode(), size=PAGE, parent=parent.encode() or None)
        for key, parent in zip(keys, ["", *keys], strict=False)
    ]
    slots = node.store.begin_put(node.owner, NS, items)
    node.store.commit(node.owner, [slot.token for slot in slots], [0] * len(slots))


def test_a_chain_is_saved_in_one_go_and_leaves_leaf_by_leaf(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    chain(node, "rstu")
    leaving = leave(node, wanted="rstu")
    assert [(each.info.key, each.goes) for each in leaving] == [
        (b"r", False), (b"s", False), (b"t", False), (b"u", True),
    ]  # fmt: skip
    below.keys = {b"r", b"s", b"t", b"u"}
    node.store.left(leaving, [True] * 4)
    assert node.store.below(NS, [b"r", b"s", b"t", b"u"]) == [False, False, False, True]
    assert leave(node, wanted="rstu") == []
    assert node.store.below(NS, [b"r", b"s", b"t", b"u"]) == [False, False, True, True]
    assert node.store.stats().evicted_unsaved == 0


def test_a_root_with_other_children_is_no_part_of_the_chain(node: Node) -> None:
    node.store.attach_lower(Below())
    chain(node, "rs")
    (slot,) = node.store.begin_put(node.owner, NS, [PutItem(key=b"t", size=PAGE, parent=b"r")])
    node.store.commit(node.owner, [slot.token], [0])
    node.put("x")
    assert [each.info.key for each in leave(node, wanted="rs")] == [b"s"]


def test_a_leaf_that_got_a_child_while_it_was_saved_stays(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    node.put("abcd")
    leaving = leave(node, wanted="ab")
    node.store.remove(NS, [b"d"])
    (slot,) = node.store.begin_put(node.owner, NS, [PutItem(key=b"e", size=PAGE, parent=b"a")])
    node.store.commit(node.owner, [slot.token], [0])
    below.keys = {b"a", b"b"}
    node.store.left(leaving, [True, True])
    assert node.store.below(NS, [b"a", b"b"]) == [False, True]


def test_a_block_that_was_removed_while_it_was_saved_does_not_come_back(node: Node) -> None:
    below = Below()
    node.store.attach_lower(below)
    node.put("abcd")
    leaving = leave(node, wanted="a")
    node.store.remove(NS, [b"a"])
    below.keys.add(b"a")  # only now has it been written
    assert node.here("a") == ""
    node.store.left(leaving, [True])
    assert not below.keys
    assert node.here("a") == ""


def test_a_copy_that_was_lost_at_once_is_not_reported(node: Node) -> None:
    node.store.attach_lower(Below())
    node.put("abcd")
    sequence = node.store.sequence
    node.store.left(leave(node, wanted="ab"), [True, True])
    assert node.store.sequence == sequence
    assert node.here("ab") == "ab", "they stay in memory"


def test_what_lies_below_exists_for_a_writer_but_not_for_who_brings_it_up(node: Node) -> None:
    node.store.attach_lower(Below(b"a"))
    item = PutItem(key=b"a", size=PAGE)
    assert node.store.begin_put(node.owner, NS, [item])[0].status == "exists"
    (slot,) = node.store.begin_put(node.owner, NS, [item], raising=True)
    node.store.commit(node.owner, [slot.token], [0])
    node.store.raised(NS, [b"a"])
    assert node.block("a").saved
    assert node.store.stats().promoted == 1


def test_subscribers_need_a_snapshot_when_a_tier_comes_below(node: Node) -> None:
    node.put("ab")
    node.store.attach_lower(Below(b"a", b"c"))
    assert node.store.events_since(2) is None
    sequence, blocks = node.store.snapshot()
    assert node.store.events_since(sequence) == []
    assert {(b.key, b.tier) for b in blocks} == {
        (b"a", Tier.DRAM), (b"b", Tier.DRAM), (b"a", Tier.SSD), (b"c", Tier.SSD),
    }  # fmt: skip
    assert node.block("a").saved


def test_a_question_for_a_prefix_tells_the_tier_below_what_will_be_needed(node: Node) -> None:
    below = Below(b"b", b"c", b"e")
    node.store.attach_lower(below)
    node.put("a")
    assert node.store.prefix_match(NS, [b"a", b"b", b"c", b"d", b"e"]) == 3
    assert below.needs == [b"b", b"c"]


def test_a_saved_block_is_evicted_without_being_saved_again(node: Node) -> None:
    node.put("abcd")
    node.store.attach_lower(Below(b"a", b"b"))
    assert leave(node, wanted="abcd") == []
    assert node.store.stats().evicted_unsaved == 0
    node.store.lower_removed([LowerBlock(NS, b"a", None, PAGE)])


# --- a restart -------------------------------------------------------------------------------------------


def record(key: bytes, offset: int, size: int = PAGE, **fields: object) -> Restored:
    values = {"namespace": NS, "parent": None, "meta": b"", "region": 0, "checksum": 1, **fields}
    return Restored(key=key, offset=offset, size=size, **values)  # type: ignore[arg-type]


def test_blocks_come_back_but_are_compared_before_they_are_read(node: Node) -> None:
    report = node.store.restore([record(b"a", 0), record(b"b", PAGE, parent=b"a", meta=b"m")])
    assert (report.blocks, report.size, report.dropped) == (2, 2 * PAGE, 0)
    assert node.here("ab") == "ab"
    assert node.store.pin(node.owner, NS, [b"a"]) == [None]
    assert node.store.below(NS, [b"a", b"x"]) == [True, False]
    (last,) = node.store.take_unverified(10)  # one at a time: they are a quarter of this pool
    (first,) = node.store.take_unverified(10)
    assert [(proof.offset, proof.checksum) for proof in (last, first)] == [(PAGE, 1), (0, 1)]
    node.store.set_verified([last.pin, first.pin], [False, True])
    assert node.here("ab") == "a", "b was damaged"
    assert node.follower.proved == [b"a"]
    assert None not in node.store.pin(node.owner, NS, [b"a"])
    stats = node.store.stats()
    assert (stats.restored, stats.damaged, stats.unverified, stats.stored) == (2, 1, 0, 0)


def test_a_reader_can_have_a_restored_block_compared_at_once(node: Node) -> None:
    node.store.restore([record(b"a", 0)])
    background = node.store.take_unverified(10)
    (proof,) = node.store.take_unverified_keys(NS, [b"a", b"x"])
    node.store.set_verified([proof.pin], [True])
    assert None not in node.store.pin(node.owner, NS, [b"a"])
    node.store.set_verified([background[0].pin], [True])
    assert node.store.stats().unverified == 0


def test_records_that_cannot_be_true_are_dropped(node: Node) -> None:
    records = [
        record(b"good", PAGE),
        record(b"beyond", 4 * PAGE),
        record(b"over", PAGE, size=2 * PAGE),
        record(b"good", 3 * PAGE),
        record(b"odd", 100, size=3 * PAGE),
        record(b"elsewhere", 0, region=7),
        record(b"", 0),
        record(b"negative", -PAGE),
        record(b"unproved", 2 * PAGE, checksum=None),
        record(b"long", 2 * PAGE, meta=b"m" * 5000),
    ]
    report = node.store.restore(records)
    assert (report.blocks, report.dropped) == (1, 9)
    node.put("abc")
    node.store.check_integrity()


def test_a_restored_block_makes_room_like_any_other_and_keeps_its_terms(node: Node) -> None:
    rows = [record(b"a", 0), record(b"h", PAGE, hold=2), record(b"t", 2 * PAGE, expires_at_s=1001.0)]
    node.store.restore([*rows, record(b"b", 3 * PAGE, expires_at_s=inf)])
    node.put("xy")
    node.clock.now += 5
    node.store.look_after()
    assert node.here("ahtbxy") == "hbxy"
