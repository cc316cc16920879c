"""Several SSDs as one tier."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from mooncaked.errors import MooncakeError
from mooncaked.pools.ssd.device import GROUP_BYTES, SsdDevice
from mooncaked.pools.ssd.model import (
    DeviceStats,
    Keep,
    Lost,
    Progress,
    ReadStatus,
    SsdEntry,
    SsdItem,
    WriteStatus,
)
from mooncaked.pools.ssd.reading import Pending
from mooncaked.types import Tier

log = logging.getLogger(__name__)


class SsdPool:
    """Blocks on `devices`, whose numbers are their places in the list. All methods may be called from any
    thread. A device that fails takes only its own blocks along, and one that is slow holds only who waits
    for it."""

    tier = Tier.SSD

    def __init__(self, devices: Sequence[SsdDevice]) -> None:
        self.devices = tuple(devices)

    def open(
        self, *, lost: Lost | None = None, keep: Keep | None = None, progress: Progress | None = None
    ) -> None:
        """Open all devices at a time. One that cannot be opened is `failed`, with the reason in its figures
        and the log; the others serve."""
        if not self.devices:
            return
        done = _Progress(len(self.devices), progress)
        with ThreadPoolExecutor(len(self.devices), thread_name_prefix="ssd-open") as threads:
            for number, device in enumerate(self.devices):
                threads.submit(self._open, device, number, lost, keep, done)

    def _open(
        self, device: SsdDevice, number: int, lost: Lost | None, keep: Keep | None, done: _Progress
    ) -> None:
        try:
            device.open(lost=lost, keep=keep, progress=lambda part, whole: done.note(number, part, whole))
        except (MooncakeError, OSError) as error:
            log.error("ssd device cannot be used directory=%s error=%r", device.directory, str(error))

    def write(self, items: Sequence[SsdItem]) -> list[WriteStatus]:
        """Write blocks and return when they are durable. Those that fit into one group go to one device, so
        that what belongs together is read back in one piece; more than that is spread."""
        known = self._known(items)
        results = [WriteStatus.EXISTS if there else WriteStatus.FAILED for there in known]
        parts = list(_cut(items, [number for number, there in enumerate(known) if not there]))
        load = {device: device.queued_bytes for device in self.devices}
        started = []
        for part in parts:
            if (device := _least(load)) is None:
                break
            chosen = [items[number] for number in part]
            if len(parts) == 1:
                for number, status in zip(part, device.write(chosen), strict=True):
                    results[number] = status
            else:
                load[device] += sum(item.data.nbytes for item in chosen)
                started.append((part, device.submit_write(chosen)))
        for part, future in started:
            for number, status in zip(part, future.result(), strict=True):
                results[number] = status
        return results

    def _known(self, items: Sequence[SsdItem]) -> list[bool]:
        """Which blocks there are on any device."""
        return [any(d.contains(item.namespace, [item.key])[0] for d in self.devices) for item in items]

    def contains(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks can be read; a look into a dict for each device, without a lock."""
        if len(self.devices) == 1:
            return self.devices[0].contains(namespace, keys)
        found = [device.contains(namespace, keys) for device in self.devices]
        return [any(column) for column in zip(*found, strict=True)] if found else [False] * len(keys)

    def lookup(self, namespace: str, keys: Sequence[bytes]) -> list[SsdEntry | None]:
        """The blocks of those names; None for what is not there."""
        result: list[SsdEntry | None] = [None] * len(keys)
        for device in self.devices:
            for number, entry in enumerate(device.lookup(namespace, keys)):
                result[number] = result[number] or entry
        return result

    def read_into(self, entries: Sequence[SsdEntry], views: Sequence[memoryview]) -> list[ReadStatus]:
        """Read each entry into its view of exactly its size, verified. Blocks; all devices read at a time."""
        results = [ReadStatus.GONE] * len(entries)
        started: list[tuple[SsdDevice, list[int], Pending]] = []
        try:
            for number, device in enumerate(self.devices):
                own = [place for place, entry in enumerate(entries) if entry.device == number]
                if own:
                    pending = device.start_read([entries[i] for i in own], [views[i] for i in own])
                    started.append((device, own, pending))
        finally:
            for device, own, pending in started:
                statuses = pending.result()
                device.count_read([entries[i] for i in own], statuses)
                for place, status in zip(own, statuses, strict=True):
                    results[place] = status
        return results

    def remove(self, namespace: str, keys: Sequence[bytes]) -> list[bool]:
        """Make blocks unreadable, at once and without touching the disk; see `SsdDevice.remove`."""
        found = [device.remove(namespace, keys) for device in self.devices]
        return [any(column) for column in zip(*found, strict=True)] if found else [False] * len(keys)

    def flush(self) -> bool:
        """Make removals durable; False when a disk did not take them."""
        return min([device.flush() for device in self.devices], default=True)  # all of them, whatever comes

    def entries(self) -> Iterator[SsdEntry]:
        """Every block that can be read."""
        for device in self.devices:
            yield from device.entries()

    def stats(self) -> list[DeviceStats]:
        """The figures of each device."""
        return [device.stats() for device in self.devices]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless each device's books fit together."""
        for device in self.devices:
            device.check_integrity()

    def close(self) -> None:
        """Close all devices. May be called again."""
        for device in self.devices:
            device.close()


class _Progress:
    """One progress of several devices."""

    def __init__(self, devices: int, told: Progress | None) -> None:
        self._parts = [(0, 0)] * devices
        self._told = told

    def note(self, number: int, done: int, total: int) -> None:
        self._parts[number] = (done, total)
        if self._told is not None:
            self._told(sum(part for part, _ in self._parts), sum(whole for _, whole in self._parts))


def _least(load: dict[SsdDevice, int]) -> SsdDevice | None:
    """The device with the least to do that takes writes, and of equal ones that with the most room."""
    writable = [device for device in load if device.writable]
    return min(writable, key=lambda device: (load[device], device.used_share()), default=None)


def _cut(items: Sequence[SsdItem], numbers: Sequence[int]) -> Iterator[list[int]]:
    """The numbers in runs of at most a group's bytes."""
    part: list[int] = []
    size = 0
    for number in numbers:
        size += items[number].data.nbytes
        if part and size > GROUP_BYTES:
            yield part
            part, size = [], items[number].data.nbytes
        part.append(number)
    if part:
        yield part
