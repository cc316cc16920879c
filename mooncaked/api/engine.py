"""What an engine may ask of its node, and how it is answered. No I/O: requests in, replies out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from mooncaked.api.gpu_pins import GpuPins
from mooncaked.api.protocol import (
    Exists,
    ExistsReply,
    Kind,
    Open,
    OpenReply,
    Pin,
    PinnedBlock,
    PinReply,
    PrefixMatch,
    PrefixMatchReply,
    PutAbort,
    PutAbortReply,
    PutBegin,
    PutBeginReply,
    PutCommit,
    PutCommitReply,
    PutData,
    PutItem,
    PutSlot,
    PutStored,
    Remove,
    RemoveReply,
    Reserve,
    ReserveReply,
    Struct,
    Unpin,
    check_batch,
)
from mooncaked.api.service import answer_exists, answer_prefix_match, check_keys
from mooncaked.errors import InvalidKey, InvalidRequest, ProtocolError
from mooncaked.keys import check_namespace
from mooncaked.pools.shared_index import SharedIndex
from mooncaked.store import Store
from mooncaked.tiers.gpus import Gpus


class EngineRequests:
    """The requests of one connection. All that they begin and pin belongs to one owner, until `end`."""

    def __init__(
        self, store: Store, peer: str, index: SharedIndex | None = None, gpus: Gpus | None = None
    ) -> None:
        """`index` is what the client reads through, if it does."""
        self._store = store
        self._peer = peer
        self._index = index
        self._gpus = None if gpus is None else GpuPins(gpus)
        self.owner = store.new_owner()
        self.reserved: set[int] = set()  # tokens
        self._begun: dict[int, tuple[PutSlot, int]] = {}  # by token: where, and bytes
        self._handlers: dict[Kind, Callable[[Any], Struct | None]] = {
            Kind.PUT_BEGIN: self._put_begin,
            Kind.PUT_COMMIT: self._put_commit,
            Kind.PUT_ABORT: self._put_abort,
            Kind.PIN: self.pin,
            Kind.UNPIN: self._unpin,
            Kind.EXISTS: self._exists,
            Kind.PREFIX_MATCH: self._prefix_match,
            Kind.REMOVE: self._remove,
            Kind.OPEN: self._open,
            Kind.RESERVE: self._reserve,
            Kind.PUT_STORED: self._put_stored,
        }

    def end(self) -> None:
        """Abort all writes and end all pins."""
        self._store.drop_owner(self.owner)
        if self._gpus is not None:
            self._gpus.end()

    def answer(self, kind: Kind, request: Struct) -> Struct | None:
        """The reply; None for a frame that has none. Raises `ProtocolError`, which ends the connection, for
        what no engine may send, and other errors, which do not end it."""
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(peer=self._peer, problem=f"{kind.name} is no request of an engine")
        return handler(request)

    def _put_begin(self, request: PutBegin) -> PutBeginReply:
        check_batch(len(request.items), self._peer)
        slots = self._begin(request.namespace, request.items)
        for slot, item in zip(slots, request.items, strict=True):
            if slot.status == "ok":
                self._begun[slot.token] = (slot, item.size)
        return PutBeginReply(slots=slots)

    def _begin(self, namespace: str, items: Sequence[PutItem]) -> list[PutSlot]:
        slots = self._store.begin_put(self.owner, namespace, items)
        refused = [n for n, slot in enumerate(slots) if slot.status == "full"]
        if refused:
            self._store.look_after()  # what was in the way may be what nobody looks at any more
            again = self._store.begin_put(self.owner, namespace, [items[n] for n in refused])
            for n, slot in zip(refused, again, strict=True):
                slots[n] = slot
        return slots

    def place(self, request: PutData, size: int) -> memoryview:
        """Where the `size` bytes that follow the request belong; raises `ProtocolError` when nothing of that
        size was begun under its token."""
        slot, expected = self._begun.get(request.token, (None, -1))
        if slot is None or size != expected:
            problem = f"{size} bytes came for the write {request.token}, which takes {max(0, expected)}"
            raise ProtocolError(peer=self._peer, problem=problem)
        return self._store.view(slot.region, slot.offset, size)

    def _put_commit(self, request: PutCommit) -> PutCommitReply:
        check_batch(len(request.tokens), self._peer)
        stored = self._store.commit(self.owner, request.tokens, request.checksums)
        self._ended(request.tokens)
        return PutCommitReply(stored=stored)

    def _put_abort(self, request: PutAbort) -> PutAbortReply:
        check_batch(len(request.tokens), self._peer)
        aborted = self._store.abort(self.owner, request.tokens)
        self._ended(request.tokens)
        return PutAbortReply(aborted=aborted)

    def _ended(self, tokens: Sequence[int]) -> None:
        self.reserved.difference_update(tokens)
        for token in tokens:
            self._begun.pop(token, None)

    def _open(self, request: Open) -> OpenReply:
        if self._index is None:
            raise InvalidRequest(problem="this connection did not ask for the shared index")
        seed1, seed2 = self._index.seeds(check_namespace(request.namespace))
        return OpenReply(seed1=seed1, seed2=seed2)

    def _reserve(self, request: Reserve) -> ReserveReply:
        check_batch(len(request.sizes), self._peer)
        slots = self._store.reserve(self.owner, request.sizes)
        self.reserved.update(slot.token for slot in slots if slot.status == "ok")
        return ReserveReply(slots=slots)

    def _put_stored(self, request: PutStored) -> None:
        check_batch(len(request.items), self._peer)
        try:
            self._store.put_reserved(self.owner, request.namespace, request.items)
        except (InvalidRequest, InvalidKey) as error:  # there is no reply that could carry it
            raise ProtocolError(peer=self._peer, problem=str(error)) from error
        self.reserved.difference_update([item.token for item in request.items])

    def take_back(self) -> None:
        """End the reservations."""
        self._store.abort(self.owner, list(self.reserved))
        self.reserved.clear()

    def pin(self, request: Pin) -> PinReply:
        """Pin what is here."""
        check_keys(request.namespace, request.keys, self._peer)
        if request.tier not in ("", "gpu"):
            raise InvalidRequest(problem=f'blocks are pinned in "" or "gpu", not in {request.tier!r}')
        blocks = self._store.pin(self.owner, request.namespace, request.keys)
        if self._gpus is not None and request.tier:
            blocks = self._pin_above(self._gpus, request, blocks)
        return PinReply(blocks=blocks)

    def _pin_above(
        self, gpus: GpuPins, request: Pin, here: list[PinnedBlock | None]
    ) -> list[PinnedBlock | None]:
        """Pins of copies in GPU memory in the place of those `here`, for the blocks that have one."""
        keys = [key for key, block in zip(request.keys, here, strict=True) if block is not None]
        spare = [block.pin for block in here if block is not None]
        try:
            above = iter(gpus.lookup(request.namespace, keys))
            found = [block and (next(above) or block) for block in here]
            spare = [old.pin for old, new in zip(here, found, strict=True) if old and new is not old]
            return found
        finally:
            self._store.unpin(self.owner, spare)

    def pin_fetched(self, request: Pin, first: PinReply, sources: Mapping[bytes, str]) -> PinReply:
        """Pin also what has come since `first`; `sources` says from which node."""
        missing = [key for key, block in zip(request.keys, first.blocks, strict=True) if block is None]
        second = iter(self._store.pin(self.owner, request.namespace, missing, count=False))

        def merge(key: bytes, block: PinnedBlock | None) -> PinnedBlock | None:
            if block is not None or (new := next(second)) is None:
                return block
            return msgspec.structs.replace(new, source=sources.get(key, ""))

        return PinReply(blocks=[merge(*pair) for pair in zip(request.keys, first.blocks, strict=True)])

    def unpin_reply(self, reply: PinReply) -> None:
        """End the pins of a reply that nobody will get."""
        self._end_pins([block.pin for block in reply.blocks if block is not None])

    def _end_pins(self, pins: Sequence[int]) -> None:
        if self._gpus is not None and pins and min(pins) < 0:
            self._gpus.unpin([pin for pin in pins if pin < 0])
            pins = [pin for pin in pins if pin >= 0]
        self._store.unpin(self.owner, pins)

    def _unpin(self, request: Unpin) -> None:
        check_batch(len(request.pins), self._peer)
        try:
            self._end_pins(request.pins)
        except InvalidRequest as error:  # there is no reply that could carry it
            raise ProtocolError(peer=self._peer, problem=str(error)) from error

    def _exists(self, request: Exists) -> Struct:
        return answer_exists(self._store, request, self._peer)

    def _prefix_match(self, request: PrefixMatch) -> Struct:
        return answer_prefix_match(self._store, request, self._peer)

    def _remove(self, request: Remove) -> RemoveReply:
        check_keys(request.namespace, request.keys, self._peer)
        return RemoveReply(removed=self._store.remove(request.namespace, request.keys))


def lacks(request: Struct, reply: Struct | None) -> bool:
    """Whether the reply says that something is not here."""
    if isinstance(reply, PinReply):
        return None in reply.blocks
    if isinstance(reply, ExistsReply):
        return False in reply.found
    if isinstance(request, PrefixMatch) and isinstance(reply, PrefixMatchReply):
        return reply.matched < len(request.keys)
    return False
