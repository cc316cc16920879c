"""Memory that runs out while the pool is taken: the node gives everything back and says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncaked.config import load_config
from mooncaked.daemon import run_node
from mooncaked.errors import NotEnoughMemory
from mooncaked.lifecycle import Launch
from mooncaked.pools.dram import DramPool


async def test_memory_that_runs_out_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefault(pool: DramPool, *_: object) -> bool:
        raise NotEnoughMemory(key="dram.size", size=pool.size, cause="the system gave 0 bytes")

    monkeypatch.setattr(DramPool, "prefault", prefault)
    socket_path = tmp_path / "c.sock"
    settings = {
        "node.state_dir": str(tmp_path / "state"),
        "listen.client_socket": str(socket_path),
        "listen.peer": "127.0.0.1:0",
        "listen.http": "127.0.0.1:0",
        "dram.size": "1MiB",
        "dram.warm_restart": "off",
        "etcd.endpoints": "127.0.0.1:1",
        "etcd.request_timeout": "200ms",
        "conductor.listen": "127.0.0.1:0",
    }
    config = load_config(None, settings)
    launch = Launch(config=config, origin="test", reread=lambda: config, environment={})
    with pytest.raises(ExceptionGroup) as caught:
        await run_node(launch)
    (error,) = caught.value.exceptions
    assert isinstance(error, NotEnoughMemory)
    assert not socket_path.exists()
