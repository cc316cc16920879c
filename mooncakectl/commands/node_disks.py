"""What a node says of its disks, for `mooncakectl node show` and `status`."""

from __future__ import annotations

from typing import Any

from mooncakectl.output import Table, columns, show_bytes, show_count, show_share
from mooncakectl.records import Answer

_MOVED = (
    ("demoted_blocks", "written to disks"),
    ("promoted_blocks", "brought up from disks"),
    ("unsaved_blocks", "evicted before they could be written"),
    ("failed_blocks", "could not be read from disks"),
)


def tiers_of(said: Answer) -> dict[str, Any]:
    """The part of a node's answer about its tiers; empty where it says nothing, or is an older one."""
    tiers = (said or {}).get("tiers")
    return tiers if isinstance(tiers, dict) else {}


def disks_of(said: Answer) -> list[dict[str, Any]]:
    """A node's disks as it describes them."""
    disks = tiers_of(said).get("disks")
    return [disk for disk in disks if isinstance(disk, dict)] if isinstance(disks, list) else []


def disk_problems(node_id: str, said: Answer) -> list[str]:
    """A sentence for each disk that does not do all that it should."""
    return [
        f"disk {disk.get('directory')} of node {node_id} is {_state(disk)}: {disk.get('reason') or 'unknown'}"
        for disk in disks_of(said)
        if disk.get("state") in ("read_only", "failed")
    ]


def disk_tables(said: Answer) -> list[Table]:
    """The disks, and what has moved to and from them; nothing for a node without any."""
    disks = disks_of(said)
    if not disks:
        return []
    rows = [
        [
            str(disk.get("directory")),
            _state(disk),
            show_bytes(disk.get("capacity_bytes")),
            show_share(disk.get("used_bytes"), disk.get("capacity_bytes")),
            show_count(disk.get("blocks")),
            show_count(sum(disk.get("errors", {}).values())),
            disk.get("reason") or "-",
        ]
        for disk in disks
    ]
    titles = columns("disk", "state", ">size", ">used", ">blocks", ">errors", "reason")
    tiers = tiers_of(said)
    moved = [(what, show_count(tiers.get(key))) for key, what in _MOVED]
    return [
        Table(title="Disks", columns=titles, rows=rows),
        Table(title="Blocks since the start", columns=columns("what", ">count"), rows=moved),
    ]


def _state(disk: dict[str, Any]) -> str:
    return str(disk.get("state")).replace("_", "-")
