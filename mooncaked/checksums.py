"""Works out the checksums of values that were stored without one, in a thread, as soon as they are there."""

from __future__ import annotations

import threading

import xxhash

from mooncaked.store import Store

_WAIT_S = 1.0  # between looks whether this is to end
_GATHER_S = 0.02  # after the first, so that values that come one by one are looked at together
_AT_ONCE = 16  # blocks that are pinned meanwhile
_CLOSE_S = 10.0


class Checksummer:
    """Started at once; `close` ends it before the store's memory goes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, when all that was stored has its checksum: what has none is lost with a restart. To
        be called after `store.close`, which wakes it."""
        self._ending.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._ending.is_set():
            if self._store.wait_unchecked(_WAIT_S):
                self._ending.wait(_GATHER_S)
                while self._look():
                    pass
        while self._look():
            pass

    def _look(self) -> bool:
        """Work out some; whether there were any."""
        proofs = self._store.take_unchecked(_AT_ONCE)
        checksums = []
        for proof in proofs:
            view = self._store.view(proof.region, proof.offset, proof.size)
            checksums.append(xxhash.xxh3_64_intdigest(view))
        self._store.set_checksums([proof.pin for proof in proofs], checksums)
        return bool(proofs)
