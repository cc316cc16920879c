"""What this project asks of etcd: the `Etcd` protocol and the values that cross it.

`EtcdSession` (etcd.py) is the real one; the tests' `FakeEtcd` keeps the same promises on a virtual clock,
and one contract suite runs against both. Keys are text, values are bytes. Every call ends within the
session's request timeout; what cannot be reached raises `Unreachable`, refused credentials raise
`Unauthenticated`, and anything that etcd declines raises `Refused`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from mooncaked.cluster.lease import Lease


class KeyValue(msgspec.Struct, frozen=True):
    """A key as etcd stores it."""

    key: str
    value: bytes
    create_revision: int  # revision at which the key came to be; the fencing term of an election key
    mod_revision: int  # revision of its last change
    lease: int = 0  # the lease that it vanishes with; 0: none


class Listing(NamedTuple):
    """The keys under a prefix, sorted, all as of one revision."""

    revision: int
    items: list[KeyValue]


# --- transactions --------------------------------------------------------------------------------------


class Compare(msgspec.Struct, frozen=True):
    """One condition of a transaction; see the functions below."""

    key: str
    create_revision: int | None = None
    mod_revision: int | None = None
    value: bytes | None = None


def absent(key: str) -> Compare:
    """`key` does not exist."""
    return Compare(key, create_revision=0)


def created_at(key: str, revision: int) -> Compare:
    """`key` exists and came to be at `revision`: whoever made it has it still."""
    return Compare(key, create_revision=revision)


def unchanged_since(key: str, mod_revision: int) -> Compare:
    """The last change of `key` was at `mod_revision`; 0: it does not exist."""
    return Compare(key, mod_revision=mod_revision)


def has_value(key: str, value: bytes) -> Compare:
    """`key` exists with exactly `value`."""
    return Compare(key, value=value)


class Put(msgspec.Struct, frozen=True):
    """Write `value` to `key`; with a lease, the key vanishes when that ends."""

    key: str
    value: bytes
    lease: int = 0


class Delete(msgspec.Struct, frozen=True):
    """Remove `key`."""

    key: str


class Get(msgspec.Struct, frozen=True):
    """Read `key`."""

    key: str


Op: TypeAlias = Put | Delete | Get


class TxnResult(msgspec.Struct, frozen=True):
    """What a transaction did."""

    succeeded: bool  # whether all conditions held, so that `then` ran and not `otherwise`
    revision: int  # of the store after it: the create and mod revision of what it wrote
    got: list[KeyValue | None] = []  # what its Gets read, in order


# --- watching ------------------------------------------------------------------------------------------


class Snapshot(msgspec.Struct, frozen=True):
    """Everything under the prefix as of `revision`; it replaces whatever was known before."""

    revision: int
    items: list[KeyValue]


class Event(msgspec.Struct, frozen=True):
    """One key was written (`value` is there) or removed (`value` is None)."""

    key: str
    value: KeyValue | None
    mod_revision: int


class Changes(msgspec.Struct, frozen=True):
    """Events in order of revision. All events of one revision come in the same `Changes`."""

    revision: int  # of the last event
    events: list[Event]


class Gap(msgspec.Struct, frozen=True):
    """Events between the last one and now cannot be had any more; a `Snapshot` follows."""

    reason: str


class Stalled(msgspec.Struct, frozen=True):
    """etcd cannot be reached; what was seen so far may be out of date. The watch goes on trying."""

    cause: str


class Live(msgspec.Struct, frozen=True):
    """The watch is open, for the first time or again after `Stalled`; what was missed comes next."""

    revision: int  # of the store, maybe of another key


WatchEvent: TypeAlias = Snapshot | Changes | Gap | Stalled | Live


# --- the seam ------------------------------------------------------------------------------------------


class Etcd(Protocol):
    """The few things that this project needs from etcd."""

    async def get(self, key: str) -> KeyValue | None:
        """The key as of now (linearizable), or None."""

    async def range(self, prefix: str) -> Listing:
        """All keys that start with `prefix`, read in pages at one revision."""

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """Write and return the revision. Applied once or not at all: after a timeout the key is read again
        and compared. Raises `OutcomeUnknown` where that cannot tell, `LeaseLost` when the lease is gone."""

    async def delete(self, key: str) -> bool:
        """Remove; whether it was there. Raises `OutcomeUnknown` like `put`."""

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()
    ) -> TxnResult:
        """Do `then` if every comparison holds, else `otherwise`, atomically. Never repeated after a timeout:
        `OutcomeUnknown` says that the caller must read and compare."""

    def watch(self, prefix: str, revision: int | None = None) -> AsyncGenerator[WatchEvent, None]:
        """Without `revision`: a `Snapshot`, then every change after it. With it: every change from that
        revision on. Goes on over restarts and compaction until closed; no event is lost or repeated unless a
        `Gap` says so. Raises `Unauthenticated` or `Refused` when etcd declines the watch."""

    async def grant(self, ttl_s: float, what: str) -> Lease:
        """A new lease, kept alive until it is closed or lost. `what` names its owner in logs. etcd may grant
        a longer `ttl_s` than asked for."""

    async def close(self) -> None:
        """End everything; leases are no longer kept alive, and their keys vanish in time."""
