"""The journal: what is read back is what was stored, wherever it ends; and it stays short."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from mooncaked.block import Block, BlockState
from mooncaked.failpoints import arm, disarm
from mooncaked.pools import journal as module
from mooncaked.pools.journal import Journal, Kept, read_journal
from mooncaked.pools.records import HEADER_BYTES, Header, RegionShape, Unreadable, encode_header

HEADER = Header(
    generation=1,
    node_id="n1",
    epoch=7,
    grain=4096,
    huge_pages="off",
    regions=[RegionShape(0, 1 << 20, "off")],
)


def block(name: str, offset: int = 0, checksum: int | None = 1) -> Block:
    return Block("ns", name.encode(), 100, None, b"m", offset, 0, BlockState.COMPLETE, checksum)


class Files:
    """Two files in memory, and the journal in them."""

    def __init__(self) -> None:
        self.fds = [os.memfd_create("a"), os.memfd_create("b")]
        self.journal = self.begin(HEADER, 0)

    def begin(self, header: Header, file: int) -> Journal:
        return Journal([os.dup(fd) for fd in self.fds], header, file)

    def read(self) -> Kept:
        kept = read_journal(self.fds)
        assert kept is not None
        return kept

    def keys(self) -> list[str]:
        return [stored.key.decode() for stored in self.read().blocks]

    def store(self, *blocks: Block) -> None:
        for one in blocks:
            self.journal.stored(one)
        self.journal.flush()

    def remove(self, *blocks: Block) -> None:
        for one in blocks:
            self.journal.removed(one)
        self.journal.flush()


@pytest.fixture
def files() -> Iterator[Files]:
    files = Files()
    yield files
    disarm()
    files.journal.close()
    for fd in files.fds:
        os.close(fd)


def test_what_was_stored_and_not_removed_is_read_back(files: Files) -> None:
    files.journal.commit()
    files.store(block("a"), block("b", 4096), block("c", 8192))
    files.remove(block("b"))
    kept = files.read()
    assert (kept.header, kept.torn, kept.file) == (HEADER, False, 0)
    a, c = kept.blocks
    assert (a.key, a.namespace, a.meta, a.checksum, c.key, c.offset) == (b"a", "ns", b"m", 1, b"c", 8192)


def test_it_does_not_count_before_it_is_committed(files: Files) -> None:
    files.store(block("a"))
    assert read_journal(files.fds) is None
    files.journal.commit()
    assert files.keys() == ["a"]


def test_the_one_before_counts_until_the_next_is_committed(files: Files) -> None:
    files.journal.commit()
    files.store(block("a"))
    files.journal.close()
    files.journal = files.begin(Header(**{**as_dict(HEADER), "generation": 2}), 1)
    files.store(block("b"))
    assert files.keys() == ["a"], "a crash while starting loses nothing"
    files.journal.commit()
    assert files.keys() == ["b"]
    assert os.fstat(files.fds[0]).st_size == 0, "the old one's memory is given back"


def as_dict(header: Header) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}


def test_a_checksum_that_came_later_is_on_record(files: Files) -> None:
    files.journal.commit()
    late = block("late", checksum=None)
    files.store(late, block("known"))
    late.checksum = 99
    files.journal.verified(late)
    files.journal.flush()
    assert [stored.checksum for stored in files.read().blocks] == [99, 1]
    size = files.journal.size
    files.journal.verified(late)
    files.journal.flush()
    assert files.journal.size == size, "a block that is only compared needs no record"


@pytest.mark.parametrize("cut", [1, 5, 12, 30])
def test_a_record_that_was_cut_off_does_not_count(files: Files, cut: int) -> None:
    files.journal.commit()
    files.store(block("a"))
    files.store(block("b"))
    os.truncate(files.fds[0], files.journal.size - cut)
    assert (files.keys(), files.read().torn) == (["a"], True)


def test_nothing_behind_a_damaged_record_counts(files: Files) -> None:
    files.journal.commit()
    files.store(block("a"))
    end = files.journal.size
    files.store(block("b"))
    files.store(block("c"))
    os.pwrite(files.fds[0], b"\xff", end + 20)
    assert files.keys() == ["a"]


def test_regions_that_came_and_went(files: Files) -> None:
    files.journal.commit()
    files.journal.region_added(RegionShape(1, 4096, "off"))
    files.journal.region_gone(0)
    assert files.read().regions == {1: RegionShape(1, 4096, "off")}


def test_a_sign_of_life(files: Files) -> None:
    files.journal.beat(1.0)
    files.journal.commit()
    assert files.read().seen_at_s is None
    files.journal.beat(12.5)
    files.store(block("a"))
    assert (files.read().seen_at_s, files.keys()) == (12.5, ["a"])
    files.journal.compact()
    assert files.read().seen_at_s == 12.5


def test_other_files_are_refused_with_the_reason(files: Files) -> None:
    os.pwrite(files.fds[0], b"something else" * 1000, 0)
    with pytest.raises(Unreadable, match="no journal"):
        read_journal(files.fds)
    later = encode_header(Header(**{**as_dict(HEADER), "version": 9}))  # type: ignore[arg-type]
    os.pwrite(files.fds[0], later, 0)
    with pytest.raises(Unreadable, match="format version 9, this program reads 1"):
        read_journal(files.fds)
    os.pwrite(files.fds[0], b"\0" + later[9:], 40)
    with pytest.raises(Unreadable, match="header is damaged"):
        read_journal(files.fds)


# --- shortening --------------------------------------------------------------------------------------------


def test_it_is_due_when_most_of_it_is_history(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLACK_RECORDS", 10)
    files.journal.commit()
    files.store(*(block(f"k{i}", i * 4096) for i in range(10)))
    assert not files.journal.due
    for _ in range(11):
        files.remove(block("k0"))
        files.store(block("k0"))
    assert files.journal.due
    before = files.journal.size
    assert files.journal.compact()
    assert not files.journal.due
    assert files.journal.size < before
    assert files.keys() == [*(f"k{i}" for i in range(1, 10)), "k0"]
    files.store(block("later", 81920))
    assert files.keys()[-1] == "later"
    assert (files.read().header.generation, files.read().file) == (2, 1)
    assert os.fstat(files.fds[0]).st_size == 0
    assert files.journal.compact(), "back into the first"
    assert (files.read().file, len(files.keys())) == (0, 11)


def test_changes_go_on_while_it_is_shortened(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAIL_BYTES", 1000)
    files.journal.commit()
    files.store(*(block(f"k{i}", i * 4096) for i in range(1000)))
    at_summary, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        at_summary.set()
        go_on.wait(10)

    arm("journal.compact.after_summary", hold)
    thread = threading.Thread(target=files.journal.compact)
    thread.start()
    assert at_summary.wait(10)
    assert not files.journal.compact(), "one at a time"
    for i in range(200):
        files.store(block(f"new{i}", (2000 + i) * 4096))
    files.remove(block("k5"), block("new7"))
    assert len(files.keys()) == 1198, "the old one counts until the end"
    go_on.set()
    thread.join()
    assert files.read().file == 1
    assert set(files.keys()) == {f"k{i}" for i in range(1000)} - {"k5"} | {f"new{i}" for i in range(200)} - {
        "new7"
    }
    assert files.journal.records == 999 + 1 + 202


def test_shortening_that_fails_harms_nothing(files: Files) -> None:
    files.journal.commit()
    files.store(block("a"))
    arm("journal.compact.before_summary", "enospc")
    assert not files.journal.compact()
    assert files.keys() == ["a"]
    disarm()
    assert files.journal.compact()
    assert files.keys() == ["a"]


def test_a_write_that_fails_makes_the_next_start_a_cold_one(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files.journal.commit()
    files.store(block("a"))
    arm("journal.flush.before_write", "enospc")
    files.remove(block("a"))
    disarm()
    files.store(block("b"))
    assert read_journal(files.fds) is None
    assert "No space left" in files.journal.problem
    assert caplog.text.count("the next start is a cold one") == 1
    assert not files.journal.compact()


def test_header_and_frames_do_not_meet(files: Files) -> None:
    regions = [RegionShape(i, 1 << 40, "transparent") for i in range(128)]
    header = Header(**{**as_dict(HEADER), "regions": regions, "node_id": "n" * 64})  # type: ignore[arg-type]
    assert len(encode_header(header)) < HEADER_BYTES - 16
