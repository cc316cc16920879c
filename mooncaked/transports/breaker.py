"""A breaker per peer: after a failure nobody waits for that peer again until some time has passed. Pure."""

from __future__ import annotations

import random

from mooncaked.clock import Clock

FIRST_S = 0.25
LONGEST_S = 5.0


class Breaker:
    """Closed while the peer works. A failure opens it for a time that doubles with each further one, up to
    `LONGEST_S`, with jitter; then a single attempt goes through, and decides."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self.failures = 0  # in a row
        self._open_until = 0.0
        self._trying = False  # the single attempt is under way

    def allow(self) -> bool:
        """Whether an attempt may be made now. If so, `succeeded` or `failed` must follow."""
        if not self.failures:
            return True
        if self._trying or self.wait_s() > 0:
            return False
        self._trying = True
        return True

    def wait_s(self) -> float:
        """Seconds until the next attempt may be made."""
        return max(0.0, self._open_until - self._clock.monotonic())

    def succeeded(self) -> None:
        """The peer works."""
        self.failures = 0
        self._trying = False

    def failed(self) -> bool:
        """The peer does not work; whether this is news."""
        self._trying = False
        self.failures += 1
        pause = min(LONGEST_S, FIRST_S * 2 ** min(self.failures - 1, 10))
        self._open_until = self._clock.monotonic() + pause * self._rng.uniform(0.75, 1.0)
        return self.failures == 1

    def undecided(self) -> None:
        """The attempt ended for a reason that says nothing about the peer."""
        self._trying = False
