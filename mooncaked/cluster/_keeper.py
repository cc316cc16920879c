"""Keeps one lease alive from a thread of its own.

The thread has its own connection, login and ring of members, and uses gRPC's blocking form, which shares no
event loop with anything: whatever the program's loops are busy with, keepalives go out. A keepalive is sent
as a call of its own with one request and one answer (on the wire the same as a stream that is closed after
its first message), so each has a deadline and none hangs on a member that has stopped to answer.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

import grpc

from mooncaked.clock import Clock
from mooncaked.cluster._calls import Caller
from mooncaked.cluster._etcd3 import rpc, stubs
from mooncaked.cluster._rpc import CHANNEL_OPTIONS, Failure, Ring, broken, metadata
from mooncaked.cluster.lease import Lease

log = logging.getLogger(__name__)

_PAUSE_S = 0.05  # after the first failed attempt; longer after each further one, up to half an interval
_PATIENCE_MAX = 6  # times the usual length of an attempt: a whole ttl
_JOIN_S = 1.0
_KEEPALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"


class Keeper:
    """The thread that renews `lease` until `stop`, or until etcd says that the lease is gone."""

    def __init__(self, lease: Lease, caller: Caller, clock: Clock) -> None:
        self._lease = lease
        # Starts at a member of its own choice, which spreads the keepers of many programs over the members.
        self._ring = Ring(caller.ring.addresses, random.Random())
        self._credentials = caller.credentials
        self._options = caller.options
        self._clock = clock
        self._token = caller.token  # the session's at first; when that ages, one of its own
        self._log_in = False
        self._channels: dict[str, Any] = {}
        self._failures = 0  # in a row
        self._in_flight: Any = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{lease.what}", daemon=True)

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs for as long as it should."""
        return self._thread.is_alive() or self._stopped.is_set() or self._lease.lost_cause is not None

    def stop(self) -> None:
        """End the thread, and the keepalive in flight with it. Returns within moments."""
        self._stopped.set()
        if (call := self._in_flight) is not None:
            call.cancel()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._wait_s()) and self._lease.lost_cause is None:
                answered = self._attempt(self._timeout_s())
                self._failures = 0 if answered else self._failures + 1
        finally:
            for channel in self._channels.values():
                channel.close()

    def _timeout_s(self) -> float:
        """Longer after each round in which no member answered: they may be slow rather than dead."""
        rounds = self._failures // len(self._ring.addresses)
        return self._lease.times.attempt_s * min(1 + rounds, _PATIENCE_MAX)

    def _wait_s(self) -> float:
        if self._failures:
            return min(_PAUSE_S * self._failures, self._lease.times.interval_s / 2)
        due = self._lease.sent_at_s + self._lease.times.interval_s
        return max(0.0, due - self._clock.monotonic())

    def _attempt(self, timeout_s: float) -> bool:
        """Send one keepalive; True when etcd has answered it, in either sense."""
        address = self._ring.current
        sent_at_s = self._clock.monotonic()
        try:
            reply = self._keep_alive(address, timeout_s)
        except grpc.FutureCancelledError:
            return False  # by `stop`
        except grpc.RpcError as error:
            failure, cause = broken(error)
            if failure is Failure.LEASE_GONE:
                self._lease.lose(cause)
                return True
            if failure is Failure.STALE_TOKEN:
                self._log_in = bool(self._options.user)
            else:
                self._ring.failed(address)
            log.debug("keepalive failed what=%s etcd=%s cause=%s", self._lease.what, address, cause)
            return False
        if reply.TTL <= 0:
            self._lease.lose("etcd has expired it")
        else:
            self._lease.acknowledged(sent_at_s)
        return True

    def _keep_alive(self, address: str, timeout_s: float) -> Any:
        channel = self._channel(address)
        if self._log_in:
            self._token = self._authenticate(channel, max(timeout_s, self._lease.times.interval_s))
            self._log_in = False
        call = channel.unary_unary(
            _KEEPALIVE,
            request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
        )
        request = rpc.LeaseKeepAliveRequest(ID=self._lease.id)
        self._in_flight = call.future(request, timeout=timeout_s, metadata=metadata(self._token))
        return self._in_flight.result()

    def _authenticate(self, channel: Any, timeout_s: float) -> str | None:
        request = rpc.AuthenticateRequest(name=self._options.user, password=self._options.password)
        try:
            return str(stubs.AuthStub(channel).Authenticate(request, timeout=timeout_s).token)
        except grpc.RpcError as error:
            if "authentication is not enabled" in (broken(error).details):
                return None
            raise

    def _channel(self, address: str) -> Any:
        if address not in self._channels:
            credentials = self._credentials
            self._channels[address] = (
                grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                if credentials is None
                else grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
            )
        return self._channels[address]
