"""Orders to nodes: blocks that a placed request will read come off a node's disks while it waits its turn.

Nobody waits for an order, and none is sent twice: one that does not arrive costs the time that the engine's
own fetch takes to read those blocks. So each node has a short queue, and a connection only while there is
something to say; what finds the queue full, and what a node does not answer, is counted and forgotten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from mooncaked.api.protocol import BATCH_KEYS_MAX, Kind, Order, OrderReply
from mooncaked.conductor.link import Link, Stream
from mooncaked.conductor.messages import Prefetch
from mooncaked.errors import MooncakeError, StaleTerm
from mooncaked.types import NodeRecord

log = logging.getLogger(__name__)

QUEUE_MAX = 32  # orders that wait for one node
LINGER_S = 5.0  # how long a connection stays open for the next order
RESULTS = ("obeyed", "stale", "full", "failed")


class Orders:
    """`nodes` gives the records of the nodes that exist now; `count` is told one of `RESULTS` per order.

    For one event loop. Call `close` at the end."""

    def __init__(
        self, nodes: Callable[[], Mapping[str, NodeRecord]], token: str | None, count: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._link = Link(token, "an order")
        self._count = count
        self._lines: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stale_term = -1  # the latest that a node has refused

    def prefetch(self, term: int, wanted: Sequence[Prefetch]) -> None:
        """Order it, in the background. Never waits and never raises."""
        for part in wanted:
            keys = part.keys[:BATCH_KEYS_MAX]
            order = Order(term=term, action="prefetch", namespace=part.namespace, keys=keys)
            self._put(part.node_id, order)

    async def close(self) -> None:
        """Forget what is queued, and end the connections."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _put(self, node_id: str, order: Order) -> None:
        line = self._lines.get(node_id)
        if line is None:
            record = self._nodes().get(node_id)
            if record is None:
                self._count("failed")
                return
            line = self._lines[node_id] = _Line(record)
            task = asyncio.create_task(self._serve(line), name=f"orders-{node_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            line.queue.put_nowait(order)
        except asyncio.QueueFull:
            self._count("full")

    async def _serve(self, line: _Line) -> None:
        """Deliver what is queued for one node, until nothing more comes or the node fails."""
        node_id = line.record.node_id
        try:
            async with self._link.open(line.record) as stream:
                while (order := await line.next()) is not None:
                    self._count(await self._deliver(stream, order, node_id))
                del self._lines[node_id]  # before the connection closes, which takes a moment
        except MooncakeError as error:
            for _ in range(line.queue.qsize()):
                self._count("failed")
            log.info("orders not delivered node=%s queued=%d cause=%s", node_id, line.queue.qsize(), error)
        finally:
            if self._lines.get(node_id) is line:
                del self._lines[node_id]

    async def _deliver(self, stream: Stream, order: Order, node_id: str) -> str:
        """Send one order and hear the answer; raises what ends the connection."""
        try:
            await stream.ask(Kind.ORDER, order, OrderReply)
        except StaleTerm as error:
            if order.term > self._stale_term:
                self._stale_term = order.term
                log.warning("order refused node=%s term=%d cause=%s", node_id, order.term, error)
            return "stale"
        except MooncakeError:
            self._count("failed")
            raise
        return "obeyed"


class _Line:
    """The orders that wait for one node."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.queue: asyncio.Queue[Order] = asyncio.Queue(QUEUE_MAX)

    async def next(self) -> Order | None:
        """The next order; None when none came for `LINGER_S`."""
        try:
            async with asyncio.timeout(LINGER_S):
                return await self.queue.get()
        except TimeoutError:
            return None if self.queue.empty() else self.queue.get_nowait()
