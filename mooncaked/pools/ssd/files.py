"""The segment files of a device, of which a bounded number is open at a time."""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mooncaked.failpoints import failpoint
from mooncaked.pools.ssd.disk import Disk

log = logging.getLogger(__name__)

OPEN_MAX = 256
_SUFFIX = ".segment"


@dataclass(slots=True)
class _Open:
    fd: int
    users: int = 0


class SegmentFiles:
    """Files `00000017.segment` in a directory, by slot number."""

    def __init__(self, disk: Disk, directory: str, segment_bytes: int, open_max: int = OPEN_MAX) -> None:
        self.disk = disk
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.direct = True  # until the file system says that it has no O_DIRECT
        self.writable = True  # until it says that it is read-only
        self._open_max = open_max
        self._open: OrderedDict[int, _Open] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def path(self, slot: int) -> str:
        """Where the file of a slot is."""
        return str(Path(self.directory, f"{slot:08d}{_SUFFIX}"))

    def slots(self) -> list[int]:
        """The slots that have files, in order; raises `OSError`."""
        names = [
            name.removesuffix(_SUFFIX) for name in self.disk.listdir(self.directory) if name.endswith(_SUFFIX)
        ]
        return sorted(int(name) for name in names if len(name) == 8 and name.isdigit())

    def is_whole(self, slot: int) -> bool:
        """Whether the file was ever allocated to its end."""
        return self.disk.size(self.path(slot)) == self.segment_bytes

    @contextmanager
    def use(self, slot: int) -> Iterator[int]:
        """The number of the open file, good within the context; raises `OSError`."""
        with self._lock:
            file = self._open.get(slot)
            if file is None:
                file = self._open[slot] = _Open(self._open_file(slot))
            self._open.move_to_end(slot)
            file.users += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.users -= 1
                self._trim()

    def _open_file(self, slot: int) -> int:
        path = self.path(slot)
        if self.direct:
            try:
                return self._open_for(path, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                log.warning(
                    "no O_DIRECT here, the page cache is used directory=%s cause=%s", self.directory, error
                )
        return self._open_for(path, direct=False)

    def _open_for(self, path: str, direct: bool) -> int:
        if self.writable:
            try:
                return self.disk.open(path, direct=direct)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES):
                    raise
                self.writable = False
        return self.disk.open(path, write=False, direct=direct)

    def _trim(self) -> None:
        while len(self._open) > self._open_max:
            slot = next((slot for slot, file in self._open.items() if not file.users), None)
            if slot is None:
                return
            self.disk.close(self._open.pop(slot).fd)

    def create(self, slot: int) -> None:
        """Make the file of a slot and give it all its room; raises `OSError`, and then leaves nothing."""
        failpoint("ssd.segment.before_allocate")
        fd = self.disk.open(self.path(slot), create=True)
        try:
            self.disk.allocate(fd, self.segment_bytes)
        except OSError:
            self.disk.unlink(self.path(slot))
            raise
        finally:
            self.disk.close(fd)
        failpoint("ssd.segment.before_directory_sync")
        self.disk.sync_directory(self.directory)

    def delete(self, slot: int) -> None:
        """Remove the file of a slot, which nobody uses; raises `OSError`."""
        self.forget(slot)
        self.disk.unlink(self.path(slot))

    def forget(self, slot: int) -> None:
        """Close the file of a slot, which nobody uses."""
        with self._lock:
            file = self._open.pop(slot, None)
        if file is not None:
            self.disk.close(file.fd)

    def close(self) -> None:
        """Close all files; those in use as soon as they are not."""
        with self._lock:
            self._open_max = 0
            self._trim()
