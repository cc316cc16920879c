"""The daemon's side of the shared index: follows the store, and writes what clients look up without asking.

See `mooncaked.api.shm` for the layout. One writer: its methods are called under the store's lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
from contextlib import suppress

import xxhash

from mooncaked import fences
from mooncaked.api import shm
from mooncaked.block import Block
from mooncaked.errors import IntegrityError

_TAG1, _TAG2, _ID = shm.E_TAG1, shm.E_TAG2, shm.E_ID
_STEP = shm.ENTRY_WORDS
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in the fcntl module
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FIELDS = struct.Struct("5Q")  # of an entry, from its place on
_SEEDS = struct.Struct("2Q")
_SEEDS_KEPT = 4096

_hash = xxhash.xxh3_64_intdigest


class SharedIndex:
    """An index of `entries` entries (a power of two). Clients get `fd`, through which nobody can write.

    Blocks beyond what it can hold are not in it; it says so, and clients then ask for what they do not
    find."""

    def __init__(self, entries: int, epoch: int, *, fenced: bool | None = None) -> None:
        """`fenced`: whether hazards are looked at; None: if the kernel can do what that needs."""
        if entries & (entries - 1) or not _STEP <= entries <= shm.ENTRIES_MAX:
            raise IntegrityError(what="the shared index", detail=f"{entries} entries are no power of two")
        self.size = shm.index_bytes(entries)
        self.fenced = fences.can_fence() if fenced is None else fenced
        self._map, self.fd = _make_memory(self.size)
        self._words = memoryview(self._map).cast("Q")
        self._entries = self._words[shm.ENTRIES_AT :]
        self._bytes = memoryview(self._map)[shm.ENTRIES_AT * shm.WORD :]
        self.applied = self._words[shm.APPLIED_AT : shm.ENTRIES_AT]  # per connection; written by its session
        self._mask = (entries - 1) * _STEP
        self._limit = int(entries * shm.FILL_MAX)
        self._ids: dict[Block, int] = {}  # of blocks in the index, or waiting for their readers
        self._blocks: dict[int, Block] = {}  # the same, by id
        self._gone: set[Block] = set()  # those that wait
        self._last_id = 0
        self._used = 0
        self._elsewhere = False  # there are readable keys that no `stored` tells of
        self._secret = secrets.token_bytes(32)
        self._seeds: dict[str, tuple[int, int]] = {}
        header = (shm.MAGIC, shm.VERSION, epoch, entries, shm.FENCED if self.fenced else 0, 0, 0)
        for word, value in enumerate(header):
            self._words[word] = value
        self._unlisted: set[Block] = set()  # readable, and not in the index

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last who looks at it."""
        os.close(self.fd)

    # --- what the store tells ------------------------------------------------------------------------------

    def stored(self, block: Block) -> None:
        """List a block, which can be found at once."""
        tag1, tag2 = self._tags(block)
        if self._used >= self._limit or not tag1:
            self._unlisted.add(block)
            self._set_flags()
            return
        entries, at = self._entries, tag1 & self._mask
        while entries[at + _TAG1]:
            at = (at + _STEP) & self._mask
        self._last_id += 1
        self._ids[block] = self._last_id
        self._blocks[self._last_id] = block
        self._used += 1
        seq = entries[at] + 1
        entries[at] = seq
        fields = (block.region << shm.REGION_SHIFT | block.offset, block.size)
        _FIELDS.pack_into(self._bytes, (at + shm.E_PLACE) * shm.WORD, *fields, *_state(block), self._last_id)
        entries[at + _TAG2] = tag2
        entries[at + _TAG1] = tag1
        entries[at] = seq + 1
        self._words[shm.H_GENERATION] += 2

    def verified(self, block: Block) -> None:
        """A block has a checksum now, or may be read now."""
        if block not in self._ids or block in self._gone:
            return
        at = self._find(block)
        entries = self._entries
        seq = entries[at] + 1
        entries[at] = seq
        entries[at + shm.E_CHECKSUM], entries[at + shm.E_FLAGS] = _state(block)
        entries[at] = seq + 1

    def removed(self, block: Block) -> None:
        """Take a block out. It keeps its id until `forget`."""
        if block not in self._ids:
            self._unlisted.discard(block)
            self._set_flags()
            return
        hole = self._find(block)
        self._gone.add(block)
        self._used -= 1
        if self._entries[((hole + _STEP) & self._mask) + _TAG1]:
            self._words[shm.H_GENERATION] |= 1  # from here on a search may end too early
        self._empty(hole)
        self._close_gap(hole)

    def flush(self) -> None:
        """The end of a change: each was visible at once."""

    # --- what others ask -----------------------------------------------------------------------------------

    def seeds(self, namespace: str) -> tuple[int, int]:
        """The seeds of `tag1` and `tag2` in a namespace: equal for a life of the daemon, and secret."""
        found = self._seeds.get(namespace)
        if found is None:
            digest = hashlib.blake2b(namespace.encode(), key=self._secret, digest_size=_SEEDS.size).digest()
            if len(self._seeds) >= _SEEDS_KEPT:
                self._seeds.clear()
            first, second = _SEEDS.unpack(digest)
            found = self._seeds[namespace] = (first, second)
        return found

    def id_of(self, block: Block) -> int:
        """What names a block in hazards and notes; 0 if it is not, and was not, in the index."""
        return self._ids.get(block, 0)

    def block_of(self, number: int) -> Block | None:
        """The block that is or was listed under an id."""
        return self._blocks.get(number)

    def forget(self, block: Block) -> None:
        """Nobody looks at a removed block any more."""
        if block in self._gone:
            self._gone.discard(block)
            del self._blocks[self._ids.pop(block)]

    def set_elsewhere(self, elsewhere: bool) -> None:
        """Whether there may be values of this node that the store's blocks do not tell of, e.g. in a lower
        tier: then a key that is not in the index may exist all the same."""
        self._elsewhere = elsewhere
        self._set_flags()

    def set_connections(self, count: int) -> None:
        """How many words of `applied` are in use."""
        self._words[shm.H_CONNECTIONS] = count

    def __len__(self) -> int:
        return self._used

    @property
    def entries(self) -> int:
        """How many there are, full or empty."""
        return self._mask // _STEP + 1

    @property
    def unlisted(self) -> int:
        """Readable blocks for which the index had no entry left."""
        return len(self._unlisted)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless each listed block is found. O(entries)."""
        full = sum(1 for at in range(0, len(self._entries), _STEP) if self._entries[at + _TAG1])
        listed = self._ids.keys() - self._gone
        if not full == self._used == len(listed) or len(self._ids) != len(self._blocks):
            detail = f"{full} entries are full, {self._used} counted, {len(listed)} blocks listed"
            raise IntegrityError(what="the shared index", detail=detail)
        for block in listed:
            self._find(block)
        odd = any(self._entries[at] & 1 for at in range(0, len(self._entries), _STEP))
        if odd or self._words[shm.H_GENERATION] & 1:
            raise IntegrityError(what="the shared index", detail="a change was not ended")

    # --- internals -----------------------------------------------------------------------------------------

    def _tags(self, block: Block) -> tuple[int, int]:
        seed1, seed2 = self._seeds.get(block.namespace) or self.seeds(block.namespace)
        return _hash(block.key, seed1), _hash(block.key, seed2)

    def _find(self, block: Block) -> int:
        """Word at which the entry of a listed block begins."""
        entries, number = self._entries, self._ids[block]
        at = _hash(block.key, self.seeds(block.namespace)[0]) & self._mask
        while entries[at + _ID] != number:
            if not entries[at + _TAG1]:
                raise IntegrityError(what="the shared index", detail=f"{block!r} is not where it belongs")
            at = (at + _STEP) & self._mask
        return at

    def _empty(self, at: int) -> None:
        entries = self._entries
        seq = entries[at] + 1
        entries[at] = seq
        entries[at + _TAG1] = 0
        entries[at + _TAG2] = 0
        entries[at + _ID] = 0
        entries[at] = seq + 1

    def _close_gap(self, hole: int) -> None:
        """Move entries after `hole` that belong at it or before it, so that no search ends too early."""
        entries, mask, words = self._entries, self._mask, self._words
        at = hole
        while tag1 := entries[(at := (at + _STEP) & mask) + _TAG1]:
            if (at - (tag1 & mask)) & mask < (at - hole) & mask:
                continue  # it does not belong before its place
            self._move(at, hole)
            hole = at
        words[shm.H_GENERATION] += words[shm.H_GENERATION] & 1

    def _move(self, source: int, target: int) -> None:
        entries = self._entries
        seq = entries[target] + 1
        entries[target] = seq
        start, end = source + shm.E_PLACE, source + _STEP
        entries[target + shm.E_PLACE : target + _STEP] = entries[start:end]
        entries[target + _TAG2] = entries[source + _TAG2]
        entries[target + _TAG1] = entries[source + _TAG1]
        entries[target] = seq + 1
        self._empty(source)

    def _set_flags(self) -> None:
        flags = shm.FENCED if self.fenced else 0
        if self._unlisted or self._elsewhere:
            flags |= shm.INCOMPLETE
        self._words[shm.H_FLAGS] = flags


def _state(block: Block) -> tuple[int, int]:
    """Checksum and flags of an entry."""
    flags = 0 if block.unverified else shm.READY
    if block.meta:
        flags |= shm.HAS_META
    if block.checksum is None:
        return 0, flags
    return block.checksum, flags | shm.HAS_CHECKSUM


def _make_memory(size: int) -> tuple[mmap.mmap, int]:
    """New memory, mapped writable here, and a descriptor of it through which nobody can write any more."""
    fd = os.memfd_create("mooncaked-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        with suppress(OSError):  # fewer TLB misses where the kernel has huge pages for shared memory
            memory.madvise(mmap.MADV_HUGEPAGE)
        os.fchmod(fd, 0o444)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        with suppress(OSError):  # an older kernel; the mode keeps other users out
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        return memory, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)
