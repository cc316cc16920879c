"""Reads without the daemon: look a key up in the shared index, use the bytes, check that they were its own.

There is no lock. Three arguments make it right, on processors that keep loads and stores in order:

Copies. A value never changes, and its memory becomes another's only after its entry was changed: so when the
entry's `seq` is the same after the copy as before, the bytes are those of the value. And the daemon must
still have been there after the copy, or nobody changed the entry: its end is seen by the end of the
connection.

Views. The id of the block goes into a hazard of the page, and then the entry is looked at once more. The
daemon takes the entry away, goes through a barrier (`mooncaked.fences`), and then looks at the hazards:
either it sees this one and leaves the memory alone, or the second look here sees the entry gone.

Misses. An entry may move while it is searched for, and a value that another client posted may not be listed
yet. So a miss counts only if nothing moved or came meanwhile, and the daemon has obeyed all that was posted
before; otherwise, and where not everything is in the index, the daemon is asked.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

import msgspec
import xxhash

from mooncaked.api import shm
from mooncaked.client.buffers import close_view, copy
from mooncaked.client.mapping import Mapping
from mooncaked.client.shared import Page, SharedWords
from mooncaked.errors import ConnectionLost, MooncakeError

T = TypeVar("T")
_TRIES = 4  # before the daemon is asked
_LATELY_S = 0.02
_MISS, _ASK = -1, -2  # in place of an entry
_STEP, _TAG1, _TAG2 = shm.ENTRY_WORDS, shm.E_TAG1, shm.E_TAG2
_MASK = shm.OFFSET_MASK
_SHIFT = shm.REGION_SHIFT

_hash = xxhash.xxh3_64_intdigest
_unpack = shm.ENTRY.unpack_from


class Found(msgspec.Struct, frozen=True):
    """An entry as it was at one moment."""

    at: int
    seq: int
    view: memoryview
    checksum: int | None
    number: int

    def intact(self) -> bool:
        """Whether the bytes are those that the checksum was made of; no, while it is not known."""
        return self.checksum is not None and _hash(self.view) == self.checksum


class Held(msgspec.Struct, frozen=True):
    """A value that is kept from being taken away."""

    hazard: int
    found: Found
    view: memoryview  # read-only


class Ask:
    """What the index cannot answer."""


ASK = Ask()


class _Own(threading.local):
    """A thread's own way to ask whether a connection has ended; two threads cannot use one at a time."""

    def __init__(self, fileno: int) -> None:
        poll = select.poll()
        poll.register(fileno, select.POLLRDHUP)
        self.poll: Callable[[int], Sequence[object]] = poll.poll


class Direct:
    """Direct reads in one namespace, on the page of one connection. Any thread may use it.

    Every method answers, or says that the daemon must be asked, by `ASK` or None as its type allows; so it
    does for good once the connection has ended."""

    def __init__(
        self, mapping: Mapping, shared: SharedWords, page: Page, namespace: str, fileno: int
    ) -> None:
        """`shared` knows the seeds of the namespace; `fileno` is the connection's."""
        self._mapping = mapping
        self._shared = shared
        self.page = page
        self._seed1, self._seed2 = shared.seeds(namespace)
        self._header, self._entries, self._mask = shared.header, shared.entries, shared.mask
        self._bytes = shared.header.cast("B")[shm.ENTRIES_AT * shm.WORD :]
        self._hazards = list(range(shm.HAZARDS_AT, shm.HAZARDS_AT + shm.HAZARDS))  # free ones
        self._own = _Own(fileno)
        self._ended = False
        self._connected_at_s = float("-inf")

    def end(self) -> None:
        """The connection is about to be closed; its descriptor may then be another file's."""
        self._ended = True

    def connected(self) -> bool:
        """Whether the daemon still holds the connection, and so keeps to what is agreed."""
        return not self._ended and not self._own.poll(0) and not self._ended

    def connected_lately(self) -> bool:
        """As `connected`, as of the last few milliseconds: enough for an answer that protects nothing."""
        now = monotonic()
        if now - self._connected_at_s < _LATELY_S and not self._ended:
            return True
        if not self.connected():
            return False
        self._connected_at_s = now
        return True

    # --- questions -----------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool | None:
        """Whether a key has a value, in as few steps as can be."""
        tag1 = _hash(key, self._seed1)
        at = tag1 & self._mask
        if self._entries[at + _TAG1] != tag1 or self._entries[at + _TAG2] != _hash(key, self._seed2):
            at = self.find(key)
            if at == _ASK:
                return None
        if monotonic() - self._connected_at_s < _LATELY_S and not self._ended:
            return at != _MISS
        return at != _MISS if self.connected_lately() else None

    def exists(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Which keys have a value."""
        entries, mask, seed1, seed2 = self._entries, self._mask, self._seed1, self._seed2
        found: list[bool] = []
        add = found.append
        for key in keys:
            tag1 = _hash(key, seed1)
            at = tag1 & mask
            if entries[at + _TAG1] == tag1 and entries[at + _TAG2] == _hash(key, seed2):
                add(True)
            elif (at := self.find(key)) != _ASK:
                add(at != _MISS)
            else:
                return None
        return found if self.connected_lately() else None

    def prefix_match(self, keys: Sequence[bytes]) -> int | None:
        """How many of `keys` have a value, up to the first that has none."""
        matched = 0
        for key in keys:
            at = self.find(key)
            if at == _ASK:
                return None
            if at == _MISS:
                break
            matched += 1
        return matched if self.connected_lately() else None

    def use(self, key: bytes) -> bool:
        """Whether a key has a value as far as the index knows; if so, it counts as used."""
        at = self.find(key)
        if at >= 0:
            self.page.note(self._entries[at + shm.E_ID])
        return at >= 0

    def listed(self, key: bytes) -> bool:
        """Whether a key was found; not to find it may mean nothing, see `find`."""
        tag1 = _hash(key, self._seed1)
        entries, mask = self._entries, self._mask
        at = tag1 & mask
        while tag := entries[at + _TAG1]:
            if tag == tag1 and entries[at + _TAG2] == _hash(key, self._seed2):
                return True
            at = (at + _STEP) & mask
        return False

    def find(self, key: bytes) -> int:
        """Where the entry of `key` begins, `_MISS` or `_ASK`."""
        return self._search(_hash(key, self._seed1), _hash(key, self._seed2))

    def _search(self, tag1: int, tag2: int) -> int:
        header, entries, mask = self._header, self._entries, self._mask
        for _ in range(_TRIES):
            generation = header[shm.H_GENERATION]
            at = tag1 & mask
            while tag := entries[at + _TAG1]:
                if tag == tag1 and entries[at + _TAG2] == tag2:
                    return at
                at = (at + _STEP) & mask
            # In this order: a value that makes the index incomplete does so before it counts as obeyed.
            if not self._shared.settled() or header[shm.H_FLAGS] & shm.INCOMPLETE:
                return _ASK
            if header[shm.H_GENERATION] == generation and not generation & 1:
                return _MISS
        return _ASK

    def size(self, keys: Sequence[bytes]) -> int:
        """Bytes of the values of `keys`, as far as the index knows."""
        places = [self.find(key) for key in keys]
        return sum(self._entries[at + shm.E_SIZE] for at in places if at >= 0)

    # --- values --------------------------------------------------------------------------------------------

    def look_up(self, key: bytes) -> Found | Ask | None:
        """The entry of a readable value; None is a miss."""
        tags = _hash(key, self._seed1), _hash(key, self._seed2)
        for _ in range(_TRIES):
            at = self._search(*tags)
            if at < 0:
                return None if at == _MISS else ASK
            entry = _unpack(self._bytes, at * shm.WORD)
            seq, tag1, tag2, place, size, checksum, flags, number = entry
            if seq & 1 or (tag1, tag2) != tags or self._entries[at] != seq:
                continue
            if not flags & shm.READY:
                return ASK
            try:
                view = self._mapping.view(place >> _SHIFT, place & _MASK, size)
            except MooncakeError:  # its region has gone since, or the daemon has
                return ASK
            return Found(at, seq, view, checksum if flags & shm.HAS_CHECKSUM else None, number)
        return ASK

    def read(
        self, key: bytes, index: int, take: Callable[[int, memoryview, bytes], T], verify: bool
    ) -> T | Ask | None:
        """What `take`, called with `index` and the bytes, makes of them. It may be called several times, with
        bytes that are not the value's as yet. `verify`: a value is compared with its checksum first. None is
        a miss. To be followed by `connected`."""
        for _ in range(_TRIES):
            found = self.look_up(key)
            if not isinstance(found, Found):
                if found is None:
                    self.page.missed(1)
                return found
            if verify and not found.intact():
                return ASK  # the daemon can tell damage from a value that has just gone
            result = take(index, found.view, b"")
            if self._entries[found.at] == found.seq:
                self.page.note(found.number)
                return result
        return ASK

    def copy_to(self, key: bytes, target: memoryview) -> int | None:
        """Read a value into `target`; its size. As `read` in the plainest case, in as few steps as can be:
        after a large copy nothing is left in the processor's caches, and each step has its price. None: use
        `read`. To be followed by `connected`."""
        entries, tag1 = self._entries, _hash(key, self._seed1)
        at = tag1 & self._mask
        if entries[at + _TAG1] != tag1:
            return None
        entry: tuple[int, ...] = _unpack(self._bytes, at * shm.WORD)
        seq, _, tag2, place, size, _, flags, number = entry
        if (
            seq & 1
            or tag2 != _hash(key, self._seed2)
            or not flags & shm.READY
            or size > len(target)
            or entries[at + _TAG1] != tag1
            or entries[at] != seq
        ):
            return None
        try:
            source = self._mapping.view(place >> _SHIFT, place & _MASK, size)
        except MooncakeError:
            return None
        copy(target if size == len(target) else target[:size], source)
        if entries[at] != seq:
            return None
        self.page.note(number)
        return size

    def hold(self, key: bytes) -> Held | Ask | None:
        """Keep a value from being taken away, until `let_go`. None is a miss."""
        if not self.page.fenced or not self._header[shm.H_FLAGS] & shm.FENCED:
            return ASK
        words = self.page.words
        for _ in range(_TRIES):
            found = self.look_up(key)
            if not isinstance(found, Found):
                if found is None:
                    self.page.missed(1)
                return found if self.connected() else ASK
            try:
                hazard = self._hazards.pop()
            except IndexError:
                return ASK
            words[hazard] = found.number
            if self._entries[found.at] == found.seq and self.connected():
                self.page.note(found.number)
                return Held(hazard, found, found.view.toreadonly())
            self._clear(hazard)
        return ASK

    @contextmanager
    def holding(self, held: Held) -> Iterator[memoryview]:
        """Its view, until it is let go. Raises `ConnectionLost` at the end if the daemon did not keep to
        it."""
        kept = True
        try:
            yield held.view
        finally:
            kept = self.let_go(held)
        if not kept:
            raise ConnectionLost(what="mooncaked", operation="a view", cause="it went away meanwhile")

    def let_go(self, held: Held) -> bool:
        """End `hold`, and the view with it; whether the daemon kept to it until now."""
        close_view(held.view)
        self._clear(held.hazard)
        return self.connected()

    def _clear(self, hazard: int) -> None:
        if not self._ended:  # the page may be a parent's, after a fork
            self.page.words[hazard] = 0
        self._hazards.append(hazard)
