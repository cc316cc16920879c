"""The cluster as a gateway sees it, set by the test instead of by etcd."""

from __future__ import annotations

from collections.abc import Callable

from mooncaked.cluster.records import Leader
from mooncaked.types import CandidateRecord, InstanceRecord, NodePhase, NodeRecord


def node_record(node_id: str, peer_address: str = "127.0.0.1:1", **changes: object) -> NodeRecord:
    fields: dict[str, object] = {
        "node_id": node_id,
        "phase": NodePhase.READY,
        "host": "here",
        "pid": 1,
        "version": "1",
        "peer_address": peer_address,
        "http_address": "127.0.0.1:2",
        "client_socket": "/run/x.sock",
        "capacity_bytes": {"dram": 1 << 30},
        "started_at_s": 1_700_000_000.0,
        "epoch": 1,
    }
    return NodeRecord(**(fields | changes))  # type: ignore[arg-type]


def candidate_record(candidate_id: str, gateway_url: str) -> CandidateRecord:
    return CandidateRecord(
        candidate_id=candidate_id,
        gateway_url=gateway_url,
        host="here",
        pid=1,
        version="1",
        started_at_s=1_700_000_000.0,
    )


class FakeView:
    """Change an attribute, then call `tell`."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.instances: dict[str, InstanceRecord] = {}
        self.leader: Leader | None = None
        self.connected = True
        self.complete = True
        self.problem = ""
        self.stale_since: float | None = None
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def tell(self) -> None:
        for callback in list(self._callbacks):
            callback()
