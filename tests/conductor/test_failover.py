"""Real conductor processes on a real etcd: leaders are killed, etcd goes away, requests are served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncaked.cluster import keys
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.records import encode, read_leader
from mooncaked.keys import chain_keys
from mooncaked.types import BlockEvent, Role, Tier
from tests.cluster.waiting import eventually
from tests.conftest import start_etcd
from tests.fakes.engine import FakeEngine
from tests.fakes.node import FakeNode

PROMPT = list(range(100, 140))
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3}


class Conductor:
    """One `mooncaked --role conductor` process."""

    def __init__(self, folder: Path, name: str, endpoint: str, prefix: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._config = folder / f"{name}.toml"
        self._config.write_text(
            f'[node]\nid = "{name}"\n[etcd]\nendpoints = ["{endpoint}"]\nprefix = "{prefix}"\n'
            '[conductor]\nlisten = "127.0.0.1:0"\n'
        )
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self) -> None:
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "mooncaked",
                "--role",
                "conductor",
                "--config",
                str(self._config),
                stderr=log,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        await eventually(self._listens, 30, f"{self.name} listens")

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, self.log()
        for line in self.log().splitlines():
            if "gateway serves" in line:
                self.url = line.split("url=")[1].split()[0]
        return bool(self.url)

    def log(self) -> str:
        return self._log.read_text()

    async def end(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)
            await self.process.wait()


class Cluster:
    """Two conductors, engines of both roles and their nodes, in one etcd."""

    def __init__(self, etcd: EtcdSession, prefix: str, http: aiohttp.ClientSession) -> None:
        self.etcd = etcd
        self.prefix = prefix
        self.http = http
        self.conductors: list[Conductor] = []
        self.prefill = [FakeEngine("p1", Role.PREFILL, "n1"), FakeEngine("p2", Role.PREFILL, "n2")]
        self.decode = FakeEngine("d1", Role.DECODE, "n3")
        self.nodes = [FakeNode(f"n{i}", heartbeat_s=0.5) for i in (1, 2, 3)]

    async def start(self, stack: AsyncExitStack) -> None:
        for node in self.nodes:
            await node.start()
            stack.push_async_callback(node.kill)
            await self.etcd.put(keys.node_key(self.prefix, node.node_id), encode(node.record))
        for engine in (*self.prefill, self.decode):
            await engine.start()
            stack.push_async_callback(engine.stop)
            await self.etcd.put(keys.instance_key(self.prefix, engine.instance_id), encode(engine.record()))
        for conductor in self.conductors:
            stack.push_async_callback(conductor.end, signal.SIGKILL)
        await asyncio.gather(*(conductor.start() for conductor in self.conductors))
        # node n2 holds the prefix
        blocks = chain_keys("tiny", PROMPT, 4)
        self.nodes[1].say([BlockEvent(True, "tiny", key, None, 4000, Tier.DRAM) for key in blocks])
        for conductor in self.conductors:
            await eventually(lambda c=conductor: self.knows(c), 20, "every index is warm")

    async def knows(self, conductor: Conductor) -> bool:
        status = await self.status(conductor)
        warm = status["index"]["blocks"] == 10 and len(status["instances"]) == 3
        return warm and status["leader"] is not None

    async def status(self, conductor: Conductor) -> dict[str, Any]:
        async with self.http.get(conductor.url + "/v1/conductor") as response:
            return await response.json()

    async def ask(self, conductor: Conductor, **fields: Any) -> dict[str, str]:
        data = json.dumps(BODY | fields).encode()
        async with self.http.post(conductor.url + "/v1/completions", data=data) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["choices"][0]["text"] == "w0 w1 w2 "
            return dict(response.headers)

    async def leader_and_other(self) -> tuple[Conductor, Conductor]:
        leader = await read_leader(self.etcd, self.prefix)
        assert leader is not None
        first, second = self.conductors
        return (first, second) if leader.record.candidate_id == first.name else (second, first)


@pytest.fixture
async def cluster(tmp_path: Path, etcd_endpoint: str, etcd_prefix: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield await make(stack, tmp_path, etcd_endpoint, etcd_prefix)


async def make(stack: AsyncExitStack, folder: Path, endpoint: str, prefix: str) -> Cluster:
    etcd = await stack.enter_async_context(EtcdSession(EtcdOptions(endpoints=[endpoint])))
    http = await stack.enter_async_context(aiohttp.ClientSession())
    result = Cluster(etcd, prefix, http)
    result.conductors = [Conductor(folder, name, endpoint, prefix) for name in ("c1", "c2")]
    await result.start(stack)
    return result


async def test_kill_the_leader_and_the_next_request_finds_its_prefix(cluster: Cluster) -> None:
    leader, other = await cluster.leader_and_other()
    before = await cluster.ask(other)
    assert before["X-Mooncake-Prefill"] == "p2"
    term = int(before["X-Mooncake-Term"])
    assert term > 0

    killed_s = time.monotonic()
    await leader.end(signal.SIGKILL)
    headers = await cluster.ask(other)

    assert time.monotonic() - killed_s < 5
    assert headers["X-Mooncake-Prefill"] == "p2", "the prefix is known: the index was warm"
    await eventually(lambda: leads(cluster, other), 5 - (time.monotonic() - killed_s))
    headers = await cluster.ask(other)
    assert int(headers["X-Mooncake-Term"]) > term
    assert "X-Mooncake-Degraded" not in headers


async def leads(cluster: Cluster, conductor: Conductor) -> bool:
    return bool((await cluster.status(conductor))["leading"])


async def test_a_leader_that_is_stopped_hands_over_at_once(cluster: Cluster) -> None:
    leader, other = await cluster.leader_and_other()
    await leader.end(signal.SIGTERM)
    assert leader.process is not None
    assert leader.process.returncode == 0, leader.log()
    took_s = await eventually(lambda: leads(cluster, other), 5)
    assert took_s < 1.5, "it gave the lead away, its lease did not have to expire"
    await cluster.ask(other)


async def test_sigterm_lets_a_request_end(cluster: Cluster) -> None:
    leader, _ = await cluster.leader_and_other()
    cluster.decode.token_s = 0.3
    call = asyncio.create_task(cluster.ask(leader))
    await eventually(lambda: cluster.decode.running == 1, 5)
    await leader.end(signal.SIGTERM)
    assert (await call)["X-Mooncake-Decode"] == "d1"


async def test_a_killed_node_is_no_source_any_more(cluster: Cluster) -> None:
    leader, _ = await cluster.leader_and_other()
    assert (await cluster.ask(leader))["X-Mooncake-Prefill"] == "p2"
    await cluster.nodes[1].kill()  # its etcd record is still there
    await eventually(lambda: away(cluster, leader), 5)
    headers = await cluster.ask(leader)
    assert headers["X-Mooncake-Prefill"] == "p1", "p2's node cannot hand KV over"
    assert cluster.prefill[0].prefills[-1]["kv_transfer_params"]["sources"] == []


async def away(cluster: Cluster, conductor: Conductor) -> bool:
    status = await cluster.status(conductor)
    return any(source["state"] == "away" for source in status["sources"])


async def test_etcd_goes_away_and_comes_back_and_everything_is_served(tmp_path: Path) -> None:
    server = start_etcd(tmp_path)
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        cluster = await make(stack, tmp_path, server.endpoint, "/away")
        leader, other = await cluster.leader_and_other()
        await cluster.ask(other)

        server.kill()
        begin = time.monotonic()
        while time.monotonic() - begin < 4:  # longer than the leader's lease
            for conductor in (leader, other):
                asked = time.monotonic()
                headers = await cluster.ask(conductor)
                assert time.monotonic() - asked < 4
                assert headers["X-Mooncake-Prefill"] == "p2"
            await asyncio.sleep(0.2)
        assert headers["X-Mooncake-Degraded"] == "1", "no lease, no leader"

        server.start()
        server.wait_ready()
        await eventually(lambda: recovered(cluster), 20)


async def recovered(cluster: Cluster) -> bool:
    answers = [await cluster.ask(conductor) for conductor in cluster.conductors]
    return all("X-Mooncake-Degraded" not in headers for headers in answers)
