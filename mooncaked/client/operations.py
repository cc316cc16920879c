"""What a client does, free of how it waits: each operation is a generator of steps.

`Client` performs the steps on a blocking socket and `AsyncClient` on an event loop, so that there is one
logic for both. A generator is sent each step's result, or is thrown its error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import xxhash

from mooncaked.api.protocol import (
    BATCH_KEYS_MAX,
    Exists,
    ExistsReply,
    Kind,
    Pin,
    PinnedBlock,
    PinReply,
    PrefixMatch,
    PrefixMatchReply,
    PutAbort,
    PutBegin,
    PutBeginReply,
    PutCommit,
    PutCommitReply,
    PutData,
    PutItem,
    PutSlot,
    Remove,
    RemoveReply,
    Struct,
    Unpin,
)
from mooncaked.client.buffers import copy_in, digest
from mooncaked.client.mapping import Mapping
from mooncaked.errors import ProtocolError
from mooncaked.keys import show_key

log = logging.getLogger(__name__)

CHUNK_KEYS = 1024  # in one exchange: a batch larger than this takes several, so that others get their turn
CHUNK_BYTES = 64 << 20  # being written or read at once, and so not evictable meanwhile

T = TypeVar("T")


class PutResult(StrEnum):
    """What became of one put. All but `STORED` leave what was there before as it was."""

    STORED = "stored"
    EXISTS = "exists"  # the key has a value already; values never change, so it is kept
    BUSY = "busy"  # another writer is about to store the same key
    FULL = "full"  # no room, and nothing that could be evicted
    TOO_LARGE = "too_large"  # larger than the node's pool can hold
    DROPPED = "dropped"  # the node took the room back before the value was complete


class Call(msgspec.Struct, frozen=True):
    """Send a request and wait for its reply."""

    kind: Kind
    body: Struct
    reply: type[Struct]
    undo: Callable[[Any], Undo | None] | None = None  # what to send if nobody waits for the reply any more
    restartable: bool = True  # nothing outstanding depends on this very connection


class Post(msgspec.Struct, frozen=True):
    """Send a frame that has no reply; fails if the connection is gone, and with it the pins it held."""

    kind: Kind
    body: Struct


class Send(msgspec.Struct, frozen=True):
    """Send a frame with a payload, that has no reply; fails as `Post` does. The payload must stay as it is
    until the reply to a later call has come."""

    kind: Kind
    body: Struct
    payload: Sequence[memoryview]


class Undo(msgspec.Struct, frozen=True):
    """Give back what the operation holds. A failure is no matter: the end of the connection does the same."""

    kind: Kind
    body: Struct


class Work(msgspec.Struct, frozen=True):
    """Run a function on the mapped memory of the connection's daemon."""

    run: Callable[[Mapping], Any]
    size: int  # bytes that it moves; decides whether an event loop hands it to a thread


Step: TypeAlias = Call | Post | Send | Undo | Work
Operation: TypeAlias = Generator[Step, Any, T]


class Source(msgspec.Struct, frozen=True):
    """One value to put."""

    item: PutItem
    views: list[memoryview]


class ReadOptions(msgspec.Struct, frozen=True):
    """How to look for keys that the node lacks, and whether to trust its memory."""

    sources: Sequence[str]  # node ids to fetch from, in order
    locate: bool  # ask the conductor's index for more
    deadline_ms: int  # for both together
    verify: bool  # compare each value with its checksum; a damaged one is a miss
    tier: str = ""  # "gpu": give what lies in GPU memory there


class Sink(msgspec.Struct, Generic[T], frozen=True):
    """Where the values of a read go."""

    take: Callable[[int, memoryview, bytes], T]  # index of the key, its bytes while pinned, its metadata
    sizes: Sequence[int] | None = None  # largest size of each value, where known


def _expect(answers: Sequence[object], count: int) -> None:
    """Raise `ProtocolError` when a reply does not answer each of the `count` things asked."""
    if len(answers) != count:
        raise ProtocolError(peer="the daemon", problem=f"{len(answers)} answers to {count} questions")


# --- single exchanges --------------------------------------------------------------------------------


def exists(namespace: str, keys: Sequence[bytes]) -> Operation[list[bool]]:
    """Whether each key has a value on this node."""
    found: list[bool] = []
    for start in range(0, len(keys), BATCH_KEYS_MAX):
        body = Exists(namespace=namespace, keys=list(keys[start : start + BATCH_KEYS_MAX]))
        reply: ExistsReply = yield Call(Kind.EXISTS, body, ExistsReply)
        found += reply.found
    return found


def prefix_match(namespace: str, keys: Sequence[bytes]) -> Operation[int]:
    """How many of `keys`, root first, have a value on this node without a gap."""
    matched = 0
    for start in range(0, len(keys), BATCH_KEYS_MAX):
        chunk = list(keys[start : start + BATCH_KEYS_MAX])
        reply: PrefixMatchReply = yield Call(
            Kind.PREFIX_MATCH, PrefixMatch(namespace=namespace, keys=chunk), PrefixMatchReply
        )
        matched += reply.matched
        if reply.matched < len(chunk):
            break
    return matched


def remove(namespace: str, keys: Sequence[bytes]) -> Operation[list[bool]]:
    """Remove each key; whether it was there and is gone now."""
    removed: list[bool] = []
    for start in range(0, len(keys), CHUNK_KEYS):
        body = Remove(namespace=namespace, keys=list(keys[start : start + CHUNK_KEYS]))
        reply: RemoveReply = yield Call(Kind.REMOVE, body, RemoveReply)
        removed += reply.removed
    return removed


# --- writing -----------------------------------------------------------------------------------------


def put(namespace: str, sources: Sequence[Source]) -> Operation[list[PutResult]]:
    """Store each value; two exchanges per chunk.

    Values of one batch may need each other's room: what was refused while the others were being written is
    tried again once they can be evicted, as long as that makes progress."""
    results = [PutResult.FULL] * len(sources)
    for chunk in chunks([source.item.size for source in sources]):
        todo: list[int] = list(chunk)
        while todo:
            refused = yield from _put_round(namespace, sources, todo, results)
            if len(refused) == len(todo):
                break
            todo = refused
    return results


def _put_round(
    namespace: str, sources: Sequence[Source], todo: Sequence[int], results: list[PutResult]
) -> Operation[list[int]]:
    """Put the values numbered `todo`; returns those for which there was no room."""
    body = PutBegin(namespace=namespace, items=[sources[index].item for index in todo])
    reply: PutBeginReply = yield Call(Kind.PUT_BEGIN, body, PutBeginReply, _undo_begin)
    _expect(reply.slots, len(todo))
    begun: list[tuple[int, PutSlot]] = []
    for index, slot in zip(todo, reply.slots, strict=True):
        if slot.status == "ok":
            begun.append((index, slot))
        else:
            results[index] = PutResult(slot.status)
    if begun:
        yield from _fill_and_commit(sources, begun, results)
    return [index for index in todo if results[index] is PutResult.FULL]


def _fill_and_commit(
    sources: Sequence[Source], begun: Sequence[tuple[int, PutSlot]], results: list[PutResult]
) -> Operation[None]:
    tokens = [slot.token for _, slot in begun]
    try:
        writable = yield Work(lambda mapping: mapping.writable, 0)
        fill = _fill if writable else _send_payloads
        checksums: list[int | None] = yield from fill(sources, begun)
        body = PutCommit(tokens=tokens, checksums=checksums)
        reply: PutCommitReply = yield Call(Kind.PUT_COMMIT, body, PutCommitReply, restartable=False)
        _expect(reply.stored, len(begun))
    except Exception:  # whatever it was, the room goes back and the caller learns of it
        yield Undo(Kind.PUT_ABORT, PutAbort(tokens=tokens))
        raise
    for (index, _), stored in zip(begun, reply.stored, strict=True):
        results[index] = PutResult.STORED if stored else PutResult.DROPPED


def _fill(sources: Sequence[Source], begun: Sequence[tuple[int, PutSlot]]) -> Operation[list[int | None]]:
    """Copy the values to their places; their checksums, see `copy_in`."""

    def fill(mapping: Mapping) -> list[int | None]:
        return [
            copy_in(mapping.view(slot.region, slot.offset, sources[index].item.size), sources[index].views)
            for index, slot in begun
        ]

    checksums: list[int | None] = yield Work(fill, sum(sources[index].item.size for index, _ in begun))
    return checksums


def _send_payloads(
    sources: Sequence[Source], begun: Sequence[tuple[int, PutSlot]]
) -> Operation[list[int | None]]:
    """Send the values, for the daemon to put in place; their checksums."""
    checksums: list[int | None] = []
    for index, slot in begun:
        views = sources[index].views
        size = sources[index].item.size
        checksums.append((yield Work(partial(_digest_of, views), size)))
        yield Send(Kind.PUT_DATA, PutData(token=slot.token), views)
    return checksums


def _digest_of(views: Sequence[memoryview], _mapping: Mapping) -> int:
    return digest(views)


def _undo_begin(reply: PutBeginReply) -> Undo | None:
    tokens = [slot.token for slot in reply.slots if slot.status == "ok"]
    return Undo(Kind.PUT_ABORT, PutAbort(tokens=tokens)) if tokens else None


def chunks(sizes: Sequence[int]) -> Iterator[range]:
    """Cut values of these sizes into runs of at most `CHUNK_KEYS` values and `CHUNK_BYTES` (or one value)."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (total + size > CHUNK_BYTES or index - start == CHUNK_KEYS):
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


# --- reading -----------------------------------------------------------------------------------------


def read(
    namespace: str, keys: Sequence[bytes], options: ReadOptions, sink: Sink[T]
) -> Operation[list[T | None]]:
    """Hand each value that is found to `sink` while it is pinned; one exchange per chunk. None is a miss."""
    results: list[T | None] = []
    for chunk in chunks(sink.sizes or [0] * len(keys)):
        pinned = yield from pin(namespace, keys[chunk.start : chunk.stop], options)
        pins = [block.pin for block in pinned if block is not None]
        if not pins:
            results += [None] * len(pinned)
            continue
        check = keys if options.verify else None
        try:
            results += yield Work(_taker(chunk.start, pinned, sink, check), _total(pinned))
        except Exception:  # e.g. a buffer is too small: the pins end, and the caller learns of it
            yield Undo(Kind.UNPIN, Unpin(pins=pins))
            raise
        # If this fails, the connection may have ended while the bytes were being read, and the pins with it:
        # the error then says that what was read may be wrong.
        yield Post(Kind.UNPIN, Unpin(pins=pins))
    return results


def pin(namespace: str, keys: Sequence[bytes], options: ReadOptions) -> Operation[list[PinnedBlock | None]]:
    """Pin the blocks of `keys`, fetching what is missing; the caller unpins. One exchange."""
    body = Pin(
        namespace=namespace,
        keys=list(keys),
        sources=list(options.sources),
        locate=options.locate,
        deadline_ms=options.deadline_ms,
        tier=options.tier,
    )
    reply: PinReply = yield Call(Kind.PIN, body, PinReply, _undo_pin)
    _expect(reply.blocks, len(keys))
    return reply.blocks


def _undo_pin(reply: PinReply) -> Undo | None:
    pins = [block.pin for block in reply.blocks if block is not None]
    return Undo(Kind.UNPIN, Unpin(pins=pins)) if pins else None


def _taker(
    start: int, pinned: Sequence[PinnedBlock | None], sink: Sink[T], check: Sequence[bytes] | None
) -> Callable[[Mapping], list[T | None]]:
    def take(mapping: Mapping) -> list[T | None]:
        taken: list[T | None] = []
        for index, block in enumerate(pinned, start):
            if block is None:
                taken.append(None)
                continue
            view = mapping.view(block.region, block.offset, block.size).toreadonly()
            damaged = check is not None and not intact(check[index], block.checksum, view)
            taken.append(None if damaged else sink.take(index, view, block.meta))
        return taken

    return take


def intact(key: bytes, checksum: int | None, view: memoryview) -> bool:
    """Whether the bytes match the checksum; logs it when they do not. Without one, they are believed: the
    node has worked out none yet, and so there is none that damage could have been compared with."""
    if checksum is None or xxhash.xxh3_64_intdigest(view) == checksum:
        return True
    log.warning("a stored value is damaged and counts as a miss key=%s size=%d", show_key(key), len(view))
    return False


def _total(pinned: Sequence[PinnedBlock | None]) -> int:
    return sum(block.size for block in pinned if block is not None)
