"""Telling a conductor which blocks a node has: everything once, then each change by its number."""

from __future__ import annotations

from collections.abc import Callable

from mooncaked.api.protocol import Delta, Kind, Snapshot, Struct, Subscribe, SubscribeReply
from mooncaked.store import Store

FRAME_BLOCKS = 4096  # events in one frame
HEARTBEAT_S = 1.0

Send = Callable[[Kind, Struct, bool], None]  # kind, body, whether it is the reply to the request


class Feed:
    """One subscription, sent from the thread of its connection."""

    def __init__(self, store: Store, send: Send, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._store = store
        self._send = send
        self._heartbeat_s = heartbeat_s

    def run(self, request: Subscribe, stopped: Callable[[], bool]) -> None:
        """Send until `stopped`, or until the subscriber is too far behind for deltas: it then has to
        subscribe again, and gets a snapshot. Raises what `send` does when the connection ends."""
        resumed = (
            request.epoch == self._store.epoch and self._store.events_since(request.sequence, 1) is not None
        )
        self._send(Kind.SUBSCRIBE, SubscribeReply(epoch=self._store.epoch, resumed=resumed), True)
        sequence = request.sequence if resumed else self._send_snapshot()
        while not stopped():
            self._store.wait_events(sequence, self._heartbeat_s)
            events = self._store.events_since(sequence, FRAME_BLOCKS)
            if events is None:
                return
            self._send(Kind.DELTA, Delta(sequence=sequence + 1, events=events), False)
            sequence += len(events)

    def _send_snapshot(self) -> int:
        sequence, blocks = self._store.snapshot()
        starts = range(0, len(blocks), FRAME_BLOCKS) or range(1)  # an empty snapshot is one frame too
        for start in starts:
            part = blocks[start : start + FRAME_BLOCKS]
            last = start == starts[-1]
            self._send(Kind.SNAPSHOT, Snapshot(sequence=sequence, blocks=part, last=last), False)
        return sequence
