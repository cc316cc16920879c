"""Registration, view and election on a fake etcd and a virtual clock: rare orders of events, and many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec
import pytest

from mooncaked.cluster import keys
from mooncaked.cluster.election import HISTORY_TERMS_MAX, Election, Standing
from mooncaked.cluster.kv import KeyValue, Put
from mooncaked.cluster.registry import ClusterView, Registration, read_history
from mooncaked.types import NodePhase, NodeRecord
from tests.cluster.records import candidate, node
from tests.fakes.fake_etcd import FakeEtcd, FakeStore
from tests.fakes.manual_clock import ManualClock

TTL_S = 10.0
KEY = "/m/nodes/n1"


class World:
    """A store, its clock, and everything that runs on them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FakeStore(self.clock)
        self.tasks: list[asyncio.Task[None]] = []
        self.registrations: list[Registration] = []

    def register(self, etcd: FakeEtcd, record: NodeRecord) -> Registration:
        registration = Registration(etcd, TTL_S, KEY, lambda: record, clock=self.clock, rng=random.Random(1))
        registration.start()
        self.registrations.append(registration)
        return registration

    def stand(self, etcd: FakeEtcd, name: str, seed: int = 1) -> Election:
        rng = random.Random(seed)
        election = Election(etcd, "/m", candidate(name), TTL_S, clock=self.clock, rng=rng)
        self.tasks.append(asyncio.create_task(election.run()))
        return election

    def stored(self) -> KeyValue | None:
        return self.store.items.get(KEY)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError | None):
                raise result
        for registration in self.registrations:
            await registration.close()
        await self.store.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.close()


# --- registration --------------------------------------------------------------------------------------


async def test_an_answer_that_gets_lost_does_not_register_twice(world: World) -> None:
    etcd = world.store.session()
    etcd.lose_next_reply = True
    registration = world.register(etcd, node("n1"))
    await world.clock.advance(0.1)
    assert registration.registered
    stored = world.stored()
    assert stored is not None
    assert stored.create_revision == stored.mod_revision, "written once"
    assert len(world.store.leases) == 1


async def test_a_request_that_gets_lost_is_made_again(world: World) -> None:
    etcd = world.store.session()
    etcd.lose_next_request = True
    registration = world.register(etcd, node("n1"))
    await world.clock.advance(0.1)
    assert registration.registered
    assert world.stored() is not None


async def test_a_lease_that_is_revoked_is_replaced(world: World) -> None:
    registration = world.register(world.store.session(), node("n1"))
    await world.clock.advance(0.1)
    before = world.stored()
    assert before is not None
    world.store.expire(before.lease)
    await world.clock.advance(TTL_S / 3 + 1)
    assert registration.registered
    after = world.stored()
    assert after is not None
    assert after.lease != before.lease


async def test_while_etcd_is_away_it_is_not_registered_and_then_it_is_again(world: World) -> None:
    etcd = world.store.session()
    registration = world.register(etcd, node("n1"))
    await world.clock.advance(0.1)
    etcd.away = "the cable is out"
    await world.clock.advance(TTL_S)
    registered = registration.registered
    assert not registered
    await world.clock.advance(TTL_S)
    assert not world.stored(), "it has expired"
    etcd.away = ""
    await world.clock.advance(5)
    assert registration.registered
    assert world.stored()


async def test_a_short_absence_keeps_lease_and_record(world: World) -> None:
    etcd = world.store.session()
    registration = world.register(etcd, node("n1"))
    await world.clock.advance(0.1)
    before = world.stored()
    etcd.away = "restart"
    await world.clock.advance(TTL_S / 3)
    etcd.away = ""
    await world.clock.advance(TTL_S)
    assert registration.registered
    assert world.stored() == before


async def test_refused_credentials_are_a_problem_and_no_end(world: World) -> None:
    etcd = world.store.session()
    etcd.denied = True
    registration = world.register(etcd, node("n1"))
    await world.clock.advance(1)
    assert "permission denied" in registration.problem
    etcd.denied = False
    await world.clock.advance(5)
    assert registration.registered
    assert registration.problem == ""


async def test_updates_in_a_row_end_with_the_last(world: World) -> None:
    registration = world.register(world.store.session(), node("n1", NodePhase.STARTING))
    registration.update(node("n1", NodePhase.READY))
    registration.update(node("n1", NodePhase.DRAINING))
    await world.clock.advance(0.1)
    stored = world.stored()
    assert stored is not None
    assert msgspec.json.decode(stored.value, type=NodeRecord).phase is NodePhase.DRAINING


async def test_a_process_that_was_frozen_does_not_take_its_name_back(world: World) -> None:
    """It hung beyond its lease; meanwhile its successor registered."""
    frozen, successor = world.store.session(), world.store.session()
    first = world.register(frozen, node("n1", epoch=1))
    await world.clock.advance(0.1)
    frozen.away = "frozen"
    await world.clock.advance(2 * TTL_S)
    second = world.register(successor, node("n1", epoch=2))
    await world.clock.advance(0.1)
    frozen.away = ""
    await world.clock.advance(TTL_S)
    assert second.registered
    assert not first.registered
    assert "another process" in first.problem


# --- the view ------------------------------------------------------------------------------------------


async def test_the_view_goes_stale_and_comes_back_over_compaction(world: World) -> None:
    etcd, writer = world.store.session(), world.store.session()
    view = ClusterView(etcd, "/m", clock=world.clock)
    world.tasks.append(asyncio.create_task(view.run()))
    calls: list[int] = []
    undo = view.on_change(lambda: calls.append(len(view.nodes)))
    await writer.put("/m/nodes/n1", msgspec.json.encode(node("n1")))
    await world.clock.settle()
    assert set(view.nodes) == {"n1"}
    assert calls[-1] == 1
    held = view.nodes
    etcd.away = "gone"
    await world.clock.advance(10)
    assert view.stale_since
    assert view.nodes == held
    await writer.delete("/m/nodes/n1")
    await writer.put("/m/nodes/n2", msgspec.json.encode(node("n2")))
    await writer.put("/m/nodes/broken", b"no record")
    world.store.compact(world.store.revision)
    etcd.away = ""
    await world.clock.advance(10)
    assert view.connected
    assert not view.stale_since
    assert set(view.nodes) == {"n2"}
    assert set(held) == {"n1"}
    undo()
    count = len(calls)
    await writer.delete("/m/nodes/n2")
    await world.clock.settle()
    assert len(calls) == count


# --- election ------------------------------------------------------------------------------------------


async def test_a_candidacy_whose_answer_got_lost_is_found(world: World) -> None:
    etcd = world.store.session()
    etcd.lose_next_reply = True
    election = world.stand(etcd, "a")
    await world.clock.advance(0.1)
    (key,) = [kv for kv in world.store.items.values() if kv.key.startswith("/m/election/")]
    assert election.term == key.create_revision


async def test_a_candidate_goes_to_the_end_of_the_line_when_its_key_is_removed(world: World) -> None:
    first, second = world.stand(world.store.session(), "a"), world.store.session()
    await world.clock.advance(0.1)
    other = world.stand(second, "b")
    await world.clock.advance(0.1)
    assert (first.term is not None, other.term) == (True, None)
    leader_key = min(
        (kv for kv in world.store.items.values() if kv.key.startswith("/m/election/")),
        key=lambda kv: kv.create_revision,
    )
    await second.delete(leader_key.key)
    await world.clock.advance(0.1)
    assert first.term is None
    assert other.term is not None
    assert [record.candidate_id for record in first._standings.candidates] == ["b", "a"]


async def test_changes_are_told_once_each(world: World) -> None:
    etcd = world.store.session()
    election = world.stand(etcd, "a")
    told: list[Standing] = []
    election.on_change(told.append)
    seen: list[int | None] = []

    async def follow() -> None:
        async for standing in election.changes():
            seen.append(standing.term)

    world.tasks.append(asyncio.create_task(follow()))
    await world.clock.advance(0.1)
    term = election.term
    etcd.away = "gone"
    await world.clock.advance(0.85 * TTL_S)
    assert election.term is None, "by its own clock"
    etcd.away = ""
    await world.clock.advance(3)
    assert election.term == term, "it came back in time: the same lease, key and term"
    terms = [told[0].term, *(now.term for before, now in pairwise(told) if now.term != before.term)]
    assert terms[-3:] == [term, None, term]
    assert seen[-3:] == [term, None, term]


async def test_the_history_is_kept_short(world: World) -> None:
    etcd = world.store.session()
    for term in range(1, HISTORY_TERMS_MAX + 31):
        await etcd.put(
            keys.history_key("/m", term), b'{"term":%d,"candidate_id":"x","elected_at_s":0}' % term
        )
    election = world.stand(etcd, "a")
    await world.clock.advance(1)
    history = await read_history(etcd, "/m")
    assert len(history) == HISTORY_TERMS_MAX
    assert history[-1].term == election.term
    assert history[-1].candidate_id == "a"


@pytest.mark.parametrize("seed", range(25))
async def test_never_two_leaders_and_never_none_for_long(world: World, seed: int) -> None:
    """Candidates are cut off from etcd and come back, answers and requests get lost, history is compacted."""
    rng = random.Random(seed)
    sessions = [world.store.session() for _ in range(3)]
    elections = [world.stand(session, f"c{number}", seed + number) for number, session in enumerate(sessions)]
    highest = 0
    violations: list[str] = []

    def check() -> None:
        nonlocal highest
        leading = [election.term for election in elections if election.term is not None]
        if len(leading) > 1:
            violations.append(f"two leaders at once, terms {leading}, at {world.clock.monotonic()}")
        if any(term < highest for term in leading):
            violations.append(f"term {leading} after {highest}")
        highest = max([highest, *leading])

    for election in elections:
        election.on_change(lambda _standing: check())
    for _ in range(60):
        match rng.randrange(6):
            case 0 | 1:
                rng.choice(sessions).away = "cut off"
            case 2:
                for session in sessions:
                    session.away = ""
            case 3:
                rng.choice(sessions).lose_next_reply = True
            case 4:
                rng.choice(sessions).lose_next_request = True
            case 5:
                world.store.compact(world.store.revision)
        for _ in range(rng.randrange(1, 30)):
            await world.clock.advance(0.2)
            check()
            assert not violations
    for session in sessions:
        session.away = ""
        session.lose_next_reply = session.lose_next_request = False
    await world.clock.advance(TTL_S + 8)
    check()
    assert not violations
    leaders = [election for election in elections if election.term is not None]
    assert len(leaders) == 1
    assert (await leaders[0].fenced([Put("/m/task", b"")])).succeeded
