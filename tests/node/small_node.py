"""A node of only the parts that serve blocks: pool, store, unix socket, peer listener, fetcher.

In a test's own loop by `SmallNode`, or as a process that a test may kill:

    python -m tests.node.small_node --socket PATH [--peer HOST:PORT] [--node-id ID] [--size BYTES]

The process prints its peer address as one line once it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from mooncaked.api.counters import ApiCounters
from mooncaked.api.fetch import Fetcher, Locate
from mooncaked.api.pages import ClientPages
from mooncaked.api.peer import PeerServer
from mooncaked.api.protocol import RegionInfo
from mooncaked.api.sharing import SharedRegion
from mooncaked.api.unix import ClientServer
from mooncaked.checksums import Checksummer
from mooncaked.clock import SystemClock
from mooncaked.pools.dram import DramPool
from mooncaked.pools.shared_index import SharedIndex
from mooncaked.store import Store
from mooncaked.transports.tcp import TcpTransport


class SmallNode:
    """Started by `async with`."""

    def __init__(
        self,
        socket: Path,
        *,
        node_id: str = "n1",
        size: int = 64 << 20,
        peer: str = "127.0.0.1:0",
        peers: Mapping[str, str] | None = None,
        token: str | None = None,
        locate: Locate | None = None,
        direct: bool = True,
        fenced: bool | None = None,
        unix_options: Mapping[str, Any] | None = None,
        peer_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.socket = socket
        self.node_id = node_id
        self.peers = dict(peers or {})  # addresses by node id; may be changed while it runs
        self.pool = DramPool(size)
        epoch = secrets.randbits(63)
        self.index = SharedIndex(1 << 16, epoch, fenced=fenced)
        self.pages = ClientPages(self.index)
        self.store = Store(
            self.pool,
            high_watermark=0.95,
            low_watermark=0.9,
            epoch=epoch,
            clock=SystemClock(),
            followers=[self.index],
            readers=self.pages,
        )
        self.regions = [SharedRegion(RegionInfo(region=self.pool.region, size=self.pool.size), self.pool.fd)]
        self.peer_address = peer
        self._token = token
        self._direct = direct
        self._locate = locate
        self._unix_options = unix_options or {}
        self.fetch_options: dict[str, Any] = {}
        self._peer_options = peer_options or {}

    async def __aenter__(self) -> SmallNode:
        self.transport = TcpTransport(self.node_id, self._token, rng=random.Random(1))
        self.fetcher = Fetcher(
            self.store,
            self.transport,
            self.peers.get,
            self._locate,
            node_id=self.node_id,
            **self.fetch_options,
        )
        self.peer_server = PeerServer(
            self.store,
            node_id=self.node_id,
            address=self.peer_address,
            token=self._token,
            fetch=self.fetcher.fetch_from_thread,
            **self._peer_options,
        )
        self.checksummer = Checksummer(self.store)
        self.counters = ApiCounters()
        self._upkeep = asyncio.create_task(self._look_after())
        self.client_server = ClientServer(
            self.store,
            self.fetcher,
            lambda: self.regions,
            node_id=self.node_id,
            path=self.socket,
            token=self._token,
            pages=self.pages if self._direct else None,
            counters=self.counters,
            **self._unix_options,
        )
        await asyncio.to_thread(self.pool.prefault)
        try:
            await self.client_server.start()
            self.peer_address = self.peer_server.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.store.look_after()

    async def __aexit__(self, *_: object) -> None:
        self._upkeep.cancel()
        self.store.close()
        await self.client_server.close()
        await asyncio.to_thread(self.peer_server.close)
        self.transport.close()
        await self.fetcher.close()
        await asyncio.to_thread(self.checksummer.close)
        self.store.look_after()
        self.store.check_integrity()
        self.index.check_integrity()
        self.pages.close()
        self.index.close()
        self.pool.close()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--peer", default="127.0.0.1:0")
    parser.add_argument("--node-id", default="n1")
    parser.add_argument("--size", type=int, default=64 << 20)
    parser.add_argument("--peers", type=json.loads, default={})
    args = parser.parse_args()
    node = SmallNode(args.socket, node_id=args.node_id, size=args.size, peer=args.peer, peers=args.peers)
    async with node:
        print(node.peer_address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_main())
