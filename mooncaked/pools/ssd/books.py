"""What a device knows of itself: the index, its segments, removals to be written down, and counters.

One lock guards all of it and is held for short changes of memory only, never during a system call."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mooncaked.errors import IntegrityError
from mooncaked.keys import show_key
from mooncaked.pools.ssd.files import SegmentFiles
from mooncaked.pools.ssd.health import Health
from mooncaked.pools.ssd.index import ORDINAL_BITS, Index
from mooncaked.pools.ssd.model import Keep, Lost, LostReason, SsdEntry, SsdItem, WriteStatus

Name = tuple[str, bytes]  # namespace and key
_BATCH = 1024  # blocks that are handled in one go, and that a callback is told of at once


@dataclass(slots=True, eq=False)
class Segment:
    """A segment that holds groups, or is about to."""

    slot: int
    generation: int
    end: int = 0  # bytes: where the next group begins
    groups: int = 0
    rows_bound: int = 0  # bytes that its table needs at most
    failures: int = 0  # groups that could not be written here
    readers: int = 0  # reads in progress


@dataclass(slots=True)
class Counters:
    """Since the start."""

    written_bytes: int = 0
    device_written_bytes: int = 0
    read_bytes: int = 0
    stored: int = 0
    read: int = 0
    carried: int = 0
    carried_bytes: int = 0
    lost: Counter[str] = field(default_factory=Counter)  # by reason


@dataclass(slots=True, eq=False)
class Ticket:
    """A block on its way to the disk."""

    item: SsdItem
    status: WriteStatus | None = None  # None: not decided yet
    cancelled: bool = False  # removed by somebody in the meantime

    @property
    def name(self) -> Name:
        """Namespace and key."""
        return (self.item.namespace, self.item.key)


class Books:
    """The books of one device."""

    def __init__(self, number: int, files: SegmentFiles, slots_max: int, health: Health) -> None:
        self.number = number  # of the device in its pool
        self.files = files
        self.owner = bytes(16)  # what headers that count carry; from the manifest
        self.slots_max = slots_max
        self.health = health
        self.lock = threading.Lock()
        self.no_readers = threading.Condition(self.lock)
        self.index = Index()
        self.segments: dict[int, Segment] = {}  # by slot
        self.active: Segment | None = None
        self.free: deque[int] = deque()  # slots whose file can be written anew
        self.generation = 0  # the highest that was ever used
        self.dead = False  # nothing becomes readable any more
        self.in_flight: dict[Name, Ticket] = {}  # blocks that wait to be written, or are
        self.removals: dict[Name, None] = {}  # to be written with the next group
        self.removal_hook: Callable[[], None] = lambda: None  # called when `removals` is no longer empty
        self.counters = Counters()
        self.lost: Lost = lambda entries, reason: None
        self.keep: Keep | None = None

    # --- entries ----------------------------------------------------------------------------------------

    def entry(self, location: int) -> SsdEntry:
        """The block at a location; under the lock."""
        blocks, ordinal = self.index.blocks_at(location)
        return SsdEntry(
            namespace=blocks.names[blocks.name_of[ordinal]],
            key=blocks.keys[ordinal],
            parent=blocks.parents[ordinal],
            meta=blocks.metas.get(ordinal, b""),
            size=blocks.sizes[ordinal],
            checksum=blocks.checksums[ordinal],
            device=self.number,
            location=location,
            generation=self.segments[location >> ORDINAL_BITS].generation,
            offset=blocks.offsets[ordinal],
        )

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[SsdEntry | None]:
        """The blocks of those names."""
        with self.lock:
            places = [self.index.find(namespace, key) for key in keys]
            return [None if place is None else self.entry(place) for place in places]

    def entries_of(self, slot: int) -> list[SsdEntry]:
        """All blocks of a segment that can be read; none where it is gone. Takes the lock in small steps."""
        with self.lock:
            ordinals = list(self.index.live(slot)) if slot in self.segments else []
        entries: list[SsdEntry] = []
        for start in range(0, len(ordinals), _BATCH):
            with self.lock:
                if slot not in self.segments:
                    return entries
                places = [(slot << ORDINAL_BITS) | ordinal for ordinal in ordinals[start : start + _BATCH]]
                entries += [self.entry(place) for place in places]
        return entries

    def is_there(self, entry: SsdEntry) -> bool:
        """Whether the block can still be read where the entry says; under the lock."""
        segment = self.segments.get(entry.location >> ORDINAL_BITS)
        if segment is None or segment.generation != entry.generation:
            return False
        return self.index.find(entry.namespace, entry.key) == entry.location

    def was_used(self, entry: SsdEntry) -> bool:
        """Whether the block is there and was read since it was written; under the lock."""
        if not self.is_there(entry):
            return False
        blocks, ordinal = self.index.blocks_at(entry.location)
        return bool(blocks.used[ordinal])

    # --- reading ----------------------------------------------------------------------------------------

    def begin_read(self, entries: Sequence[SsdEntry]) -> list[Segment | None]:
        """Keep the blocks' segments as they are until `end_read`; None for blocks that are gone."""
        with self.lock:
            found = [
                self.segments[entry.location >> ORDINAL_BITS] if self.is_there(entry) else None
                for entry in entries
            ]
            for entry, segment in zip(entries, found, strict=True):
                if segment is not None:
                    blocks, ordinal = self.index.blocks_at(entry.location)
                    blocks.used[ordinal] = 1
                    segment.readers += 1
        return found

    def end_read(self, segments: Iterable[Segment | None]) -> None:
        """Those reads are over."""
        with self.lock:
            for segment in segments:
                if segment is not None:
                    segment.readers -= 1
                    if not segment.readers:
                        self.no_readers.notify_all()

    def await_readers(self, segment: Segment) -> None:
        """Wait until nobody reads from a segment, of which no block can be found any more."""
        with self.lock:
            while segment.readers:
                self.no_readers.wait()

    # --- losing -----------------------------------------------------------------------------------------

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Make blocks unreadable at once, and for good as soon as the next group is durable. Those that are
        just being written will not become readable. Returns which there were."""
        found = []
        with self.lock:
            for key in keys:
                name = (namespace, key)
                there = self.index.remove(namespace, key) is not None
                if (ticket := self.in_flight.get(name)) is not None:
                    ticket.cancelled = there = True
                found.append(there)
            wake = self._note_removals(
                (namespace, key) for key, there in zip(keys, found, strict=True) if there
            )
        if wake:
            self.removal_hook()
        return found

    def note_removals(self, names: Iterable[Name]) -> None:
        """Have it written down that blocks of those names, as far as they were written, do not count."""
        with self.lock:
            wake = self._note_removals(names)
        if wake:
            self.removal_hook()

    def _note_removals(self, names: Iterable[Name]) -> bool:
        """True when there were none before. Under the lock."""
        before = len(self.removals)
        self.removals.update(dict.fromkeys(names))
        return not before and bool(self.removals)

    def drop(self, entry: SsdEntry, reason: LostReason) -> None:
        """A block turned out to be bad: forget it, unless it has gone already."""
        with self.lock:
            if not self.is_there(entry):
                return
            self.index.remove(entry.namespace, entry.key)
            wake = self._note_removals([(entry.namespace, entry.key)])
        self._tell([entry], reason)
        if wake:
            self.removal_hook()

    def add_free(self, slot: int) -> None:
        """The file of a slot can be written anew."""
        with self.lock:
            if not self.dead:
                self.free.append(slot)

    def lose_segment(self, segment: Segment, reason: LostReason) -> None:
        """Forget what can still be read of a segment that is written no more, and the segment."""
        entries = self.entries_of(segment.slot)
        for start in range(0, len(entries), _BATCH):
            with self.lock:
                lost = [entry for entry in entries[start : start + _BATCH] if self.is_there(entry)]
                for entry in lost:
                    self.index.remove(entry.namespace, entry.key)
            self._tell(lost, reason)
        with self.lock:
            if self.segments.get(segment.slot) is segment:
                self.index.end(segment.slot)
                del self.segments[segment.slot]

    def lose_all(self) -> None:
        """Forget everything: the device is of no use any more."""
        with self.lock:
            self.dead = True
            self.active = None
            self.free.clear()
            self.removals.clear()
            segments = list(self.segments.values())
        for segment in segments:
            self.lose_segment(segment, LostReason.DEVICE)

    def _tell(self, entries: Sequence[SsdEntry], reason: LostReason) -> None:
        if entries:
            self.counters.lost[reason] += len(entries)
            self.lost(entries, reason)

    # --- checks -----------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless index, segments and slots agree."""
        with self.lock:
            self.index.check_integrity()
            if set(self.index.slots()) != set(self.segments):
                detail = f"index has segments {self.index.slots()}, books {list(self.segments)}"
                raise IntegrityError(what="an SSD device", detail=detail)
            both = set(self.free) & set(self.segments)
            if both or len(set(self.free)) != len(self.free):
                detail = f"slots {both} are free and in use, free are {list(self.free)}"
                raise IntegrityError(what="an SSD device", detail=detail)
            if len(self.segments) + len(self.free) > self.slots_max:
                detail = f"{len(self.segments)} segments and {len(self.free)} free, limit {self.slots_max}"
                raise IntegrityError(what="an SSD device", detail=detail)
            self._check_segments()

    def _check_segments(self) -> None:
        """Blocks lie before the end of their segment, and are not to be removed."""
        for slot, segment in self.segments.items():
            blocks = self.index.blocks_of(slot)
            for ordinal in self.index.live(slot):
                if blocks.offsets[ordinal] + blocks.sizes[ordinal] > segment.end:
                    detail = f"{show_key(blocks.keys[ordinal])} ends after its segment, at {segment.end}"
                    raise IntegrityError(what="an SSD device", detail=detail)
        if self.active is not None and self.segments.get(self.active.slot) is not self.active:
            raise IntegrityError(what="an SSD device", detail=f"active segment {self.active.slot} is unknown")
