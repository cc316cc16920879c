"""What an engine may ask of its node, and how it is answered. No I/O: requests in, replies out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mooncaked.api.protocol import (
    Exists,
    Kind,
    Pin,
    PinnedBlock,
    PinReply,
    PrefixMatch,
    PutAbort,
    PutAbortReply,
    PutBegin,
    PutBeginReply,
    PutCommit,
    PutCommitReply,
    Remove,
    RemoveReply,
    Struct,
    Unpin,
    check_batch,
)
from mooncaked.api.service import answer_exists, answer_prefix_match, check_keys
from mooncaked.errors import InvalidRequest, ProtocolError
from mooncaked.store import Store


class EngineRequests:
    """The requests of one connection. All that they begin and pin belongs to one owner, until `end`."""

    def __init__(self, store: Store, peer: str) -> None:
        self._store = store
        self._peer = peer
        self.owner = store.new_owner()
        self._handlers: dict[Kind, Callable[[Any], Struct | None]] = {
            Kind.PUT_BEGIN: self._put_begin,
            Kind.PUT_COMMIT: self._put_commit,
            Kind.PUT_ABORT: self._put_abort,
            Kind.PIN: self.pin,
            Kind.UNPIN: self._unpin,
            Kind.EXISTS: self._exists,
            Kind.PREFIX_MATCH: self._prefix_match,
            Kind.REMOVE: self._remove,
        }

    def end(self) -> None:
        """Abort all writes and end all pins."""
        self._store.drop_owner(self.owner)

    def answer(self, kind: Kind, request: Struct) -> Struct | None:
        """The reply; None for a frame that has none. Raises `ProtocolError`, which ends the connection, for
        what no engine may send, and other errors, which do not end it."""
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError(peer=self._peer, problem=f"{kind.name} is no request of an engine")
        return handler(request)

    def _put_begin(self, request: PutBegin) -> PutBeginReply:
        check_batch(len(request.items), self._peer)
        return PutBeginReply(slots=self._store.begin_put(self.owner, request.namespace, request.items))

    def _put_commit(self, request: PutCommit) -> PutCommitReply:
        check_batch(len(request.tokens), self._peer)
        return PutCommitReply(stored=self._store.commit(self.owner, request.tokens, request.checksums))

    def _put_abort(self, request: PutAbort) -> PutAbortReply:
        check_batch(len(request.tokens), self._peer)
        return PutAbortReply(aborted=self._store.abort(self.owner, request.tokens))

    def pin(self, request: Pin) -> PinReply:
        """Pin what is here."""
        check_keys(request.namespace, request.keys, self._peer)
        return PinReply(blocks=self._store.pin(self.owner, request.namespace, request.keys))

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
        self._store.unpin(self.owner, [block.pin for block in reply.blocks if block is not None])

    def _unpin(self, request: Unpin) -> None:
        check_batch(len(request.pins), self._peer)
        try:
            self._store.unpin(self.owner, request.pins)
        except InvalidRequest as error:  # there is no reply that could carry it
            raise ProtocolError(peer=self._peer, problem=str(error)) from error

    def _exists(self, request: Exists) -> Struct:
        return answer_exists(self._store, request, self._peer)

    def _prefix_match(self, request: PrefixMatch) -> Struct:
        return answer_prefix_match(self._store, request, self._peer)

    def _remove(self, request: Remove) -> RemoveReply:
        check_keys(request.namespace, request.keys, self._peer)
        return RemoveReply(removed=self._store.remove(request.namespace, request.keys))
