"""Fixtures for the whole suite: a real etcd server, and a part of its key space for each test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mooncakectl.local.etcd_server import EtcdServer, free_ports
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.errors import MooncakeError


def start_etcd(folder: Path, attempts: int = 3) -> EtcdServer:
    """A single etcd on free ports, ready; tries other ports when another process took one meanwhile."""
    for attempt in range(attempts):
        client, peer = free_ports(2)
        server = EtcdServer(folder / f"data{attempt}", client, peer, folder / "etcd.log")
        server.start()
        try:
            server.wait_ready()
        except MooncakeError:
            server.kill()
            if attempt + 1 == attempts:
                raise
        else:
            return server
    raise AssertionError("unreachable")


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd for the whole test session. A test that stops or pauses it must start one of its own."""
    server = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def etcd(etcd_server: EtcdServer) -> EtcdServer:
    """The same server under its short name."""
    return etcd_server


@pytest.fixture
def etcd_endpoint(etcd_server: EtcdServer) -> str:
    """`host:port` of the session's etcd."""
    return etcd_server.endpoint


@pytest.fixture
def etcd_prefix() -> str:
    """A key prefix that no other test uses."""
    return f"/test/{uuid.uuid4().hex}"


@pytest.fixture
async def etcd_session(etcd_endpoint: str) -> AsyncIterator[EtcdSession]:
    """A connected session on the session's etcd."""
    async with EtcdSession(EtcdOptions(endpoints=[etcd_endpoint])) as session:
        yield session
