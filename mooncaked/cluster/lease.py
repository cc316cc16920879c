"""Leases: what holds a key in etcd for as long as its owner lives.

Validity is local: a lease is good until the *send* time of the last acknowledged keepalive + ttl - margin,
on the monotonic clock, whatever the clocks of others say and however late the acknowledgement came. With

    interval = ttl/3    between keepalives
    attempt  = ttl/6    for one keepalive to one etcd member; then the next member is tried
    margin   = ttl/5    for clock drift and for what runs between a check of validity and its effect

interval + 2 * attempt + margin = 13/15 ttl < ttl: two dead members in a row do not cost a lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from mooncaked.clock import Clock

log = logging.getLogger(__name__)


class LeaseTimes(msgspec.Struct, frozen=True):
    """The durations that follow from a lease's time to live, in seconds."""

    ttl_s: float

    @property
    def interval_s(self) -> float:
        """From the sending of one keepalive to the sending of the next."""
        return self.ttl_s / 3

    @property
    def attempt_s(self) -> float:
        """How long one etcd member may take to acknowledge."""
        return self.ttl_s / 6

    @property
    def margin_s(self) -> float:
        """How much earlier than etcd the owner stops to rely on it."""
        return self.ttl_s / 5


class Lease:
    """A lease in etcd that a keeper renews in the background until `close`.

    `valid()` may turn false while etcd is away and true again when it is back in time; `lost` is set once,
    when etcd says that the lease is gone: then its keys are gone too, and the owner needs a new one.
    Threads: the keeper calls `acknowledged` and `lose` from any thread; the rest belongs to the event loop
    that made the lease, except `valid`, which any thread may ask.
    """

    def __init__(
        self,
        lease_id: int,
        ttl_s: float,
        sent_at_s: float,
        clock: Clock,
        *,
        what: str,
        end: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.id = lease_id
        self.what = what
        self.times = LeaseTimes(ttl_s)
        self.lost = asyncio.Event()
        self.lost_cause: str | None = None
        self._clock = clock
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.sent_at_s = sent_at_s  # when the last acknowledged keepalive was sent

    @property
    def valid_until_s(self) -> float:
        """Monotonic time up to which its owner may rely on it."""
        return self.sent_at_s + self.times.ttl_s - self.times.margin_s

    def valid(self) -> bool:
        """Whether its owner may rely on it now."""
        return self.lost_cause is None and not self._closed and self._clock.monotonic() < self.valid_until_s

    def acknowledged(self, sent_at_s: float) -> None:
        """A keepalive sent at `sent_at_s` was acknowledged (for keepers)."""
        self.sent_at_s = max(self.sent_at_s, sent_at_s)

    def lose(self, cause: str) -> None:
        """etcd has the lease no longer (for keepers)."""
        if self.lost_cause is None:
            self.lost_cause = cause
            log.info("lease lost what=%s lease=%x cause=%s", self.what, self.id, cause)
            try:
                self._loop.call_soon_threadsafe(self.lost.set)
            except RuntimeError:
                return  # the owner's event loop has ended, so nobody waits

    async def close(self, *, revoke: bool = True) -> None:
        """Stop to renew it and, unless told otherwise, remove it with its keys at once. Never raises: where
        etcd cannot be reached, they vanish by themselves after the ttl."""
        if not self._closed:
            self._closed = True
            await self._end(revoke and self.lost_cause is None)
