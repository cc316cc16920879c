"""A transport without a network: nodes are dictionaries, and misbehave as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import xxhash

from mooncaked.api.protocol import FETCH_BYTES_TARGET, FetchedBlock
from mooncaked.clock import Deadline
from mooncaked.errors import ConnectionLost, DeadlineExceeded, Unreachable
from mooncaked.transports.base import Outcome, Place


class FakeTransport:
    """`Transport` over `nodes`: values by (namespace, key), by address."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[tuple[str, bytes], bytes]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()  # keys whose bytes change on the way
        self.breaks_after: dict[str, int] = {}  # by address: the connection breaks after so many blocks
        self.gate = threading.Event()  # fetches wait for it, up to their deadline
        self.gate.set()
        self.calls: list[tuple[str, list[bytes]]] = []
        self.waiting = threading.Event()  # a fetch has come as far as the gate
        self._closed = False

    def fetch(
        self, address: str, namespace: str, keys: Sequence[bytes], place: Place, deadline: Deadline
    ) -> Outcome:
        """See `Transport.fetch`."""
        self.calls.append((address, list(keys)))
        self.waiting.set()
        if self._closed or address not in self.nodes:
            return Outcome([], Unreachable(what="the node", address=address, cause="no route", remedy=""))
        if not self.gate.wait(deadline.left()) or deadline.passed():
            return Outcome([], DeadlineExceeded(operation="a fetch", limit_ms=round(deadline.limit_s * 1000)))
        values = self._answer(self.nodes[address], namespace, keys)
        blocks = [
            None if value is None else self._describe(key, value)
            for key, value in zip(keys, values, strict=False)
        ]
        return self._land(address, keys, values, blocks, place(blocks))

    def _answer(
        self, node: dict[tuple[str, bytes], bytes], namespace: str, keys: Sequence[bytes]
    ) -> list[bytes | None]:
        values: list[bytes | None] = []
        total = 0
        for key in keys:
            value = node.get((namespace, key))
            total += len(value or b"")
            if values and total > FETCH_BYTES_TARGET:
                break
            values.append(value)
        return values

    def _describe(self, key: bytes, value: bytes) -> FetchedBlock:
        return FetchedBlock(
            size=len(value), checksum=xxhash.xxh3_64_intdigest(value), parent=self.parents.get(key)
        )

    def _land(
        self,
        address: str,
        keys: Sequence[bytes],
        values: Sequence[bytes | None],
        blocks: Sequence[FetchedBlock | None],
        views: Sequence[memoryview | None],
    ) -> Outcome:
        landed = [False] * len(values)
        limit = self.breaks_after.get(address, len(values))
        for index, (value, view) in enumerate(zip(values, views, strict=True)):
            if index >= limit:
                lost = ConnectionLost(what=address, operation="a fetch", cause="it broke")
                return Outcome(landed, lost)
            block = blocks[index]
            if value is None or view is None or block is None:
                continue
            view[:] = value if keys[index] not in self.damaged else bytes([value[0] ^ 1]) + value[1:]
            landed[index] = xxhash.xxh3_64_intdigest(view) == block.checksum
        return Outcome(landed)

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self.gate.set()
