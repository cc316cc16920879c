"""Units: runs of blocks of one prefix chain that were last used together, and what is known of them."""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Generic
from zlib import crc32

from mooncaked.eviction.base import B

AGE_BINS = 2 * 41  # two for each doubling
_TURNS = (0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, *[7] * 10, 8)  # by uses; the last one for all beyond


TURNS_MAX = len(_TURNS)  # a stem with more uses is no conversation
_MARKS_MAX = 256  # of one unit


class Kind(IntEnum):
    """How a unit came to be."""

    WHOLE = 0  # a chain from its root on
    STEM = 1  # what several chains share, above a fork
    REST = 2  # what the last use of a chain left out, below a fork
    BRANCH = 3  # what a use added to a chain


def age_bin(age: int) -> int:
    """The bin of an age in touches; bin 2k starts at 2^(k-1), bin 2k+1 half way to the next power."""
    length = age.bit_length()
    return min(AGE_BINS - 1, 2 * length + (age >> length - 2 & 1 if length > 1 else 0))


def mark(key: bytes) -> int:
    """What is kept of an evicted block."""
    return crc32(key)


class Unit(Generic[B]):
    """Its blocks are `blocks`, at `start` and on in their chain, followed by `marks` of evicted ones, the
    last first. A use may come in pieces: while it is `open`, it has come to position `read` and may go on."""

    __slots__ = (
        "blocks",
        "credited",
        "entry",
        "gap",
        "group",
        "grown",
        "kind",
        "marks",
        "name",
        "open",
        "read",
        "slot",
        "start",
        "stored_at",
        "tail",
        "turns_above",
        "used_at",
        "uses",
        "value",
    )

    def __init__(self, kind: Kind, start: int, now: int, turns_above: int, name: tuple[str, bytes]) -> None:
        self.kind = kind
        self.start = self.read = start
        self.blocks: list[B] = []
        self.marks = array("I")
        self.name = name  # namespace, and key of its first block
        self.used_at = self.stored_at = now  # in touches: last use, last growth
        self.turns_above = turns_above  # uses of the unit that it branched from, by then
        self.uses = 1
        self.gap = 0  # touches between its last two uses
        self.grown = 0  # blocks since its last use
        self.open = False
        self.group = self.tail = 0  # numbers of its rows in the tables
        self.credited = 0  # age bins that it was seen to outlive unused since its last use
        self.value = 0.0
        self.entry = 0  # number of its valid entry in the heap; 0: it is set aside
        self.slot = -1  # index in the list of those with blocks

    @property
    def end(self) -> int:
        """Position after its last block."""
        return self.start + len(self.blocks)

    @property
    def full(self) -> int:
        """Position after its last block before any was evicted."""
        return self.start + len(self.blocks) + len(self.marks)

    def note_gone(self, block: B) -> None:
        """A block was evicted that was the last one; it is no longer in `blocks`."""
        self.marks.append(mark(block.key))
        if len(self.marks) > _MARKS_MAX:
            del self.marks[0]

    def classify(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Group of units with which its chance of another use is learnt, and group for its tail's."""
        turn = _TURNS[min(self.uses + self.turns_above, len(_TURNS) - 1)]
        kind = int(self.kind)
        if self.kind is Kind.REST:
            return (kind, 0, 0), (kind, 0)
        if self.uses == 1:  # never used again: its size tells most
            size = self.full - self.start if self.turns_above else self.full
            detail = size.bit_length() // 2
            return (kind, turn, detail), (kind, 1 + detail)
        return (kind, turn, age_bin(self.gap) // 3), (kind, 0)
