"""The rules of the control plane that need no etcd: what an error means, what comes next, who leads."""

from __future__ import annotations

import random

import grpc
import msgspec
import pytest

from mooncaked.cluster import keys
from mooncaked.cluster._convert import prefix_end, raw, text
from mooncaked.cluster._rpc import Failure, Ring, classify, connect_problem, to_error
from mooncaked.cluster.kv import Changes, Event, Gap, KeyValue, Live, Snapshot, Stalled
from mooncaked.cluster.lease import LeaseTimes
from mooncaked.cluster.records import Decoded, ElectionTable, decode, encode
from mooncaked.cluster.registry import Step, next_step
from mooncaked.cluster.watch import View, fold
from mooncaked.errors import LeaseLost, MooncakeError, Refused, Unauthenticated, Unreachable
from mooncaked.types import NodeRecord
from tests.cluster.records import candidate, node

Code = grpc.StatusCode


# --- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "details", "failure"),
    [
        (Code.UNAVAILABLE, "etcdserver: no leader", Failure.AWAY),
        (Code.UNAVAILABLE, "etcdserver: request timed out", Failure.AWAY),
        (Code.DEADLINE_EXCEEDED, "", Failure.AWAY),
        (Code.UNKNOWN, "context deadline exceeded", Failure.AWAY),
        (Code.INTERNAL, "Received RST_STREAM", Failure.AWAY),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Failure.AWAY),
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", Failure.STALE_TOKEN),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Failure.STALE_TOKEN),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", Failure.STALE_TOKEN),
        (Code.INVALID_ARGUMENT, "authentication failed, invalid user ID or password", Failure.DENIED),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", Failure.DENIED),
        (Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Failure.COMPACTED),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", Failure.LEASE_GONE),
        (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", Failure.REFUSED),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Failure.REFUSED),
    ],
)
def test_what_an_error_means(code: grpc.StatusCode, details: str, failure: Failure) -> None:
    assert classify(code, details) is failure


@pytest.mark.parametrize(
    ("failure", "details", "cls", "words"),
    [
        (Failure.DENIED, "permission denied", Unauthenticated, ["e1:2379", "user ada", "password_file"]),
        (Failure.LEASE_GONE, "lease not found", LeaseLost, ["lease not found"]),
        (Failure.AWAY, "timed out", Unreachable, ["e1:2379", "timed out", "etcd.endpoints"]),
        (Failure.REFUSED, "database space exceeded", Refused, ["quota", "NOSPACE"]),
        (Failure.COMPACTED, "compacted", Refused, ["compacted"]),
    ],
)
def test_errors_say_what_where_and_what_to_do(
    failure: Failure, details: str, cls: type[MooncakeError], words: list[str]
) -> None:
    error = to_error(failure, details, "e1:2379", "ada")
    assert type(error) is cls
    for word in words:
        assert word in str(error)


def test_a_failed_connection_is_told_in_few_words() -> None:
    theirs = "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused"
    assert connect_problem(theirs) == "connection refused"
    assert connect_problem("failed; last error: something new") == "something new"
    assert connect_problem("") == "no connection"


# --- members -------------------------------------------------------------------------------------------


def test_the_ring_stays_with_a_member_until_it_fails() -> None:
    ring = Ring(["a", "b", "c"], random.Random(1))
    first = ring.current
    assert ring.current == first
    ring.failed(first)
    second = ring.current
    assert second != first
    ring.failed(first)
    assert ring.current == second, "a late report about the first does not lose the second"
    ring.failed(second)
    ring.failed(ring.current)
    assert ring.current == first


def test_sessions_begin_at_different_members() -> None:
    addresses = ["a", "b", "c"]
    assert {Ring(addresses, random.Random(seed)).current for seed in range(20)} == set(addresses)


# --- keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"/a/", b"/a0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")]
)
def test_the_end_of_a_prefix(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_keys_that_are_no_utf8_survive() -> None:
    assert raw(text(b"/a/\xff\xfe")) == b"/a/\xff\xfe"


def test_where_things_are() -> None:
    assert keys.node_key("/mooncake", "n1") == "/mooncake/nodes/n1"
    assert keys.instance_key("/mooncake", "i1") == "/mooncake/instances/i1"
    assert keys.candidate_key("/mooncake", 255) == "/mooncake/election/00000000000000ff"
    assert keys.history_key("/m", 9) < keys.history_key("/m", 10)


# --- leases and registration ---------------------------------------------------------------------------


@pytest.mark.parametrize("ttl_s", [1.0, 2.0, 10.0, 3600.0])
def test_two_dead_members_in_a_row_do_not_cost_a_lease(ttl_s: float) -> None:
    times = LeaseTimes(ttl_s)
    assert times.interval_s + 2 * times.attempt_s + times.margin_s < ttl_s


def kv(key: str, value: bytes = b"v", created: int = 1, modified: int = 1, lease: int = 0) -> KeyValue:
    return KeyValue(key, value, created, modified, lease)


@pytest.mark.parametrize(
    ("seen", "take_over", "step"),
    [
        (None, True, Step.WRITE),
        (None, False, Step.WRITE),
        (kv("k", b"new", lease=7), False, Step.HOLD),
        (kv("k", b"old", lease=7), False, Step.WRITE),
        (kv("k", b"new", lease=8), True, Step.WRITE),
        (kv("k", b"new", lease=8), False, Step.YIELD),
        (kv("k", b"new", lease=0), False, Step.YIELD),
    ],
)
def test_what_a_registration_does_next(seen: KeyValue | None, take_over: bool, step: Step) -> None:
    assert next_step(b"new", 7, seen, take_over=take_over) is step


# --- records -------------------------------------------------------------------------------------------


def test_the_oldest_key_leads_and_its_creation_is_the_term() -> None:
    table = ElectionTable("/m")
    items = [
        kv("/m/election/aa", encode(candidate("late")), created=30),
        kv("/m/election/bb", encode(candidate("first")), created=10, modified=40),
        kv("/m/election/cc", encode(candidate("second")), created=20),
    ]
    standings = table.read(items)
    assert standings.leader == (10, candidate("first"))
    assert standings.first_key == "/m/election/bb"
    assert [record.candidate_id for record in standings.candidates] == ["first", "second", "late"]
    assert table.read([]).leader is None


def test_an_unreadable_candidate_still_holds_its_place() -> None:
    """Its writer, perhaps of a newer version, does lead; who it is cannot be told."""
    table = ElectionTable("/m")
    items = [kv("/m/election/aa", b"{}", created=1), kv("/m/election/bb", encode(candidate("b")), created=2)]
    standings = table.read(items)
    assert standings.leader is None
    assert standings.first_key == "/m/election/aa"
    assert standings.candidates == [candidate("b")]


def test_a_record_of_a_newer_version_is_read() -> None:
    newer = msgspec.json.encode({**msgspec.to_builtins(node("n1")), "since_then": [1, 2]})
    assert decode(kv("/m/nodes/n1", newer), NodeRecord) == node("n1")


def test_a_bad_record_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    decoded = Decoded(NodeRecord, "/m/nodes/")
    items = {
        key: kv(key, value)
        for key, value in {"/m/nodes/good": encode(node("good")), "/m/nodes/bad": b"\xff{"}.items()
    }
    for _ in range(3):
        assert decoded.records(items) == {"good": node("good")}
    assert [
        record.getMessage() for record in caplog.records if "key=/m/nodes/bad" in record.getMessage()
    ] == [caplog.records[0].getMessage()]


# --- the view ------------------------------------------------------------------------------------------


def test_the_view_is_the_sum_of_its_events() -> None:
    view = View()
    assert not view.connected
    view = fold(view, Snapshot(5, [kv("a"), kv("b")]))
    assert (set(view.items), view.revision, view.complete, view.connected) == ({"a", "b"}, 5, True, True)
    before = view
    view = fold(view, Changes(7, [Event("a", None, 6), Event("c", kv("c", modified=7), 7)]))
    assert set(view.items) == {"b", "c"}
    assert set(before.items) == {"a", "b"}, "views do not change"
    view = fold(view, Stalled("gone"))
    assert (set(view.items), view.connected, view.cause) == ({"b", "c"}, False, "gone")
    view = fold(view, Live(99))
    assert (view.connected, view.revision) == (True, 7), "events up to 99 are still to come"
    assert fold(view, Gap("compacted")) == view
    assert set(fold(view, Snapshot(100, [])).items) == set()
