"""What is said of disks and of what moves to and from them: to people, programs and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from mooncaked.metrics import Reading
from mooncaked.pools.ssd import DeviceState, DeviceStats
from mooncaked.tiers.tiers import Tiers, TiersStats


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One disk, as /v1/status shows it."""

    directory: str
    state: str  # "active", "read_only", "failed" or "closed" (not opened yet)
    reason: str  # why it is not active; empty: it is
    capacity_bytes: int
    used_bytes: int  # of files that hold blocks
    live_bytes: int  # of blocks that can be read
    blocks: int
    read_bytes: int
    written_bytes: int
    errors: dict[str, int]  # by kind
    lost_blocks: dict[str, int]  # by reason


class TiersStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What moves between memory and disks, as /v1/status shows it; counters from the start on."""

    disks: list[DiskStatus]
    demoted_blocks: int
    demoted_bytes: int
    queued_bytes: int  # on their way to a disk
    unsaved_blocks: int  # worth a place on a disk, and evicted before they could be written
    promoted_blocks: int
    promoted_bytes: int
    failed_blocks: int  # a disk could not read them, or they were damaged
    waiting_blocks: int  # to be brought up


def tiers_status(tiers: Tiers) -> TiersStatus:
    """Everything, as of now."""
    stats = tiers.stats()
    demoted, raised = stats.demoted, stats.promoted.raised
    return TiersStatus(
        disks=[_disk(device) for device in tiers.devices()],
        demoted_blocks=demoted.blocks if demoted else 0,
        demoted_bytes=demoted.size if demoted else 0,
        queued_bytes=demoted.queued_bytes if demoted else 0,
        unsaved_blocks=stats.missed_blocks,
        promoted_blocks=raised.blocks,
        promoted_bytes=raised.size,
        failed_blocks=raised.failed,
        waiting_blocks=stats.promoted.queued,
    )


def disk_problems(devices: Sequence[DeviceStats]) -> list[str]:
    """A sentence for each disk that does not do all that it should."""
    bad = (DeviceState.READ_ONLY, DeviceState.FAILED)
    return [f"disk {d.name} is {d.state.replace('_', '-')}: {d.reason}" for d in devices if d.state in bad]


def _disk(device: DeviceStats) -> DiskStatus:
    return DiskStatus(
        directory=device.name,
        state=device.state.value,
        reason=device.reason,
        capacity_bytes=device.capacity_bytes,
        used_bytes=device.used_bytes,
        live_bytes=device.live_bytes,
        blocks=device.blocks,
        read_bytes=device.read_bytes,
        written_bytes=device.written_bytes,
        errors=device.errors,
        lost_blocks=device.lost,
    )


def readings(tiers: Tiers) -> list[Reading]:
    """The metrics of a node that has disks; none of one that has not."""
    if not tiers.devices():
        return []
    return [*_device_readings(tiers.devices), *_movement_readings(tiers.stats)]


def _device_readings(devices: Callable[[], Sequence[DeviceStats]]) -> list[Reading]:
    def each(name: str, doc: str, kind: Literal["gauge", "counter"] = "gauge") -> Reading:
        def read() -> dict[str, float]:
            return {device.name: getattr(device, name) for device in devices()}

        return Reading(f"mooncaked_ssd_{name}", kind, doc, read, "device")

    def summed(field: str) -> Mapping[str, float]:
        total: Counter[str] = Counter()
        for device in devices():
            total.update(getattr(device, field))
        return dict(total)

    def states() -> Mapping[str, float]:
        counts = Counter(device.state.value for device in devices())
        return {state.value: counts[state.value] for state in DeviceState}

    return [
        each("capacity_bytes", "What the files of a disk may occupy."),
        each("used_bytes", "Bytes of files that hold blocks."),
        each("live_bytes", "Bytes of blocks that can be read."),
        each("blocks", "Blocks that can be read."),
        each("read_bytes", "Bytes of values read.", "counter"),
        each("written_bytes", "Bytes of values written.", "counter"),
        each("device_written_bytes", "All bytes written, what was carried over included.", "counter"),
        Reading("mooncaked_ssd_devices", "gauge", "Disks, by what they do.", states, "state"),
        Reading("mooncaked_ssd_errors", "counter", "Errors, by kind.", lambda: summed("errors"), "kind"),
        Reading(
            "mooncaked_ssd_lost_blocks",
            "counter",
            "Blocks that a disk gave up or lost, by reason.",
            lambda: summed("lost"),
            "reason",
        ),
    ]


def _movement_readings(stats: Callable[[], TiersStats]) -> list[Reading]:
    def counter(name: str, doc: str, read: Callable[[TiersStats], float]) -> Reading:
        return Reading(f"mooncaked_ssd_{name}", "counter", doc, lambda: read(stats()))

    def gauge(name: str, doc: str, read: Callable[[TiersStats], float]) -> Reading:
        return Reading(f"mooncaked_ssd_{name}", "gauge", doc, lambda: read(stats()))

    def unpromoted() -> Mapping[str, float]:
        now = stats().promoted
        raised = now.raised
        return {"no_room": raised.no_room, "gone": raised.gone, "failed": raised.failed, "late": now.dropped}

    return [
        counter("demoted_blocks", "Blocks written.", lambda s: s.demoted.blocks if s.demoted else 0),
        counter("demoted_bytes", "Bytes of blocks written.", lambda s: s.demoted.size if s.demoted else 0),
        counter(
            "undemoted_blocks",
            "Blocks that no disk took: full, failed, or not writable.",
            lambda s: s.demoted.failed if s.demoted else 0,
        ),
        counter(
            "unsaved_blocks",
            "Blocks worth a place on a disk that were evicted before they could be written.",
            lambda s: s.missed_blocks,
        ),
        counter("unsaved_bytes", "Bytes of them.", lambda s: s.missed_bytes),
        counter("promoted_blocks", "Blocks brought up.", lambda s: s.promoted.raised.blocks),
        counter("promoted_bytes", "Bytes of blocks brought up.", lambda s: s.promoted.raised.size),
        Reading(
            "mooncaked_ssd_unpromoted_blocks",
            "counter",
            "Blocks that were asked for and not brought up, by why.",
            unpromoted,
            "result",
        ),
        counter("expected_blocks", "Blocks to be brought up ahead of need.", lambda s: s.promoted.expected),
        counter("stale_blocks", "Of them: there was no place or no time.", lambda s: s.promoted.stale),
        gauge(
            "demotion_queue_bytes",
            "Bytes of blocks on their way to a disk.",
            lambda s: s.demoted.queued_bytes if s.demoted else 0,
        ),
        gauge("promotion_queue_blocks", "Blocks waiting to be brought up.", lambda s: s.promoted.queued),
    ]
