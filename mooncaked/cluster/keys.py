"""Where in etcd things are. All of a cluster lies under one prefix, `etcd.prefix` of the configuration."""

from __future__ import annotations


def nodes_prefix(prefix: str) -> str:
    """Under it, one `NodeRecord` per node."""
    return f"{prefix}/nodes/"


def node_key(prefix: str, node_id: str) -> str:
    """Of a node's record."""
    return nodes_prefix(prefix) + node_id


def instances_prefix(prefix: str) -> str:
    """Under it, one `InstanceRecord` per engine instance."""
    return f"{prefix}/instances/"


def instance_key(prefix: str, instance_id: str) -> str:
    """Of an instance's record."""
    return instances_prefix(prefix) + instance_id


def election_prefix(prefix: str) -> str:
    """Under it, one `CandidateRecord` per conductor that stands; the oldest key leads."""
    return f"{prefix}/election/"


def candidate_key(prefix: str, lease_id: int) -> str:
    """Of a candidate's record: named by its lease, so that no two candidates share one."""
    return f"{election_prefix(prefix)}{lease_id:016x}"


def history_prefix(prefix: str) -> str:
    """Under it, one `TermRecord` per term, oldest first."""
    return f"{prefix}/history/"


def history_key(prefix: str, term: int) -> str:
    """Of a term's record; padded, so that etcd's order of keys is the order of terms."""
    return f"{history_prefix(prefix)}{term:020d}"
