"""The GPU tier: copies of the blocks that are read most, in the memory of this node's GPUs."""

from __future__ import annotations

from mooncaked.gpu.books import DROPS_KEPT, Source
from mooncaked.gpu.parts import GpuTierStats
from mooncaked.gpu.tier import GpuTier

__all__ = ["DROPS_KEPT", "GpuTier", "GpuTierStats", "Source"]
