"""What a block's writer and the operator can ask for: holds, time to live, quotas, room ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncaked.api.protocol import PutItem, PutSlot, StoredItem
from mooncaked.block import Hold
from mooncaked.errors import InvalidRequest
from mooncaked.store import Store
from tests.fakes.heap_pool import HeapPool
from tests.fakes.step_clock import StepClock

PAGE = 4096
NS = "tenant/model"


class Node:
    """A store of some pages with one owner."""

    def __init__(self, pages: int = 8) -> None:
        self.clock = StepClock()
        self.store = Store(
            HeapPool(pages * PAGE), high_watermark=1.0, low_watermark=1.0, epoch=1, clock=self.clock
        )
        self.owner = self.store.new_owner()

    def put(self, key: str, *, namespace: str = NS, pages: int = 1, hold: str = "", ttl_ms: int = 0) -> str:
        item = PutItem(key=key.encode(), size=pages * PAGE, hold=hold, ttl_ms=ttl_ms)
        (slot,) = self.store.begin_put(self.owner, namespace, [item])
        if slot.status == "ok":
            self.store.commit(self.owner, [slot.token], [0])
        return slot.status

    def here(self, keys: str, namespace: str = NS) -> str:
        """Those of the one-letter keys that are readable."""
        found = self.store.exists(namespace, [key.encode() for key in keys])
        return "".join(key for key, exists in zip(keys, found, strict=True) if exists)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.store.check_integrity()


# --- holds -------------------------------------------------------------------------------------------


def test_a_hard_hold_outlasts_everything(node: Node) -> None:
    node.put("h", hold="hard")
    for key in "abcdefgijklmnop":
        assert node.put(key) == "ok"
    assert node.here("h") == "h"


def test_a_soft_hold_goes_when_nothing_else_can(node: Node) -> None:
    node.put("s", hold="soft")
    for key in "abcdefg":
        node.put(key)
    node.put("x")
    assert node.here("sa") == "s", "an ordinary block went first, although it was used later"
    pins = node.store.pin(node.owner, NS, [key.encode() for key in "bcdefgx"])
    assert None not in pins
    assert node.put("y") == "ok"
    assert node.here("sy") == "y"


def test_hard_holds_are_limited_to_half_of_the_pool(node: Node) -> None:
    assert [node.put(key, hold="hard") for key in "abcde"] == ["ok"] * 4 + ["full"]
    assert node.put("e") == "ok"


def test_a_held_block_can_be_removed(node: Node) -> None:
    node.put("h", hold="hard")
    assert node.store.remove(NS, [b"h"]) == [True]
    assert [node.put(key, hold="hard") for key in "abcd"] == ["ok"] * 4


def test_a_hold_can_be_changed_later(node: Node) -> None:
    node.put("h", hold="hard")
    node.put("a")
    assert node.store.hold(NS, [b"h", b"a", b"none"], Hold.NONE, 0.5) == [True, True, False]
    assert node.store.hold(NS, [b"a"], Hold.HARD, 0.01) == [False], "over the limit"
    assert node.store.hold(NS, [b"a"], Hold.SOFT, 0.01) == [True]
    for key in "bcdefgi":
        node.put(key)
    assert node.here("ha") == "a"


def test_a_hold_does_not_count_as_a_reader(node: Node) -> None:
    node.put("h", hold="hard")
    assert node.store.stats().pinned == 0
    info = node.store.block_info(NS, b"h")
    assert info is not None
    assert info.pins == 0


def test_an_unknown_hold_is_refused(node: Node) -> None:
    with pytest.raises(InvalidRequest, match="held 'forever'"):
        node.put("h", hold="forever")


# --- time to live ------------------------------------------------------------------------------------


def test_a_block_goes_when_its_time_is_over(node: Node) -> None:
    node.put("t", ttl_ms=1000)
    node.put("a")
    node.clock.now += 0.9
    node.store.look_after()
    assert node.here("ta") == "ta"
    node.clock.now += 0.2
    assert node.store.pin(node.owner, NS, [b"t"]) == [None], "it is not read although nobody looked yet"
    node.store.look_after()
    assert node.here("ta") == "a"
    assert node.store.stats().expired == 1


def test_a_namespace_has_a_time_to_live_of_its_own(node: Node) -> None:
    node.store.set_namespaces({}, {"short": 1.0})
    node.put("a", namespace="short")
    node.put("b", namespace="short", ttl_ms=60_000)
    node.put("c")
    node.clock.now += 2
    node.store.look_after()
    assert node.here("ab", "short") == "b"
    assert node.here("c") == "c"


def test_a_removed_block_does_not_expire_in_the_place_of_its_successor(node: Node) -> None:
    node.put("t", ttl_ms=1000)
    node.store.remove(NS, [b"t"])
    node.put("t")
    node.clock.now += 2
    node.store.look_after()
    assert node.here("t") == "t"


# --- quotas ------------------------------------------------------------------------------------------


def test_a_namespace_makes_room_among_its_own_blocks(node: Node) -> None:
    node.store.set_namespaces({"small": 2 * PAGE}, {})
    node.put("o")  # of another namespace, and the oldest
    for key in "abc":
        assert node.put(key, namespace="small") == "ok"
    assert node.here("abc", "small") == "bc"
    assert node.here("o") == "o"
    assert node.put("x", namespace="small", pages=3) == "full"


def test_what_is_read_or_written_counts_against_the_quota(node: Node) -> None:
    node.store.set_namespaces({"small": 2 * PAGE}, {})
    node.put("a", namespace="small")
    node.store.pin(node.owner, "small", [b"a"])
    node.store.begin_put(node.owner, "small", [PutItem(key=b"w", size=PAGE)])
    assert node.put("c", namespace="small") == "full"
    node.store.drop_owner(node.owner)
    node.owner = node.store.new_owner()
    assert node.put("c", namespace="small") == "ok"


def test_a_quota_can_come_and_go_while_blocks_are_there(node: Node) -> None:
    for key in "abc":
        node.put(key, namespace="n")
    node.store.set_namespaces({"n": PAGE}, {})
    node.store.check_integrity()
    assert node.here("abc", "n") == "abc", "it shrinks with the next write"
    node.put("d", namespace="n")
    assert node.here("abcd", "n") == "d"
    node.store.set_namespaces({}, {})
    node.put("e", namespace="n")
    assert node.here("de", "n") == "de"


def test_room_for_all_comes_from_whoever_used_it_longest_ago(node: Node) -> None:
    node.store.set_namespaces({"n": 4 * PAGE}, {})
    node.put("a", namespace="n")
    node.clock.now += 1
    for key in "bcdefgh":
        node.put(key)
        node.clock.now += 1
    node.put("i")
    assert node.here("a", "n") == ""
    assert node.here("b") == "b"


def test_what_each_namespace_has_can_be_asked(node: Node) -> None:
    node.store.set_namespaces({"idle": PAGE}, {})
    node.put("a")
    node.put("b", pages=2)
    assert [(n.namespace, n.blocks, n.size_bytes, n.quota_bytes) for n in node.store.namespaces()] == [
        ("idle", 0, 0, PAGE), (NS, 2, 3 * PAGE, None),
    ]  # fmt: skip


# --- room ahead of time --------------------------------------------------------------------------------


def reserve(node: Node, *sizes: int) -> list[PutSlot]:
    return node.store.reserve(node.owner, sizes)


def test_a_value_is_written_into_reserved_room_and_named_after() -> None:
    node = Node(pages=64)
    (slot,) = reserve(node, PAGE)
    node.store.view(slot.region, slot.offset, 5)[:] = b"hello"
    named = StoredItem(token=slot.token, key=b"k", size=5, meta=b"m")
    assert node.store.put_reserved(node.owner, NS, [named]) == ["stored"]
    (block,) = node.store.pin(node.owner, NS, [b"k"])
    assert block is not None
    assert (block.offset, block.size, block.meta, block.checksum) == (slot.offset, 5, b"m", None)
    node.store.check_integrity()


def test_an_owner_can_reserve_a_sixteenth_of_the_pool() -> None:
    node = Node(pages=64)
    slots = reserve(node, *[PAGE] * 5)
    assert [slot.status for slot in slots] == ["ok"] * 4 + ["full"]
    assert node.store.abort(node.owner, [slots[0].token]) == 1
    assert reserve(node, PAGE)[0].status == "ok"
    node.store.drop_owner(node.owner)
    assert node.store.stats().used_bytes == 0


def test_the_room_of_a_key_that_is_there_already_is_given_back() -> None:
    node = Node(pages=64)
    node.put("k")
    first, second = reserve(node, PAGE, PAGE)
    node.store.begin_put(node.owner, NS, [PutItem(key=b"w", size=PAGE)])
    items = [
        StoredItem(token=first.token, key=b"k", size=PAGE),
        StoredItem(token=second.token, key=b"w", size=PAGE),
    ]
    assert node.store.put_reserved(node.owner, NS, items) == ["exists", "busy"]
    assert node.store.stats().reserved_bytes == 0
    node.store.check_integrity()


def test_reserved_room_belongs_to_its_owner() -> None:
    node = Node(pages=64)
    (slot,) = reserve(node, PAGE)
    stranger = node.store.new_owner()
    named = StoredItem(token=slot.token, key=b"k", size=PAGE)
    with pytest.raises(InvalidRequest, match="reserves nothing here"):
        node.store.put_reserved(stranger, NS, [named])
    with pytest.raises(InvalidRequest, match="twice"):
        node.store.put_reserved(node.owner, NS, [named, named])
    too_long = StoredItem(token=slot.token, key=b"k", size=PAGE + 1)
    with pytest.raises(InvalidRequest, match="4097 bytes for key k were put in room for 4096"):
        node.store.put_reserved(node.owner, NS, [too_long])
    assert node.store.put_reserved(node.owner, NS, [named]) == ["stored"]


def test_no_room_is_given_while_those_of_the_life_before_may_still_write(node: Node) -> None:
    node.put("a")
    node.store.keep_quiet(node.clock.now + 3)
    assert node.put("a") == "exists"
    assert node.put("b") == "full"
    assert reserve(node, 64)[0].status == "full"
    node.clock.now += 3
    assert node.put("b") == "ok"


def test_the_node_works_out_checksums_that_writers_left_out() -> None:
    node = Node(pages=64)
    (slot,) = reserve(node, PAGE)
    node.store.put_reserved(node.owner, NS, [StoredItem(token=slot.token, key=b"k", size=PAGE)])
    assert node.store.wait_unchecked(0)
    (proof,) = node.store.take_unchecked(10)
    assert (proof.offset, proof.size, proof.checksum) == (slot.offset, PAGE, None)
    assert not node.store.wait_unchecked(0)
    node.store.set_checksums([proof.pin], [7])
    info = node.store.block_info(NS, b"k")
    assert info is not None
    assert (info.checksum, info.pins) == (7, 0)
