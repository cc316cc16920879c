"""The node's one writer: every block of the node comes, is read and goes through a `Store`.

Thread-safe, with one lock. Under it only the books are kept: bytes are copied by the callers, outside, into
slots that `begin_put` gave them and out of blocks that they pinned. So any thread and any event loop may call
any method; the `wait_...` methods are the only ones that wait.

Every change that a reader can see is an event with a number. Events are numbered under the lock that makes
the change, so a `snapshot` and the events after its number give the exact contents.
"""

from __future__ import annotations

from mooncaked.store.books import (
    BLOCKS_MAX,
    EVENTS_KEPT,
    PINS_PER_OWNER_MAX,
    BlockInfo,
    DirectReaders,
    DirectUses,
    Follower,
    LowerBlock,
    LowerTier,
    Restored,
    UpperTier,
)
from mooncaked.store.lower import Leave, Leaving
from mooncaked.store.restart import Proof, RestoreReport
from mooncaked.store.store import Store

__all__ = [
    "BLOCKS_MAX",
    "EVENTS_KEPT",
    "PINS_PER_OWNER_MAX",
    "BlockInfo",
    "DirectReaders",
    "DirectUses",
    "Follower",
    "Leave",
    "Leaving",
    "LowerBlock",
    "LowerTier",
    "Proof",
    "RestoreReport",
    "Restored",
    "Store",
    "UpperTier",
]
