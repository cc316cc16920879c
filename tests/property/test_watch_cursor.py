"""Whatever breaks, repeats and lags: a cursor delivers each event once and in order, or says that it cannot.

The model of etcd: a history of revisions, a stream that may end after any response, members that may lag or
send old events again, compaction, and a store that may be replaced by one whose revision is lower.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncaked.cluster.kv import Changes, Event, Gap, KeyValue, Listing, Live, Snapshot, Stalled, WatchEvent
from mooncaked.cluster.watch import Cursor, View, WatchResponse, fold


class CursorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cursor = Cursor()
        self.history: list[Event] = []
        self.revision = 1
        self.compacted = 0
        self.cluster_id = 1
        self.open = False
        self.sent = 0  # last revision that the open stream has sent
        self.view = View()
        self.start = 0  # revision of the last snapshot
        self.delivered: list[int] = []  # revisions of events since then

    # --- etcd ------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self._snapshot()

    @rule(
        keys=st.sets(st.sampled_from("abcd"), min_size=1, max_size=3),
        delete=st.booleans(),
        times=st.integers(1, 4),
    )
    def write(self, keys: set[str], delete: bool, times: int) -> None:
        for _ in range(times):
            self.revision += 1
            for key in sorted(keys):
                value = None if delete else KeyValue(key, str(self.revision).encode(), 1, self.revision)
                self.history.append(Event(key, value, self.revision))

    @rule()
    def write_elsewhere(self) -> None:
        self.revision += 1

    @rule(kept=st.integers(0, 12))
    def compact(self, kept: int) -> None:
        self.compacted = max(self.compacted, self.revision - kept)

    @rule(ahead=st.integers(0, 5))
    def replace(self, ahead: int) -> None:
        """By another cluster, whose revision may be higher."""
        self._break()
        self.history, self.compacted = [], 0
        self.revision += ahead
        self.cluster_id += 1

    @rule()
    def lose_all_data(self) -> None:
        """And keep the cluster's id. Only a revision that went back tells, so connect before it has grown."""
        self._break()
        self.history, self.revision, self.compacted = [], 1, 0
        self.connect()

    # --- the stream ------------------------------------------------------------------------------------

    @precondition(lambda self: not self.open)
    @rule()
    def connect(self) -> None:
        first = self.cursor.next_revision
        assert first is not None
        self._take(WatchResponse(revision=self.revision, cluster_id=self.cluster_id, created=True))
        if self.cursor.next_revision != first:
            return  # a gap, and a new snapshot
        if first <= self.compacted:
            self._take(WatchResponse(revision=self.revision, canceled=True, compact_revision=self.compacted))
            return
        self.open, self.sent = True, first - 1

    @precondition(lambda self: self.open)
    @rule(count=st.integers(1, 3), again=st.integers(0, 2))
    def receive(self, count: int, again: int) -> None:
        """The next few revisions, after some that were sent before already."""
        revisions = sorted({event.mod_revision for event in self.history})
        old = [revision for revision in revisions if revision <= self.sent][-again:] if again else []
        new = [revision for revision in revisions if revision > self.sent][:count]
        if not new:
            return
        chosen = {*old, *new}
        events = [event for event in self.history if event.mod_revision in chosen]
        self.sent = max(new)
        self._take(WatchResponse(revision=self.revision, events=events))

    @precondition(lambda self: self.open)
    @rule(again=st.integers(0, 2))
    def write_and_receive(self, again: int) -> None:
        self.write({"b"}, delete=False, times=2)
        self.receive(1, again)

    @precondition(lambda self: self.open)
    @rule()
    def progress(self) -> None:
        """etcd sends it only when it has sent everything."""
        if all(event.mod_revision <= self.sent for event in self.history):
            self._take(WatchResponse(revision=self.revision))

    @rule(times=st.integers(1, 3))
    def break_off(self, times: int) -> None:
        for _ in range(times):
            self._break()

    # --- the consumer ----------------------------------------------------------------------------------

    def _break(self) -> None:
        self.open = False
        for event in self.cursor.broke("gone"):
            self._consume(event)

    def _take(self, response: WatchResponse) -> None:
        for event in self.cursor.take(response):
            self._consume(event)
        if self.cursor.next_revision is None:
            self.open = False
            self._snapshot()

    def _snapshot(self) -> None:
        held: dict[str, KeyValue] = {}
        for event in self.history:
            if event.value is None:
                held.pop(event.key, None)
            else:
                held[event.key] = event.value
        for snapshot in self.cursor.snapshot(Listing(self.revision, list(held.values()))):
            self._consume(snapshot)

    def _consume(self, event: WatchEvent) -> None:
        assert isinstance(event, Snapshot | Changes | Gap | Stalled | Live)
        self.view = fold(self.view, event)
        if isinstance(event, Snapshot):
            self.delivered = []
            self.start = event.revision
        if isinstance(event, Changes):
            assert event.events, "never an empty change"
            self.delivered += [change.mod_revision for change in event.events]

    @invariant()
    def each_once_and_in_order(self) -> None:
        if self.open:
            revisions = [event.mod_revision for event in self.history]
            assert self.delivered == [r for r in revisions if self.start < r <= max(self.sent, self.start)]

    @invariant()
    def the_view_is_the_store_as_of_what_was_delivered(self) -> None:
        if not self.open:
            return
        held: dict[str, KeyValue] = {}
        for event in self.history:
            if event.mod_revision <= max(self.sent, self.start):
                if event.value is None:
                    held.pop(event.key, None)
                else:
                    held[event.key] = event.value
        assert dict(self.view.items) == held


TestCursor = CursorMachine.TestCase
TestCursor.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
