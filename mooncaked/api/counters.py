"""What the daemon's listeners count; one instance for all of them, on an injected registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncaked.api.protocol import Kind

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class ApiCounters:
    """Metrics of the unix socket, the peer listener and fetches."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = registry or CollectorRegistry()
        requests = Counter(
            "mooncaked_requests_total", "Requests answered, by kind.", ["kind"], registry=registry
        )
        self.requests = {kind: requests.labels(kind.name.lower()) for kind in Kind}
        self.refusals = Counter(
            "mooncaked_refusals_total",
            "Connections and requests refused, by the error's code.",
            ["code"],
            registry=registry,
        )
        self.connections = Gauge(
            "mooncaked_connections", "Open connections, by listener.", ["listener"], registry=registry
        )
        self.fetched_blocks = Counter(
            "mooncaked_fetched_blocks_total", "Blocks fetched from other nodes.", registry=registry
        )
        self.fetched_bytes = Counter(
            "mooncaked_fetched_bytes_total", "Bytes of blocks fetched from other nodes.", registry=registry
        )
        self.fetch_failures = Counter(
            "mooncaked_fetch_failures_total",
            "Fetches from a node that ended with an error, by the error's code.",
            ["code"],
            registry=registry,
        )
        self.fetch_seconds = Histogram(
            "mooncaked_fetch_seconds",
            "Time that requests waited for blocks of other nodes.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.sent_bytes = Counter(
            "mooncaked_peer_sent_bytes_total", "Bytes of blocks sent to other nodes.", registry=registry
        )
