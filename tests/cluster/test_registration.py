"""A registration comes back by itself, on a real etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from mooncakectl.local.etcd_server import EtcdServer, free_ports
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import KeyValue
from mooncaked.cluster.registry import ClusterView, Registration
from mooncaked.errors import DeadlineExceeded
from mooncaked.types import NodePhase, NodeRecord
from tests.cluster.etcd_admin import EtcdAdmin
from tests.cluster.records import instance, node
from tests.cluster.waiting import eventually

TTL_S = 2.0


@asynccontextmanager
async def registered(etcd: EtcdSession, key: str, record: NodeRecord) -> AsyncIterator[Registration]:
    registration = Registration(etcd, TTL_S, key, lambda: record)
    registration.start()
    await registration.wait_registered(10)
    yield registration
    await registration.close()


async def stored(etcd: EtcdSession, key: str) -> tuple[KeyValue, NodeRecord]:
    kv = await etcd.get(key)
    assert kv is not None
    return kv, msgspec.json.decode(kv.value, type=NodeRecord)


async def phase_is(etcd: EtcdSession, key: str, phase: NodePhase) -> bool:
    return (await stored(etcd, key))[1].phase is phase


async def test_a_record_is_there_until_its_owner_closes(etcd_session: EtcdSession, etcd_prefix: str) -> None:
    key = f"{etcd_prefix}/n1"
    async with registered(etcd_session, key, node("n1")) as registration:
        assert registration.registered
        kv, record = await stored(etcd_session, key)
        assert record == node("n1")
        assert kv.lease
        registration.update(node("n1", NodePhase.DRAINING))
        await eventually(lambda: phase_is(etcd_session, key, NodePhase.DRAINING), 5)
        assert (await stored(etcd_session, key))[0].lease == kv.lease, "an update keeps the lease"
    assert await etcd_session.get(key) is None
    assert not registration.registered


async def test_it_registers_again_when_its_lease_ran_out_while_etcd_hung(own_etcd: EtcdServer) -> None:
    async with (
        EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)) as etcd,
        registered(etcd, "/nodes/n1", node("n1")) as registration,
    ):
        before, _ = await stored(etcd, "/nodes/n1")
        own_etcd.pause()
        await eventually(lambda: not registration.registered, TTL_S + 0.5, "it knows by its own clock")
        await asyncio.sleep(TTL_S)  # long enough for etcd to count the lease as run out
        own_etcd.resume()
        await eventually(lambda: registration.registered, 5, "it is registered again")
        after, record = await stored(etcd, "/nodes/n1")
        assert after.lease != before.lease
        assert record == node("n1")


async def test_it_registers_again_in_an_etcd_that_lost_its_data(own_etcd: EtcdServer) -> None:
    async with (
        EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)) as etcd,
        registered(etcd, "/nodes/n1", node("n1")) as registration,
    ):
        await asyncio.to_thread(own_etcd.kill)
        own_etcd.data_dir.rename(own_etcd.data_dir.with_name("lost"))
        own_etcd.start()
        await asyncio.to_thread(own_etcd.wait_ready)
        await eventually(lambda: etcd.get("/nodes/n1"), 5)
        await eventually(lambda: registration.registered, 5)


async def test_a_record_that_somebody_deletes_comes_back(
    etcd_session: EtcdSession, etcd_prefix: str, etcd_endpoint: str
) -> None:
    key = f"{etcd_prefix}/n1"
    async with registered(etcd_session, key, node("n1")):
        with EtcdAdmin(etcd_endpoint) as admin:
            admin.delete(key)
        assert await etcd_session.get(key) is None
        await eventually(lambda: etcd_session.get(key), 1)


async def test_a_restarted_process_takes_its_key_over_at_once(
    etcd_session: EtcdSession, etcd_prefix: str
) -> None:
    """What a process killed with -9 left behind neither blocks its successor nor takes its key away later."""
    key = f"{etcd_prefix}/n1"
    dead = await etcd_session.grant(1.0, "dead")
    await etcd_session.put(key, msgspec.json.encode(node("n1", epoch=1)), dead.id)
    await dead.close(revoke=False)
    begin = time.monotonic()
    async with registered(etcd_session, key, node("n1", epoch=2)) as registration:
        assert time.monotonic() - begin < 1
        await asyncio.sleep(2)  # the dead process's lease ends
        assert (await stored(etcd_session, key))[1].epoch == 2
        assert registration.registered


async def test_two_processes_with_one_name_do_not_fight(etcd_session: EtcdSession, etcd_prefix: str) -> None:
    """The newest has the key; the other says so, and returns when the key is free."""
    key = f"{etcd_prefix}/n1"
    async with registered(etcd_session, key, node("n1", epoch=1)) as first:
        async with registered(etcd_session, key, node("n1", epoch=2)):
            await eventually(lambda: not first.registered, 5)
            assert first.problem == "another process has registered under this name"
            taken, record = await stored(etcd_session, key)
            assert record.epoch == 2
            await asyncio.sleep(0.3)
            assert (await stored(etcd_session, key))[0] == taken, "nobody writes it any more"
        await eventually(lambda: first.registered, 5)
        assert (await stored(etcd_session, key))[1].epoch == 1


async def test_waiting_says_why_it_is_not_registered() -> None:
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    async with EtcdSession(EtcdOptions(endpoints=[endpoint], request_timeout_s=0.2)) as etcd:
        registration = Registration(etcd, TTL_S, "/nodes/n1", lambda: node("n1"))
        registration.start()
        with pytest.raises(DeadlineExceeded, match=rf"Cannot reach etcd at {endpoint}"):
            await registration.wait_registered(0.5)
        await registration.close()


# --- the view ------------------------------------------------------------------------------------------


async def test_the_view_follows_and_survives_a_restart_of_etcd(own_etcd: EtcdServer) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[own_etcd.endpoint], request_timeout_s=0.5)) as etcd:
        view = ClusterView(etcd, "/mooncake")
        following = asyncio.create_task(view.run())
        async with registered(etcd, "/mooncake/nodes/n1", node("n1")):
            await view.wait_for(lambda view: "n1" in view.nodes, 5)
            assert view.nodes == {"n1": node("n1")}
            await etcd.put("/mooncake/instances/i1", msgspec.json.encode(instance("i1")))
            await view.wait_for(lambda view: view.instances == {"i1": instance("i1")}, 5)

            await asyncio.to_thread(own_etcd.kill)
            await view.wait_for(lambda view: view.stale_since is not None, 5)
            assert not view.connected
            assert view.problem
            assert view.nodes == {"n1": node("n1")}, "the last view stays"
            own_etcd.start()
            await view.wait_for(lambda view: view.stale_since is None, 10)
            assert view.nodes == {"n1": node("n1")}
        await view.wait_for(lambda view: not view.nodes, 5)
        following.cancel()
        await asyncio.wait([following])
