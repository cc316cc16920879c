"""A cluster for the command line: records in a real etcd, and one server that is node, engine and gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncakectl.__main__ import run
from mooncaked.cluster import keys
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.records import encode
from mooncaked.types import CandidateRecord, InstanceRecord, NodePhase, NodeRecord, Role
from tests.fakes.web_cluster import WebCluster


class Ctl:
    """Runs command lines in this process, against one cluster."""

    def __init__(
        self, endpoint: str, prefix: str, capsys: pytest.CaptureFixture[str], web: WebCluster
    ) -> None:
        self.endpoint, self.prefix, self.web = endpoint, prefix, web
        self.out = self.err = ""
        self._capsys = capsys

    def __call__(self, *arguments: str) -> int:
        self._capsys.readouterr()
        code = run(arguments)
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        assert self(*arguments, "-o", "json") == code, self.err
        body = json.loads(self.out)
        assert isinstance(body, dict)
        return body

    def put(self, key: str, record: msgspec.Struct) -> None:
        """Register `record`, without a lease."""
        asyncio.run(self._put(key, record))

    async def _put(self, key: str, record: msgspec.Struct) -> None:
        async with EtcdSession(EtcdOptions(endpoints=[self.endpoint])) as session:
            await session.put(key, encode(record))

    def register(self) -> None:
        """A node, an instance that registered itself, and a conductor that leads."""
        self.put(keys.node_key(self.prefix, "node-1"), self.node())
        self.put(keys.instance_key(self.prefix, "both-1"), self.instance())
        self.put(keys.candidate_key(self.prefix, 1), self.candidate("node-1", self.web.url))

    def node(self) -> NodeRecord:
        return NodeRecord(
            node_id="node-1",
            phase=NodePhase.READY,
            host="h",
            pid=1,
            version="0.1.0",
            peer_address="127.0.0.1:1",
            http_address=self.web.address,
            client_socket="/run/client.sock",
            capacity_bytes={"dram": 1 << 30},
            labels={"zone": "a"},
            started_at_s=time.time() - 300,
            epoch=1,
        )

    def instance(self) -> InstanceRecord:
        return InstanceRecord(
            instance_id="both-1",
            url=self.web.url,
            role=Role.BOTH,
            model="tiny",
            engine="reference",
            node_id="node-1",
            namespace="tiny-space",
            hash_name="mooncake_xxh3",
            block_tokens=32,
            kv_bytes_per_token=1024,
            context_tokens=8192,
            kv_capacity_tokens=65536,
            batch_max=8,
            pid=2,
            started_at_s=time.time() - 60,
        )

    def candidate(self, name: str, url: str) -> CandidateRecord:
        return CandidateRecord(
            candidate_id=name, gateway_url=url, host="h", pid=1, version="0.1.0", started_at_s=time.time()
        )


@pytest.fixture
def web() -> Iterator[WebCluster]:
    cluster = WebCluster()
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def ctl(
    etcd_endpoint: str,
    etcd_prefix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    web: WebCluster,
) -> Ctl:
    """The command line, set to the test's own part of etcd. Nothing is registered yet."""
    monkeypatch.setenv("MOONCAKE_ETCD", etcd_endpoint)
    monkeypatch.setenv("MOONCAKE_PREFIX", etcd_prefix)
    monkeypatch.setenv("MOONCAKE_LOCAL", str(tmp_path / "local"))
    for name in ("MOONCAKE_CONFIG", "MOONCAKE_GATEWAY", "MOONCAKE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return Ctl(etcd_endpoint, etcd_prefix, capsys, web)


@pytest.fixture
def cluster(ctl: Ctl) -> Ctl:
    """The command line with a healthy cluster of one node, one instance and one conductor."""
    ctl.register()
    return ctl
