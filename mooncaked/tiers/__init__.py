"""How blocks move between the tiers of a node: the pool in host memory, disks below it, GPUs above it.

admission   which blocks are worth a place on a disk (pure)
rate        how fast they may be written (pure)
below       the disks, as the store sees them
demote      blocks that leave memory are written
raising     blocks are read back, in a thread
promote     blocks that are asked for are brought up, once each and in time
tiers       memory and disks together
open        the disks from the configuration, and their opening
report      what is said of disks and movements
gpu         GPU memory, and what is copied into it
"""

from mooncaked.tiers.admission import Admission
from mooncaked.tiers.below import Disks, SsdBelow
from mooncaked.tiers.open import Opening, make_disks
from mooncaked.tiers.report import DiskStatus, TiersStatus, disk_problems, readings, tiers_status
from mooncaked.tiers.tiers import Tiers, TiersStats

__all__ = [
    "Admission",
    "DiskStatus",
    "Disks",
    "Opening",
    "SsdBelow",
    "Tiers",
    "TiersStats",
    "TiersStatus",
    "disk_problems",
    "make_disks",
    "readings",
    "tiers_status",
]
