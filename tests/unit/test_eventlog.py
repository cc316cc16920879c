"""The numbered ring of events."""

from __future__ import annotations

import pytest

from mooncaked.eventlog import EventLog


def log_of(count: int, limit: int = 4) -> EventLog[int]:
    """A log whose event number n is n."""
    log: EventLog[int] = EventLog(limit)
    for number in range(1, count + 1):
        log.append(number)
    log.check_integrity()
    return log


@pytest.mark.parametrize("count", range(10))
def test_events_after_a_number_come_in_order_or_not_at_all(count: int) -> None:
    log = log_of(count)
    assert log.sequence == count
    for since in range(count + 1):
        kept = count - since <= 4
        assert log.since(since, 100) == (list(range(since + 1, count + 1)) if kept else None)


def test_a_reader_may_take_them_in_parts() -> None:
    log = log_of(7)
    assert log.since(3, 3) == [4, 5, 6]
    assert log.since(6, 3) == [7]
    assert log.since(3, 0) == []


@pytest.mark.parametrize("since", [-1, 8, 1 << 40])
def test_a_number_that_the_log_never_gave_is_a_gap(since: int) -> None:
    assert log_of(7).since(since, 10) is None


def test_after_a_cut_everybody_needs_a_snapshot() -> None:
    log: EventLog[int] = EventLog(4)
    log.append(1)
    log.cut(2)
    assert log.since(1, 10) is None
    assert log.since(2, 10) == []
    log.append(3)
    assert log.since(2, 10) == [3]
    log.check_integrity()
