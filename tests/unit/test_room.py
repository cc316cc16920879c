"""Making room: what goes, what stays, and when it is no use to evict at all."""

from __future__ import annotations

import pytest

from mooncaked.block import Block, Extent
from mooncaked.errors import IntegrityError
from mooncaked.room import Chain, Room

PAGE = 4096
NS = "n"


class Pool:
    """A room of `pages` pages, and what went out of it."""

    def __init__(self, pages: int, blocks_max: int = 1000) -> None:
        self.gone: list[bytes] = []
        self.room = Room(pages * PAGE, blocks_max, lambda block: self.gone.append(block.key))
        self.owner = self.room.table.new_owner()

    def place(self, pages: int, parent: bytes | None = None) -> Extent | None:
        return self.room.place(pages * PAGE, Chain(self.room.table, NS, [parent]))

    def fill(self, key: bytes, pages: int = 1, parent: bytes | None = None) -> Block:
        """A block that stays in the hands of its writer."""
        extent = self.place(pages, parent)
        assert extent is not None
        block = self.room.enter(NS, key, pages * PAGE, parent, b"", extent)
        block.checksum = self.room.table.fill(block, self.owner)  # the token, until it is complete
        return block

    def complete(self, block: Block) -> None:
        self.room.table.complete(self.owner, block.checksum, 0)
        self.room.touch([block])
        self.room.loosened()

    def put(self, key: bytes, pages: int = 1, parent: bytes | None = None) -> Block:
        block = self.fill(key, pages, parent)
        self.complete(block)
        return block

    def pin(self, block: Block) -> int:
        self.room.touch([block])
        return self.room.table.pin(self.owner, [block])[0]

    def unpin(self, pin: int) -> None:
        self.room.free(self.room.table.unpin(self.owner, [pin]))
        self.room.loosened()


def test_nothing_is_evicted_while_there_is_room() -> None:
    pool = Pool(4)
    for key in (b"a", b"b", b"c", b"d"):
        pool.put(key)
    assert pool.gone == []


def test_as_much_as_needed_is_evicted_and_no_more() -> None:
    pool = Pool(4)
    for key in (b"a", b"b", b"c", b"d"):
        pool.put(key)
    pool.put(b"e", pages=2)
    assert pool.gone == [b"a", b"b"]
    pool.room.check_integrity()


def test_eviction_goes_on_until_the_pieces_join() -> None:
    pool = Pool(6)
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        pool.put(key)
    by_key = pool.room.table.visible(NS)
    pool.room.touch([by_key[b"b"]])
    pool.room.touch([by_key[b"d"]])
    pool.put(b"large", pages=3)
    assert pool.gone == [b"a", b"c", b"e", b"f", b"b"], "oldest first; a, c and e leave no run of three"
    pool.room.check_integrity()


def test_a_chain_goes_from_its_leaf_even_when_the_root_is_older() -> None:
    pool = Pool(4)
    pool.put(b"root")
    pool.put(b"mid", parent=b"root")
    pool.put(b"leaf", parent=b"mid")
    pool.put(b"other")
    for key in (b"v", b"w", b"x", b"y"):
        pool.put(key)
    assert pool.gone == [b"leaf", b"mid", b"root", b"other"]


def test_a_parent_is_kept_for_a_child_that_is_being_written() -> None:
    pool = Pool(3)
    pool.put(b"root")
    pool.put(b"other")
    pool.fill(b"child", parent=b"root")
    pool.put(b"x")
    assert pool.gone == [b"other"]


def test_only_when_no_leaf_is_left_an_inner_block_goes_and_the_own_chain_last() -> None:
    pool = Pool(6)
    pool.put(b"mine")
    pool.put(b"mine2", parent=b"mine")
    pool.put(b"theirs")
    pool.fill(b"their child", parent=b"theirs")
    pool.fill(b"my child", parent=b"mine2")
    pool.put(b"leaf")
    assert pool.place(1, parent=b"mine2") is not None
    assert pool.gone == [b"leaf"]
    assert pool.place(1, parent=b"mine2") is not None
    assert pool.gone == [b"leaf", b"theirs"]
    assert pool.place(1, parent=b"mine2") is not None
    assert pool.gone == [b"leaf", b"theirs", b"mine2"], "the deeper part of the own chain before its root"
    assert pool.place(1, parent=b"mine2") is not None
    assert pool.place(1, parent=b"mine2") is None


def test_what_is_read_or_written_is_never_evicted() -> None:
    pool = Pool(3)
    pool.pin(pool.put(b"read"))
    pool.fill(b"written")
    pool.put(b"idle")
    assert pool.place(1) is not None
    assert pool.place(1) is None
    assert pool.gone == [b"idle"]


def test_room_comes_back_when_a_reader_or_writer_ends() -> None:
    pool = Pool(2)
    pin = pool.pin(pool.put(b"read"))
    written = pool.fill(b"written")
    assert pool.place(1) is None
    pool.unpin(pin)
    pool.put(b"next")
    assert pool.place(1) is not None
    assert pool.gone == [b"read", b"next"]
    assert pool.place(1) is None
    pool.complete(written)
    assert pool.place(1) is not None


def test_a_value_that_cannot_fit_between_pinned_blocks_does_not_empty_the_pool() -> None:
    pool = Pool(64)
    blocks = [pool.put(b"%d" % number) for number in range(64)]
    for block in blocks[::16]:
        pool.pin(block)
    assert pool.place(16) is None
    assert pool.place(40) is None
    assert pool.gone == []
    assert pool.place(15) is not None
    assert len(pool.gone) >= 15


def test_the_number_of_blocks_has_a_limit_too() -> None:
    pool = Pool(100, blocks_max=3)
    for key in (b"a", b"b", b"c", b"d"):
        pool.put(key)
    assert pool.gone == [b"a"]
    for block in list(pool.room.table.visible(NS).values()):
        pool.pin(block)
    assert pool.place(1) is None


def test_shrinking_takes_leaves_down_to_the_goal_in_slices() -> None:
    pool = Pool(10)
    for number in range(10):
        pool.put(b"%d" % number)
    assert pool.room.shrink(goal=5 * PAGE, blocks_max=3) == (3, True)
    assert pool.room.shrink(goal=5 * PAGE, blocks_max=3) == (2, False)
    assert pool.gone == [b"0", b"1", b"2", b"3", b"4"]


def test_shrinking_ahead_of_need_never_takes_a_parent_from_its_child() -> None:
    pool = Pool(2)
    pool.put(b"root")
    pool.fill(b"child", parent=b"root")
    assert pool.room.shrink(goal=0, blocks_max=10) == (0, False)


def test_damage_is_found() -> None:
    pool = Pool(4)
    pool.put(b"a")
    pool.room.check_integrity()
    pool.room._allocators[0].allocate(PAGE)
    with pytest.raises(IntegrityError, match="1 blocks and reservations at 1 places, 2 allocated"):
        pool.room.check_integrity()


def test_a_block_that_the_policy_does_not_know_is_found() -> None:
    pool = Pool(4)
    pool.room._shared.discard(pool.put(b"a"))
    with pytest.raises(IntegrityError, match="1 readable, 0 touched"):
        pool.room.check_integrity()
