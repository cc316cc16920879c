"""One local cluster with the real model for all scenarios of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.local import Local


@pytest.fixture(scope="session")
def cluster() -> Iterator[Local]:
    """Started once; `healed` gives each test a whole one."""
    directory = Path(tempfile.mkdtemp(prefix="mooncake-e2e-"))
    local = Local(directory)
    try:
        local.up()
        yield local
    finally:
        local.down()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def healed(cluster: Local) -> Local:
    """The cluster with every process alive, whatever an earlier test killed."""
    cluster.up()
    return cluster
