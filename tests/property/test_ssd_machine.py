"""An SSD device against a model, on a disk that fills up, fails, flips a bit and loses power."""

from __future__ import annotations

import errno

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.errors import MooncakeError
from mooncaked.pools.ssd import DeviceState, SsdDevice, WriteStatus
from tests.fakes.faulty_disk import FaultyDisk, failing
from tests.fakes.manual_clock import ManualClock
from tests.fakes.ssd_model import Model

DIRECTORY = "/ssd"
SEGMENT = 128 << 10
CAPACITY = 5 * (SEGMENT + (16 << 10)) + (64 << 10)
KEYS = [b"key-%02d" % number for number in range(40)]
CALLS = ("pwritev", "fdatasync", "allocate", "open", "unlink", "sync_directory", "rename")


class SsdMachine(RuleBasedStateMachine):
    """One device through restarts, crashes and faults."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk(1 << 22)
        self.disk.make_directory(DIRECTORY)
        self.model = Model()
        self.flipped = self.broken = False
        self.device = self.make_device()
        self.device.open(lost=self.model.on_lost)

    def make_device(self) -> SsdDevice:
        return SsdDevice(
            DIRECTORY,
            CAPACITY,
            node_id="node-1",
            clock=ManualClock(),
            segment_bytes=SEGMENT,
            group_bytes=48 << 10,
            readers=1,
            autoflush=False,  # no thread decides when, so that an example replays
            disk=self.disk,
        )

    def reopen(self) -> None:
        self.mend_disk()
        self.model.restarted()
        self.device = self.make_device()
        self.device.open(lost=self.model.on_lost)
        assert self.device.state is DeviceState.ACTIVE

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True))
    def write(self, keys: list[bytes]) -> None:
        before = self.device.contains("tenant/model", keys)
        statuses = self.model.write(self.device, keys)
        for there, status in zip(before, statuses, strict=True):
            assert (status is WriteStatus.EXISTS) == there
            if not self.broken and self.device.state is DeviceState.ACTIVE:
                assert status in (WriteStatus.STORED, WriteStatus.EXISTS)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), durably=st.booleans())
    def remove(self, keys: list[bytes], durably: bool) -> None:
        self.model.remove(self.device, keys)
        if durably:
            self.model.flush(self.device)

    @rule(
        number=st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS]),
        call=st.sampled_from(CALLS),
        times=st.integers(1, 12),
        after=st.integers(0, 3),
    )
    def break_disk(self, number: int, call: str, times: int, after: int) -> None:
        self.disk.fault, self.broken = failing(number, call, times=times, after=after), True

    @rule()
    def mend_disk(self) -> None:
        self.disk.fault = lambda call, path: None
        self.disk.read_only = self.broken = False

    @rule()
    def turn_read_only(self) -> None:
        self.disk.read_only = self.broken = True

    @rule(seed=st.none() | st.integers(0, 1 << 16))
    def crash(self, seed: int | None) -> None:
        abandoned = self.device
        self.disk.crash(seed)
        self.disk.fault = failing(errno.EIO)  # whatever the old process still does reaches nobody
        abandoned.close()
        self.reopen()

    @rule()
    def restart(self) -> None:
        self.model.flush(self.device)
        self.device.close()
        self.reopen()

    @precondition(lambda self: not self.flipped and len(self.disk.paths()) > 2)
    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self.disk.paths()))
        size = len(self.disk.content(path))
        offset = data.draw(st.integers(0, max(0, size - 1)) | st.integers(0, min(8191, max(0, size - 1))))
        if offset < size:
            self.flipped = True
            self.disk.flip(path, offset, data.draw(st.integers(0, 7)))
            for allowed in self.model.allowed.values():
                allowed.add(0)  # any block may be the one that was hit

    @rule()
    def read_all(self) -> None:
        self.model.check(self.device)

    @invariant()
    def books_agree(self) -> None:
        self.device.check_integrity()
        assert self.disk.used <= CAPACITY

    def teardown(self) -> None:
        try:
            self.model.check(self.device)
            self.disk.crash(1)
            self.reopen()
            self.model.check(self.device)
        except MooncakeError as error:
            raise AssertionError(str(error)) from error
        finally:
            self.device.close()


TestSsdMachine = SsdMachine.TestCase
TestSsdMachine.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
