"""What the engine counts, under names that begin with `mooncaked_engine_`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from mooncaked.engines.reference.kv_cache import BlockAllocator
from mooncaked.engines.reference.kv_store import StoreCounts
from mooncaked.engines.reference.scheduler import Scheduler
from mooncaked.metrics import Reading, Readings

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class EngineCounters:
    """All of them, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str, *labels: str) -> Counter:
            return Counter(f"mooncaked_engine_{name}", doc, labels, registry=registry)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mooncaked_engine_{name}", doc, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests ended, by how: stop, length, cancelled, failed.", "end")
        self.computed_tokens = counter("computed_prompt_tokens", "Prompt tokens whose KV was computed here.")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens whose KV came from the store.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated here.")
        self.ttft = histogram("ttft_seconds", "From a request's arrival to its first token.", _TTFT_S)
        self.tbt = histogram("tbt_seconds", "Between two tokens of one request.", _TBT_S)


def readings(scheduler: Scheduler, allocator: BlockAllocator, store: StoreCounts | None) -> Readings:
    """What is read from its owner when somebody asks."""
    items = [
        _gauge("waiting_requests", "Requests that wait for KV blocks.", lambda: len(scheduler.waiting)),
        _gauge("running_requests", "Requests that hold KV blocks.", lambda: len(scheduler.running)),
        _gauge("kv_blocks", "KV blocks of the cache.", lambda: allocator.total),
        _gauge("kv_free_blocks", "KV blocks that nobody holds.", lambda: allocator.free_blocks),
    ]
    if store is not None:
        items += [
            _total("store_loaded_blocks", "Blocks read from the store.", lambda: store.loaded_blocks),
            _total("store_loaded_bytes", "Bytes read from the store.", lambda: store.loaded_bytes),
            _total("store_missed_blocks", "Blocks asked of the store in vain.", lambda: store.missed_blocks),
            _total("store_saved_blocks", "Blocks written, or there already.", lambda: store.saved_blocks),
            _total("store_failures", "Exchanges with the store that failed.", lambda: store.failures),
        ]
    return Readings(items)


def _gauge(name: str, doc: str, read: Callable[[], float]) -> Reading:
    return Reading(f"mooncaked_engine_{name}", "gauge", doc, read)


def _total(name: str, doc: str, read: Callable[[], float]) -> Reading:
    return Reading(f"mooncaked_engine_{name}", "counter", doc, read)
