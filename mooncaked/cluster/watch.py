"""Watching a prefix: the rules of resumption (pure) and an always current view made from the events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import MappingProxyType

import msgspec

from mooncaked.clock import Clock
from mooncaked.cluster.kv import (
    Changes,
    Etcd,
    Event,
    Gap,
    KeyValue,
    Listing,
    Live,
    Snapshot,
    Stalled,
    WatchEvent,
)
from mooncaked.errors import MooncakeError

log = logging.getLogger(__name__)

_PAUSE_S = 0.5  # before a declined watch is tried again; doubles each time, up to
_PAUSE_MAX_S = 10.0


class WatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One message of etcd's watch stream."""

    revision: int  # of the store when it was sent
    cluster_id: int = 0
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0  # with `canceled`: events up to here are gone
    reason: str = ""
    events: list[Event] = []


class Cursor:
    """Where a watch stands. Pure: responses and breaks in, events for the consumer out.

    `next_revision` is the first revision not yet delivered; None asks for a snapshot first. Rules: a break
    resumes at `next_revision`; events below it are repeats and dropped; compaction, a store whose revision
    went back (it was restored or replaced) and another cluster's id each give a `Gap` and a snapshot. It does
    not see that a store was replaced under the same cluster id and has overtaken the old revision meanwhile.
    """

    def __init__(self, next_revision: int | None = None) -> None:
        self.next_revision = next_revision
        self._cluster_id = 0
        self._live = False
        self._breaks = 0

    @property
    def breaks(self) -> int:
        """Failures in a row since the watch was last open."""
        return self._breaks

    def snapshot(self, listing: Listing) -> list[WatchEvent]:
        """A snapshot was read."""
        self.next_revision = listing.revision + 1
        return [Snapshot(listing.revision, listing.items)]

    def broke(self, cause: str) -> list[WatchEvent]:
        """The stream ended or could not be opened. The first time in a row is only a reason to resume."""
        self._breaks += 1
        if self._breaks != 2:
            return []
        self._live = False
        return [Stalled(cause)]

    def take(self, response: WatchResponse) -> list[WatchEvent]:
        """A response came; afterwards `next_revision` may be None, which ends this stream."""
        if response.canceled:
            if response.compact_revision:
                reason = f"revision {self.next_revision} was compacted, up to {response.compact_revision}"
                return self._gap(reason)
            return []
        if response.created:
            return self._opened(response)
        return self._deliver(response)

    def _gap(self, reason: str) -> list[WatchEvent]:
        self.next_revision = None
        return [Gap(reason)]

    def _opened(self, response: WatchResponse) -> list[WatchEvent]:
        known, self._cluster_id = self._cluster_id, response.cluster_id
        if known not in (0, response.cluster_id):
            return self._gap("these endpoints lead to another etcd cluster than before")
        if self.next_revision is not None and response.revision < self.next_revision - 1:
            seen = self.next_revision - 1
            return self._gap(f"etcd's revision went back from {seen} to {response.revision}")
        was_live, self._live, self._breaks = self._live, True, 0
        return [] if was_live else [Live(response.revision)]

    def _deliver(self, response: WatchResponse) -> list[WatchEvent]:
        first = self.next_revision or 0
        events = [event for event in response.events if event.mod_revision >= first]
        last = max((event.mod_revision for event in events), default=0)
        # Without events it is a progress notice: all up to its revision has been delivered.
        reached = response.revision if not response.events else last
        self.next_revision = max(first, reached + 1)
        return [Changes(last, events)] if events else []


# --- the view ------------------------------------------------------------------------------------------


class View(msgspec.Struct, frozen=True):
    """What a prefix holds, as last seen."""

    revision: int = 0
    items: Mapping[str, KeyValue] = MappingProxyType({})
    complete: bool = False  # a snapshot has been seen
    connected: bool = False  # nothing is known to be missing; False: this is how it was before
    cause: str = "not yet connected"  # why it is not connected


def fold(view: View, event: WatchEvent) -> View:
    """The view after `event`."""
    match event:
        case Snapshot():
            items = MappingProxyType({kv.key: kv for kv in event.items})
            return View(event.revision, items, complete=True, connected=True, cause="")
        case Changes():
            changed = dict(view.items)
            for change in event.events:
                if change.value is None:
                    changed.pop(change.key, None)
                else:
                    changed[change.key] = change.value
            return View(event.revision, MappingProxyType(changed), view.complete, True, "")
        case Live():
            # Its revision may be ahead of events that are still to come, so the view's stays.
            return View(view.revision, view.items, view.complete, True, "")
        case Stalled():
            return View(view.revision, view.items, view.complete, False, event.cause)
        case Gap():
            return view  # a snapshot follows


async def watch_prefix(etcd: Etcd, prefix: str, clock: Clock) -> AsyncGenerator[View, None]:
    """Yield the view of `prefix` whenever it changes, or whether it is current changes.

    Never ends and never raises: a watch that etcd declines (for lack of rights, say) leaves the last view,
    marked as not connected, and is tried again. Close it (`contextlib.aclosing`) to leave early."""
    view = View()
    pause_s = _PAUSE_S
    while True:
        try:
            async with aclosing(etcd.watch(prefix)) as events:
                async for event in events:
                    view, pause_s = fold(view, event), _PAUSE_S
                    yield view
            cause = "the session is closed"
        except MooncakeError as error:
            cause = str(error)
            if view.connected or view.cause != cause:
                log.warning("watch declined prefix=%s cause=%s", prefix, cause)
        view = fold(view, Stalled(cause))
        yield view
        await clock.sleep(pause_s)
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
