"""What a node says of its GPU pools, for `mooncakectl node show`."""

from __future__ import annotations

from typing import Any

from mooncakectl.output import Table, columns, show_bytes, show_count
from mooncakectl.records import Answer


def gpus_of(said: Answer) -> dict[str, Any]:
    """The part of a node's answer about its GPUs; empty where it says nothing, or is an older one."""
    gpus = (said or {}).get("gpus")
    return gpus if isinstance(gpus, dict) else {}


def gpu_tables(said: Answer) -> list[Table]:
    """The pools on GPUs and what lies in them; nothing for a node without any."""
    gpus = gpus_of(said)
    pools = gpus.get("pools")
    if not isinstance(pools, list) or not pools:
        return []
    rows = [
        [
            str(pool.get("device")),
            str(pool.get("state")),
            show_bytes(pool.get("capacity_bytes")),
            pool.get("reason") or "-",
        ]
        for pool in pools
        if isinstance(pool, dict)
    ]
    use = [
        ("used", show_bytes(gpus.get("used_bytes"))),
        ("blocks", show_count(gpus.get("blocks"))),
        ("hits", show_count(gpus.get("hits"))),
        ("misses", show_count(gpus.get("misses"))),
        ("host memory page-locked", show_bytes(gpus.get("page_locked_bytes"))),
        ("not page-locked because", gpus.get("page_lock_problem") or "-"),
    ]
    return [
        Table(title="GPU pools", columns=columns("device", "state", ">size", "reason"), rows=rows),
        Table(title="In GPU memory", columns=columns("what", "value"), rows=use),
    ]
