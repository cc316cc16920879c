"""The GPU tier's metrics."""

from __future__ import annotations

from collections.abc import Callable

from mooncaked.gpu.parts import GpuTierStats
from mooncaked.metrics import Reading


def readings(stats: Callable[[], GpuTierStats]) -> list[Reading]:
    """What `/metrics` shows of a tier that says `stats` of itself."""

    def of(pick: Callable[[GpuTierStats], float]) -> Callable[[], float]:
        return lambda: pick(stats())

    return [
        Reading(
            "mooncaked_gpu_capacity_bytes", "gauge", "Size of the GPU pools.", of(lambda s: s.capacity_bytes)
        ),
        Reading(
            "mooncaked_gpu_used_bytes", "gauge", "GPU memory that blocks have.", of(lambda s: s.used_bytes)
        ),
        Reading("mooncaked_gpu_blocks", "gauge", "Blocks in GPU memory.", of(lambda s: s.blocks)),
        Reading(
            "mooncaked_gpu_in_flight_bytes",
            "gauge",
            "On the way into GPU memory.",
            of(lambda s: s.in_flight_bytes),
        ),
        Reading("mooncaked_gpu_usable", "gauge", "0: the device failed.", of(lambda s: float(not s.failure))),
        Reading(
            "mooncaked_gpu_reads",
            "counter",
            "Blocks that were asked for in GPU memory.",
            lambda: {"hit": (now := stats()).hits, "miss": now.misses},
            label="result",
        ),
        Reading("mooncaked_gpu_promoted_bytes", "counter", "Copied in.", of(lambda s: s.promoted_bytes)),
        Reading("mooncaked_gpu_evicted_blocks", "counter", "Gone to make room.", of(lambda s: s.evicted)),
        Reading(
            "mooncaked_gpu_refused_blocks",
            "counter",
            "Not brought in, by reason.",
            lambda: dict(stats().refused),
            label="reason",
        ),
    ]
