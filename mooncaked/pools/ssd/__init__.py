"""Blocks on solid-state disks: segment files that are written in order, and an index of them in memory.

model      what callers see: items, entries, results, figures
disk       the few system calls, behind a protocol
aligned    memory that O_DIRECT takes
layout     how a group of blocks lies in a segment, byte by byte (pure)
footer     the table at the end of a full segment (pure)
manifest   whose directory it is
index      where each block lies (pure)
files      the segment files, a bounded number of them open
books      what a device knows of itself: index, segments, health, counters
recovery   reading all that back after a restart
space      which segment is written next, and what is lost or carried over for it
commit     groups of blocks made durable together
reading    blocks read into memory and checked
device     one directory
pool       several devices
"""

from mooncaked.pools.ssd.device import SsdDevice
from mooncaked.pools.ssd.model import (
    DeviceState,
    DeviceStats,
    LostReason,
    ReadStatus,
    SsdEntry,
    SsdItem,
    WriteStatus,
)
from mooncaked.pools.ssd.pool import SsdPool

__all__ = [
    "DeviceState",
    "DeviceStats",
    "LostReason",
    "ReadStatus",
    "SsdDevice",
    "SsdEntry",
    "SsdItem",
    "SsdPool",
    "WriteStatus",
]
