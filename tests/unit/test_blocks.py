"""The block table's transitions, one by one, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mooncaked.blocks import Block, BlockState, BlockTable
from mooncaked.errors import IntegrityError, InvalidRequest

NS = "tenant/model"


class Books:
    """A table, an owner, and what it reported as released."""

    def __init__(self) -> None:
        self.released: list[Block] = []
        self.table = BlockTable(self.released.append)
        self.owner = self.table.new_owner()

    def put(self, key: bytes, parent: bytes | None = None, size: int = 10, namespace: str = NS) -> Block:
        _, token = self.begin(key, parent, size, namespace)
        return self.table.complete(self.owner, token, checksum=7)

    def begin(
        self, key: bytes, parent: bytes | None = None, size: int = 10, namespace: str = NS
    ) -> tuple[Block, int]:
        block = self.table.allocate(namespace, key, size, parent, b"m", offset=0)
        return block, self.table.fill(block, self.owner)


@pytest.fixture
def books() -> Books:
    return Books()


def test_a_block_is_visible_only_when_it_is_complete(books: Books) -> None:
    table = books.table
    block = table.allocate(NS, b"k", 10, None, b"", 64)
    assert (block.state, b"k" in table.visible(NS)) == (BlockState.ALLOCATED, False)
    token = table.fill(block, books.owner)
    assert (block.state, b"k" in table.visible(NS), b"k" in table.pending(NS)) == (
        BlockState.FILLING,
        False,
        True,
    )
    table.complete(books.owner, token, checksum=5)
    assert (block.state, table.visible(NS)[b"k"], block.checksum) == (BlockState.COMPLETE, block, 5)
    assert table.hide(block)
    assert (block.state, b"k" in table.visible(NS), table.count) == (BlockState.GONE, False, 0)
    table.check_integrity()


def test_an_aborted_block_is_gone_and_its_name_free(books: Books) -> None:
    block, token = books.begin(b"k")
    assert books.table.abort(books.owner, [token]) == [block]
    assert block.state is BlockState.GONE
    books.put(b"k")
    books.table.check_integrity()


def test_a_read_block_is_invisible_at_once_but_goes_with_its_last_reader(books: Books) -> None:
    table, block = books.table, books.put(b"k")
    first, second = table.pin(books.owner, [block, block])
    assert not table.hide(block)
    assert (block.state, table.hidden_count, b"k" in table.visible(NS)) == (BlockState.EVICTING, 1, False)
    newer = books.put(b"k")
    table.check_integrity()
    assert table.unpin(books.owner, [first]) == []
    assert table.unpin(books.owner, [second]) == [block]
    assert (block.state, newer.state, table.count) == (BlockState.GONE, BlockState.COMPLETE, 1)
    table.check_integrity()


def test_blocks_of_one_key_in_two_namespaces_are_strangers(books: Books) -> None:
    ours = books.put(b"k")
    theirs = books.put(b"k", namespace="other")
    books.put(b"child", parent=b"k", namespace="other")
    assert (ours.children, theirs.children) == (0, 1)
    books.table.check_integrity()


def test_children_are_counted_while_they_are_written_or_readable(books: Books) -> None:
    root = books.put(b"r")
    _, token = books.begin(b"a", b"r")
    child = books.put(b"b", b"r")
    assert root.children == 2
    books.table.abort(books.owner, [token])
    assert (root.children, books.released) == (1, [])
    books.table.hide(child)
    assert (root.children, books.released) == (0, [root])


def test_a_parent_that_comes_after_its_children_knows_them(books: Books) -> None:
    child = books.put(b"c", b"r")
    root = books.put(b"r")
    assert root.children == 1
    books.table.hide(root)
    assert books.put(b"r").children == 1
    books.table.hide(child)
    books.table.check_integrity()


def test_the_last_reader_is_reported_as_released(books: Books) -> None:
    block = books.put(b"k")
    first, second = books.table.pin(books.owner, [block, block])
    books.table.unpin(books.owner, [first])
    assert books.released == []
    books.table.unpin(books.owner, [second])
    assert books.released == [block]


def test_an_owner_that_ends_takes_its_writes_and_reads_with_it(books: Books) -> None:
    table = books.table
    kept, hidden = books.put(b"kept"), books.put(b"hidden")
    leaving = table.new_owner()
    table.pin(leaving, [kept, hidden])
    table.hide(hidden)
    written = table.allocate(NS, b"w", 1, None, b"", 64)
    table.fill(written, leaving)
    assert set(table.end_owner(leaving)) == {written, hidden}
    assert (kept.pins, kept.state, table.pending_count, table.hidden_count) == (0, BlockState.COMPLETE, 0, 0)
    assert table.end_owner(leaving) == []
    table.check_integrity()


def test_ancestors_are_the_present_part_of_the_chain_roots_first(books: Books) -> None:
    a, b, c = books.put(b"a"), books.put(b"b", b"a"), books.put(b"c", b"b")
    d = books.put(b"d", b"b")
    books.put(b"far", b"missing")
    ancestors = books.table.ancestors
    assert ancestors(NS, [b"c"]) == [a, b, c]
    assert ancestors(NS, [b"c", b"d", None, b"x"]) == [d, a, b, c]
    assert ancestors("other", [b"c"]) == []


def test_a_ring_of_parents_ends_the_walk(books: Books) -> None:
    a, b = books.put(b"a", b"b"), books.put(b"b", b"a")
    assert set(books.table.ancestors(NS, [b"a"])) == {a, b}
    books.table.hide(a)
    books.table.hide(b)
    books.table.check_integrity()


def test_an_empty_namespace_leaves_nothing_behind(books: Books) -> None:
    for n in range(100):
        books.table.hide(books.put(b"k", b"p", namespace=f"tenant{n}"))
        _, token = books.begin(b"k", b"p", namespace=f"tenant{n}")
        books.table.abort(books.owner, [token])
    assert books.table.all_blocks() == []
    assert books.table._spaces == {}


@pytest.mark.parametrize(
    "use",
    [
        lambda table, owner, token, pin: table.complete(owner, token, 0),
        lambda table, owner, token, pin: table.abort(owner, [token]),
        lambda table, owner, token, pin: table.writes(owner, [token]),
        lambda table, owner, token, pin: table.unpin(owner, [pin]),
        lambda table, owner, token, pin: table.reads(owner, [pin]),
    ],
)
def test_only_the_owner_can_use_a_token_or_pin(
    books: Books, use: Callable[[BlockTable, int, int, int], object]
) -> None:
    table = books.table
    (pin,) = table.pin(books.owner, [books.put(b"k")])
    _, token = books.begin(b"w")
    stranger = table.new_owner()
    with pytest.raises(InvalidRequest, match="belongs to another connection"):
        use(table, stranger, token, pin)
    with pytest.raises(InvalidRequest, match="owner 999 has ended"):
        use(table, 999, token, pin)
    table.check_integrity()
    use(table, books.owner, token, pin)


def test_a_token_or_pin_works_once(books: Books) -> None:
    table = books.table
    _, token = books.begin(b"w")
    table.complete(books.owner, token, 0)
    (pin,) = table.pin(books.owner, [table.visible(NS)[b"w"]])
    table.unpin(books.owner, [pin])
    for call in (table.abort, table.unpin):
        with pytest.raises(InvalidRequest, match="used already"):
            call(books.owner, [token if call == table.abort else pin])


def test_a_batch_with_one_bad_number_does_nothing(books: Books) -> None:
    table = books.table
    _, token = books.begin(b"w")
    pins = table.pin(books.owner, [books.put(b"k")])
    for call, numbers in ((table.abort, [token]), (table.unpin, pins)):
        with pytest.raises(InvalidRequest, match="unknown"):
            call(books.owner, [*numbers, 12345])
        with pytest.raises(InvalidRequest, match="twice"):
            call(books.owner, [*numbers, *numbers])
    assert (table.pending_count, table.pinned_count) == (1, 1)
    table.check_integrity()


def test_transitions_out_of_order_are_refused(books: Books) -> None:
    table, complete = books.table, books.put(b"k")
    filling, _ = books.begin(b"w")
    with pytest.raises(IntegrityError, match="not ALLOCATED"):
        table.fill(complete, books.owner)
    with pytest.raises(IntegrityError, match="not COMPLETE"):
        table.pin(books.owner, [filling])
    with pytest.raises(IntegrityError, match="not COMPLETE"):
        table.hide(filling)
    table.hide(complete)
    with pytest.raises(IntegrityError, match="not COMPLETE"):
        table.hide(complete)
    with pytest.raises(IntegrityError, match="not COMPLETE"):
        table.pin(books.owner, [complete])
    table.check_integrity()


@pytest.mark.parametrize("first", ["pending", "complete"])
def test_a_name_is_given_once(books: Books, first: str) -> None:
    _, token = books.begin(b"k")
    if first == "complete":
        books.table.complete(books.owner, token, 0)
    with pytest.raises(IntegrityError, match="allocated twice"):
        books.table.allocate(NS, b"k", 1, None, b"", 64)


def test_counters_follow_states(books: Books) -> None:
    table = books.table
    block, _ = books.put(b"k", size=100), books.begin(b"w", size=7)
    table.pin(books.owner, [block, block])
    assert (table.visible_count, table.pending_count, table.pinned_count) == (1, 1, 1)
    assert (table.pinned_bytes, table.pending_bytes, table.count) == (100, 7, 2)


@pytest.mark.parametrize("damage", ["pins", "children", "state", "size", "key"])
def test_damage_is_found(books: Books, damage: str) -> None:
    block = books.put(b"k")
    books.table.pin(books.owner, [block])
    books.table.check_integrity()
    value = {"pins": 3, "children": 1, "state": BlockState.FILLING, "size": 11, "key": b"other"}[damage]
    setattr(block, damage, value)
    with pytest.raises(IntegrityError, match=r"block table|namespace tenant/model"):
        books.table.check_integrity()
