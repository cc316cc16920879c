"""Elections on a real etcd: one leads, another takes over in time, and a deposed leader can do no harm."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.cluster import keys
from mooncaked.cluster.election import Election
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import Put, created_at
from mooncaked.cluster.registry import ClusterView, read_candidates, read_history, read_leader
from mooncaked.errors import NotLeader
from tests.cluster.conftest import Trio
from tests.cluster.etcd_admin import EtcdAdmin
from tests.cluster.records import candidate
from tests.cluster.waiting import eventually

TTL_S = 2.0


@asynccontextmanager
async def standing(
    etcd: EtcdSession, prefix: str, name: str, ttl_s: float = TTL_S
) -> AsyncIterator[Election]:
    election = Election(etcd, prefix, candidate(name), ttl_s)
    running = asyncio.create_task(election.run())
    yield election
    running.cancel()
    await asyncio.wait([running])


async def own_key(election: Election, prefix: str) -> str:
    assert election._lease is not None
    return keys.candidate_key(prefix, election._lease.id)


async def candidates_are(etcd: EtcdSession, prefix: str, names: list[str], *, in_order: bool = True) -> bool:
    standing = [record.candidate_id for record in await read_candidates(etcd, prefix)]
    return (standing if in_order else sorted(standing)) == names


async def test_one_leads_and_the_next_in_line_follows(etcd_session: EtcdSession, etcd_prefix: str) -> None:
    async with AsyncExitStack() as stack:
        elections = []
        for name in ("a", "b", "c"):
            elections.append(await stack.enter_async_context(standing(etcd_session, etcd_prefix, name)))
            await eventually(lambda: elections[-1].leader() is not None, 5)
        a, b, c = elections
        await eventually(lambda: a.term, 5)
        assert (b.term, c.term) == (None, None)
        assert a.leader() == b.leader() == c.leader() == (a.term, candidate("a"))
        await eventually(lambda: len(c._view.items) == 3, 5)
        assert await candidates_are(etcd_session, etcd_prefix, ["a", "b", "c"])
        first_term = a.term
        assert first_term is not None
        begin = time.monotonic()
        await a.resign()
        await eventually(lambda: b.term, 5)
        assert time.monotonic() - begin < 1, "resigning does not wait for a lease to run out"
        assert b.term is not None
        assert b.term > first_term
        assert a.term is None
        assert (await read_leader(etcd_session, etcd_prefix)) == (b.term, candidate("b"))
        await eventually(lambda: c.leader() == (b.term, candidate("b")), 5)


async def history_has(etcd: EtcdSession, prefix: str, lines: int) -> bool:
    return len(await read_history(etcd, prefix)) == lines


async def test_terms_are_written_into_the_history(etcd_session: EtcdSession, etcd_prefix: str) -> None:
    terms: list[int] = []
    for name in ("a", "b", "a"):
        async with standing(etcd_session, etcd_prefix, name) as election:
            await eventually(lambda: election.term, 5)
            terms.append(election.term or 0)
            await eventually(lambda: history_has(etcd_session, etcd_prefix, len(terms)), 5)
    history = await read_history(etcd_session, etcd_prefix)
    assert [(line.term, line.candidate_id) for line in history] == list(zip(terms, "aba", strict=True))
    assert terms == sorted(terms)


async def test_a_leader_killed_with_9_is_followed_in_time(etcd_endpoint: str, etcd_prefix: str) -> None:
    processes: dict[str, asyncio.subprocess.Process] = {}
    try:
        for name in ("a", "b"):
            command = [sys.executable, "-m", "tests.cluster.candidate"]
            command += [etcd_endpoint, etcd_prefix, name, str(TTL_S)]
            processes[name] = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        async with EtcdSession(EtcdOptions(endpoints=[etcd_endpoint])) as etcd:
            await eventually(lambda: candidates_are(etcd, etcd_prefix, ["a", "b"], in_order=False), 20)
            leader = await read_leader(etcd, etcd_prefix)
        assert leader is not None
        killed = leader.record.candidate_id
        assert await _line(processes[killed]) == f"leads {leader.term}"
        processes[killed].kill()
        begin = time.monotonic()
        line = await _line(processes["b" if killed == "a" else "a"])
        took_s = time.monotonic() - begin
        assert took_s < TTL_S + 1.5
        assert line.startswith("leads ")
        assert int(line.removeprefix("leads ")) > leader.term
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


async def test_a_deposed_leader_cannot_write(
    etcd_session: EtcdSession, etcd_prefix: str, etcd_endpoint: str
) -> None:
    """Deposed behind its back, it still believes in itself; etcd does not."""
    async with standing(etcd_session, etcd_prefix, "a") as election:
        await eventually(lambda: election.term, 5)
        term, key = election.term, await own_key(election, etcd_prefix)
        assert term is not None
        result = await election.fenced([Put(f"{etcd_prefix}/task", b"by the leader")])
        assert result.succeeded
        with EtcdAdmin(etcd_endpoint) as admin:
            admin.delete(key)  # without a turn of the event loop in between
        assert election.term == term
        with pytest.raises(NotLeader):
            await election.fenced([Put(f"{etcd_prefix}/task", b"by a ghost")])
        assert not (
            await etcd_session.txn([created_at(key, term)], [Put(f"{etcd_prefix}/task", b"x")])
        ).succeeded
        kv = await etcd_session.get(f"{etcd_prefix}/task")
        assert kv is not None
        assert kv.value == b"by the leader"
        await eventually(lambda: election.term not in (None, term), 5, "it stands again, in a later term")
        assert election.term is not None
        assert election.term > term


async def test_a_leader_that_cannot_reach_etcd_stops_before_another_begins(own_etcd: EtcdServer) -> None:
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)
    async with EtcdSession(options) as etcd, standing(etcd, "/m", "a") as election:
        await eventually(lambda: election.term, 5)
        told: list[int | None] = []
        election.on_change(lambda standing: told.append(standing.term))
        own_etcd.pause()
        took_s = await eventually(lambda: election.term is None, TTL_S)
        assert took_s < TTL_S
        await eventually(lambda: told == [None], 1, "those who listen are told")
        with pytest.raises(NotLeader):
            await election.fenced([Put("/m/task", b"")])
        assert election.leader() is not None, "what was last seen"
        own_etcd.resume()
        await eventually(lambda: election.term, 10, "it leads again")


async def test_a_restart_of_etcd_does_not_change_the_leader(own_etcd: EtcdServer) -> None:
    options = EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)
    async with (
        EtcdSession(options) as etcd,
        standing(etcd, "/m", "a", 5.0) as a,
        standing(etcd, "/m", "b") as b,
    ):
        await eventually(lambda: a.term or b.term, 5)
        await eventually(lambda: len(a._view.items) == 2, 5)
        leader = a if a.term else b
        term = leader.term
        await asyncio.to_thread(own_etcd.restart)
        await eventually(lambda: leader.term == term, 5)
        assert (await read_leader(etcd, "/m") or (0,))[0] == term


async def test_another_leads_when_the_leader_of_etcd_itself_hangs(trio: Trio) -> None:
    """Failover of etcd, and then nothing: whoever led leads on, or another leads with a higher term."""
    options = EtcdOptions(endpoints=trio.endpoints)
    async with (
        EtcdSession(options) as first,
        EtcdSession(options) as second,
        standing(first, "/m", "a") as a,
        standing(second, "/m", "b") as b,
    ):
        await eventually(lambda: a.term or b.term, 5)
        before = a.term or b.term
        assert before is not None
        statuses = await first.members()
        hung = next(status.address for status in statuses if status.leads)
        trio.at(hung).pause()
        await asyncio.sleep(1)
        await eventually(lambda: a.term or b.term, 10, "somebody leads")
        after = a.term or b.term
        assert after is not None
        assert after >= before
        assert not (a.term and b.term)


async def test_the_cluster_view_knows_the_leader(etcd_session: EtcdSession, etcd_prefix: str) -> None:
    view = ClusterView(etcd_session, etcd_prefix)
    following = asyncio.create_task(view.run())
    async with standing(etcd_session, etcd_prefix, "a") as election:
        await view.wait_for(lambda view: view.leader is not None, 5)
        await eventually(lambda: election.term, 5)
        assert view.leader == (election.term, candidate("a"))
        assert view.candidates == [candidate("a")]
    await view.wait_for(lambda view: view.leader is None, 5)
    following.cancel()
    await asyncio.wait([following])
