"""The unix socket for the engines of the node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from mooncaked.api.counters import ApiCounters
from mooncaked.api.frames import RECEIVE_BYTES
from mooncaked.api.listen import UnixListener
from mooncaked.api.pages import ClientPages
from mooncaked.api.service import FRAME_TIMEOUT_S, HELLO_TIMEOUT_S, Reception
from mooncaked.api.session import (
    GRACE_S,
    RESERVED_S,
    EngineSession,
    Fetches,
    Hub,
)
from mooncaked.api.sharing import SharedRegion
from mooncaked.clock import Clock, SystemClock
from mooncaked.errors import Refused
from mooncaked.store import Store
from mooncaked.tiers.gpus import Gpus

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
_CLOSE_S = 2.0  # for connections to end when the server closes


class ClientServer:
    """Serves engines at a socket file, and passes them the pool's memory.

    An engine that disconnects, or dies, aborts what it was writing and ends what it had pinned."""

    def __init__(
        self,
        store: Store,
        fetcher: Fetches | None,
        regions: Callable[[], Sequence[SharedRegion]],
        *,
        node_id: str,
        path: Path,
        token: str | None = None,
        counters: ApiCounters | None = None,
        clock: Clock | None = None,
        pages: ClientPages | None = None,
        gpus: Gpus | None = None,
        writable: bool = True,
        connections_max: int = CONNECTIONS_MAX,
        hello_timeout_s: float = HELLO_TIMEOUT_S,
        frame_timeout_s: float = FRAME_TIMEOUT_S,
        grace_s: float = GRACE_S,
        reserved_s: float = RESERVED_S,
    ) -> None:
        """`fetcher` brings what is missing from other nodes; without one, such keys are misses. `regions` is
        asked with each greeting. With `pages`, the same that `store` asks, clients read without asking;
        unless `writable`, they cannot write into the pool, and send values instead."""
        clock = clock or SystemClock()
        counters = counters or ApiCounters()
        self._path = path
        self._connections_max = connections_max
        self._sessions: set[EngineSession] = set()
        self._empty = asyncio.Event()
        self._connected = counters.connections.labels("client")
        self._hub = Hub(
            store=store,
            fetcher=fetcher,
            regions=regions,
            pages=pages,
            writable=writable,
            buffer=memoryview(bytearray(RECEIVE_BYTES)),
            reception=Reception(node_id, store.epoch, token, counters, clock),
            counters=counters,
            clock=clock,
            admit=self._admit,
            leave=self._leave,
            gpus=gpus,
            hello_timeout_s=hello_timeout_s,
            frame_timeout_s=frame_timeout_s,
            grace_s=grace_s,
            reserved_s=reserved_s,
        )
        self._listener: UnixListener | None = None
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; raises `SocketInUse`, or `ConfigError` for a path that cannot be used."""
        self._listener = UnixListener(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: EngineSession(self._hub), sock=self._listener.socket
        )
        log.info("serving engines path=%s", self._path)

    async def close(self) -> None:
        """Stop listening and end all connections. May be called again, or without `start`."""
        if self._listener is None or self._server is None:
            return
        self._server.close()
        for session in list(self._sessions):
            session.end()
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._sessions:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            log.info("engines still connected at close count=%d", len(self._sessions))
        self._listener.close()
        self._listener = self._server = None

    def _admit(self, session: EngineSession) -> None:
        self._sessions.add(session)
        self._connected.set(len(self._sessions))
        if len(self._sessions) > self._connections_max:
            problem = f"{self._connections_max} engines are connected to this node already"
            raise Refused(problem=problem, remedy="Close connections that are not needed.")

    def _leave(self, session: EngineSession) -> None:
        self._sessions.discard(session)
        self._connected.set(len(self._sessions))
        if not self._sessions:
            self._empty.set()
