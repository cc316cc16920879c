"""A node's GPU memory as one client sees it: opened when it is first read, and valid as a `Mapping` is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mooncaked.api.protocol import GpuRegionInfo
from mooncaked.errors import IntegrityError

if TYPE_CHECKING:
    from mooncaked.pinning import HostPins


class GpuRegions:
    """Any thread may call. torch is imported when the first region is opened."""

    def __init__(self, regions: Sequence[GpuRegionInfo]) -> None:
        self._opening = threading.Lock()
        self._handles = {info.region: info.handle for info in regions}
        self._tensors: dict[int, Any] = {}

    def update(self, regions: Sequence[GpuRegionInfo]) -> None:
        """Learn of regions that the daemon has opened since."""
        self._handles = {info.region: info.handle for info in regions}

    def knows(self, region: int) -> bool:
        """Whether the daemon has named this region."""
        return region in self._handles

    def view(self, region: int, offset: int, size: int) -> Any:
        """Bytes of a region; see `Mapping.gpu_view`."""
        tensor = self._tensors.get(region)
        if tensor is None:
            tensor = self._open(region)
        if not 0 <= offset <= offset + size <= tensor.numel():
            detail = f"no bytes {offset}+{size} in region {region}"
            raise IntegrityError(what="the daemon's reply", detail=detail)
        return tensor[offset : offset + size]

    def _open(self, region: int) -> Any:
        from mooncaked.client.gpu import open_handle

        with self._opening:
            if region not in self._tensors:
                if region not in self._handles:
                    raise IntegrityError(what="the daemon's reply", detail=f"no region {region} in a GPU")
                self._tensors[region] = open_handle(self._handles[region])
            return self._tensors[region]


def lock_mapping(views: list[memoryview]) -> HostPins:
    """`mooncaked.client.gpu.lock_host_memory`, imported when it is called."""
    from mooncaked.client.gpu import lock_host_memory

    return lock_host_memory(views)
