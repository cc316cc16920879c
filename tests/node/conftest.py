"""Daemons for the tests of the node."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncakectl.local.etcd_server import EtcdServer, free_ports
from tests.node.daemons import Daemon, MakeDaemon


@pytest.fixture
def make_daemon(tmp_path: Path, etcd_endpoint: str, etcd_prefix: str) -> Iterator[MakeDaemon]:
    """`make_daemon("name", key__of_config="value")`: a daemon, not started, on the session's etcd."""
    made: list[Daemon] = []

    def make(name: str = "a", etcd: str = etcd_endpoint, **settings: str) -> Daemon:
        daemon = Daemon(tmp_path / name, etcd, etcd_prefix, **settings)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that the test may stop and start; not started."""
    client, peer = free_ports(2)
    server = EtcdServer(tmp_path / "etcd", client, peer, tmp_path / "etcd.log")
    yield server
    server.kill()


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of shared memory that is removed in the end, whatever a killed process leaves there."""
    folder = Path(tempfile.mkdtemp(prefix="mooncaked-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
