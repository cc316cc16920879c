"""Compares blocks from before a restart with their checksums: those that are wanted at once, the others one
after the other, last used first, at a bounded rate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import xxhash

from mooncaked.clock import Clock
from mooncaked.store import Store
from mooncaked.store.restart import Proof
from mooncaked.units import format_size

log = logging.getLogger(__name__)

RATE_BYTES_S = 1 << 30  # beside what engines do meanwhile
_BATCH = 16  # blocks
_BUSY_S = 0.02  # until blocks that others compare just now are done


class Verifier:
    """Of one store. A block that does not agree with its checksum is gone from then on: a miss."""

    def __init__(self, store: Store, clock: Clock, rate_bytes_s: float = RATE_BYTES_S) -> None:
        self._store = store
        self._clock = clock
        self._rate = rate_bytes_s

    def verify_keys(self, namespace: str, keys: Sequence[bytes]) -> int:
        """Compare those of `keys` that were not yet, now, in this thread; how many were compared."""
        proofs = self._store.take_unverified_keys(namespace, keys)
        self._prove(proofs)
        return len(proofs)

    def run(self, stop: threading.Event) -> bool:
        """Compare all that there are, in this thread; False when `stop` was set before the end."""
        begin, count, size, damaged = self._clock.monotonic(), 0, 0, 0
        while self._store.unverified:
            if stop.is_set():
                return False
            proofs = self._store.take_unverified(_BATCH)
            damaged += self._prove(proofs)
            count += len(proofs)
            size += sum(proof.size for proof in proofs)
            due_s = begin + size / self._rate - self._clock.monotonic()
            stop.wait(max(due_s, 0.0) if proofs else _BUSY_S)
        if count:
            took_s = self._clock.monotonic() - begin
            log.info(
                "blocks compared count=%d size=%s damaged=%d seconds=%.1f",
                count,
                format_size(size >> 20 << 20),
                damaged,
                took_s,
            )
        return True

    def _prove(self, proofs: Sequence[Proof]) -> int:
        """Compare pinned blocks and unpin them; how many were damaged."""
        whole: list[bool] = []
        for proof in proofs:
            with self._store.view(proof.region, proof.offset, proof.size) as value:
                whole.append(xxhash.xxh3_64_intdigest(value) == proof.checksum)
        self._store.set_verified([proof.pin for proof in proofs], whole)
        damaged = whole.count(False)
        if damaged:
            log.warning("blocks from before the restart are damaged, they are misses now count=%d", damaged)
        return damaged
