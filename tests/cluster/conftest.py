"""Etcd servers that a test may stop, pause and kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncakectl.local.etcd_server import EtcdServer, free_ports


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A single etcd of the test's own."""
    client, peer = free_ports(2)
    server = EtcdServer(tmp_path / "etcd", client, peer, tmp_path / "etcd.log")
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


class Trio:
    """A cluster of three members."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(6)
        peers = {f"m{number}": ports[number] for number in range(3)}
        self.members = [
            EtcdServer(folder / name, client, peer, folder / "log", name=name, peers=peers, election_ms=500)
            for (name, peer), client in zip(peers.items(), ports[3:], strict=True)
        ]

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def at(self, endpoint: str) -> EtcdServer:
        """The member with this client address."""
        return next(member for member in self.members if member.endpoint == endpoint)

    def heal(self) -> None:
        """Bring every member back."""
        for member in self.members:
            member.resume()
            member.start()
        for member in self.members:
            member.wait_ready()

    def kill(self) -> None:
        for member in self.members:
            member.kill()


@pytest.fixture(scope="session")
def running_trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    trio = Trio(tmp_path_factory.mktemp("trio"))
    try:
        trio.heal()
        yield trio
    finally:
        trio.kill()


@pytest.fixture
def trio(running_trio: Trio) -> Iterator[Trio]:
    """Three members, all well at the beginning of each test."""
    running_trio.heal()
    yield running_trio
    running_trio.heal()
