"""Records as they lie in etcd: JSON, readable with etcdctl. One that does not decode is skipped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from mooncaked.cluster import keys
from mooncaked.cluster.kv import Etcd, KeyValue
from mooncaked.types import CandidateRecord, InstanceRecord, NodeRecord, TermRecord

log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)


def encode(record: msgspec.Struct) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record)


def decode(kv: KeyValue, cls: type[R]) -> R | None:
    """The record in `kv`, or None and a warning when it is none. Unknown fields are ignored: a newer version
    may write more."""
    try:
        return msgspec.json.decode(kv.value, type=cls)
    except msgspec.MsgspecError as error:
        log.warning("record ignored key=%s cause=%s", kv.key, error)
        return None


class Decoded(Generic[R]):
    """Decodes the records of a prefix, each version of a record once (so that a bad one is logged once)."""

    def __init__(self, cls: type[R], prefix: str) -> None:
        self._cls, self._prefix = cls, prefix
        self._known: dict[str, tuple[int, R | None]] = {}

    def records(self, items: Mapping[str, KeyValue]) -> dict[str, R]:
        """Records by the last part of their key, in order of key; bad ones are left out."""
        self._known = {key: self._version(kv) for key, kv in items.items()}
        cut = len(self._prefix)
        return {key[cut:]: record for key, (_, record) in self._known.items() if record is not None}

    def _version(self, kv: KeyValue) -> tuple[int, R | None]:
        known = self._known.get(kv.key)
        if known is not None and known[0] == kv.mod_revision:
            return known
        return kv.mod_revision, decode(kv, self._cls)


# --- the election's order ------------------------------------------------------------------------------


class Leader(NamedTuple):
    """Who leads, and the term that fences what it orders."""

    term: int
    record: CandidateRecord


class Standings(msgspec.Struct, frozen=True):
    """The election's keys, read."""

    leader: Leader | None = None  # None: nobody stands, or the first in line wrote an unreadable record
    candidates: list[CandidateRecord] = []  # in the order in which they lead
    first_key: str = ""  # the key that leads, readable or not


class ElectionTable:
    """Reads the keys under the election's prefix."""

    def __init__(self, prefix: str) -> None:
        self._decoded = Decoded(CandidateRecord, "")
        self.prefix = keys.election_prefix(prefix)

    def read(self, items: Iterable[KeyValue]) -> Standings:
        """The oldest key leads, and its create revision is the term."""
        line = sorted(items, key=lambda kv: kv.create_revision)
        records = self._decoded.records({kv.key: kv for kv in line})
        if not line:
            return Standings()
        first = line[0]
        leader = Leader(first.create_revision, records[first.key]) if first.key in records else None
        return Standings(leader, list(records.values()), first.key)


# --- reading once, for tools ---------------------------------------------------------------------------


async def _read(etcd: Etcd, prefix: str, cls: type[R]) -> list[R]:
    decoded = (decode(kv, cls) for kv in (await etcd.range(prefix)).items)
    return [record for record in decoded if record is not None]


async def read_nodes(etcd: Etcd, prefix: str) -> list[NodeRecord]:
    """All registered nodes, by id."""
    return await _read(etcd, keys.nodes_prefix(prefix), NodeRecord)


async def read_instances(etcd: Etcd, prefix: str) -> list[InstanceRecord]:
    """All registered instances, by id."""
    return await _read(etcd, keys.instances_prefix(prefix), InstanceRecord)


async def read_candidates(etcd: Etcd, prefix: str) -> list[CandidateRecord]:
    """All conductors that stand for election, the leader first."""
    return (await _read_election(etcd, prefix)).candidates


async def read_leader(etcd: Etcd, prefix: str) -> Leader | None:
    """Who leads now, or None."""
    return (await _read_election(etcd, prefix)).leader


async def _read_election(etcd: Etcd, prefix: str) -> Standings:
    table = ElectionTable(prefix)
    return table.read((await etcd.range(table.prefix)).items)


async def read_history(etcd: Etcd, prefix: str) -> list[TermRecord]:
    """The last terms, oldest first."""
    return await _read(etcd, keys.history_prefix(prefix), TermRecord)
