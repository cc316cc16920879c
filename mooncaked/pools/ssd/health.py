"""Whether a device can be relied on: it takes itself out when it keeps failing, and says why."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter

from mooncaked.pools.ssd.model import DeviceState

log = logging.getLogger(__name__)

FAILURES_MAX = 5  # in a row
_FULL = (errno.ENOSPC, errno.EDQUOT)


def error_kind(error: OSError, doing: str) -> str:
    """The name that an error is counted under, of a small fixed set; `doing` is "read" or "write"."""
    if error.errno in _FULL:
        return "disk_full"
    return "read_only" if error.errno == errno.EROFS else f"{doing}_error"


def is_full(error: OSError) -> bool:
    """Whether the file system had no room."""
    return error.errno in _FULL


class Health:
    """State of one device. Failed writes take it out for writes, failed reads altogether."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = DeviceState.CLOSED
        self.reason = ""
        self.errors: Counter[str] = Counter()  # by kind
        self._failed_reads = 0  # in a row
        self._failed_writes = 0
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    @property
    def writable(self) -> bool:
        """Whether the device takes new blocks."""
        return self.state is DeviceState.ACTIVE

    @property
    def readable(self) -> bool:
        """Whether blocks can be read."""
        return self.state in (DeviceState.ACTIVE, DeviceState.READ_ONLY)

    def opened(self, read_only: str = "") -> None:
        """The device serves; `read_only` says why it does only that."""
        with self._lock:
            self.state = DeviceState.READ_ONLY if read_only else DeviceState.ACTIVE
            self.reason = read_only

    def closed(self) -> None:
        """The device serves no more; what it failed of is still to be seen."""
        with self._lock:
            if self.state is not DeviceState.FAILED:
                self.state = DeviceState.CLOSED

    def note(self, kind: str, detail: str, remedy: str) -> None:
        """Count an error; the first of its kind is logged."""
        with self._lock:
            self.errors[kind] += 1
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning(
                "ssd device has errors, further ones are only counted device=%s kind=%s error=%r remedy=%r",
                self.name,
                kind,
                detail,
                remedy,
            )

    def write_failed(self, error: OSError) -> None:
        """A write, a sync or a change of files failed."""
        kind, text = error_kind(error, "write"), os.strerror(error.errno or 0)
        self.note(kind, text, _REMEDIES[kind])
        self._failed_writes += 1
        if kind == "read_only":
            self._leave(DeviceState.READ_ONLY, f"the file system is read-only ({text})")
        elif self._failed_writes >= FAILURES_MAX:
            self._leave(
                DeviceState.READ_ONLY, f"{FAILURES_MAX} writes in a row failed, the last with: {text}"
            )

    def write_worked(self) -> None:
        """A write became durable."""
        self._failed_writes = 0

    def read_failed(self, error: OSError) -> bool:
        """A read failed; True when that was one too many, and the device holds nothing from now on."""
        text = os.strerror(error.errno or 0)
        self.note("read_error", text, _REMEDIES["read_error"])
        self._failed_reads += 1
        if self._failed_reads < FAILURES_MAX:
            return False
        reason = f"{FAILURES_MAX} reads in a row failed, the last with: {text}"
        return self._leave(DeviceState.FAILED, reason)

    def read_worked(self) -> None:
        """A read came back."""
        self._failed_reads = 0

    def fail(self, reason: str) -> None:
        """The device cannot be used at all."""
        self._leave(DeviceState.FAILED, reason)

    def _leave(self, state: DeviceState, reason: str) -> bool:
        """Take the device out; False when it was at least as far out before."""
        with self._lock:
            if self.state in (state, DeviceState.FAILED):
                return False
            self.state, self.reason = state, reason
        log.error(
            "ssd device takes itself out device=%s state=%s reason=%r remedy=%r",
            self.name,
            state,
            reason,
            "check the disk (dmesg, smartctl), then restart the node to try it again",
        )
        return True


_REMEDIES = {
    "disk_full": "free room in the file system, or lower its size in ssd.devices",
    "read_only": "check the disk, mount it writable again and restart the node",
    "write_error": "check the disk (dmesg, smartctl)",
    "read_error": "check the disk (dmesg, smartctl); blocks that cannot be read are dropped",
}
