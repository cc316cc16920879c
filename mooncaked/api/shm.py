"""The layout of the memory that a daemon shares with the clients of its node, beside the pool itself.

Everything is made of aligned 64-bit words in the machine's byte order: both sides are on one machine.

    index    the daemon writes, clients read     header | words `applied`, one per connection | entries
    posted   clients read and write              words `posted`, one per connection
    page     one client and the daemon           counters | hazards | notes; one per connection

An entry of the index tells where the value of a key lies. The table is open addressed: an entry belongs at
the place that `tag1` names, or at the next free one after it, and there is no gap between the two. A key is
named by two 64-bit hashes of itself, `tag1` and `tag2`, with seeds that are random per namespace and life of
the daemon: who does not know a namespace's seeds cannot make keys that collide there. `tag1` is 0 where an
entry is empty; it is written last when one is filled and first when one is emptied. `seq` is odd while an
entry is being changed, and larger after each change.

Words are stored and loaded one by one, in program order; only machines that keep such stores and loads in
order (x86-64) share an index. See `mooncaked.client.direct` for how it is read without a lock.
"""

from __future__ import annotations

import platform
from struct import Struct

WORD = 8  # bytes
MAGIC = int.from_bytes(b"mooncake", "little")
VERSION = 1
ORDERED = platform.machine() in ("x86_64", "AMD64")  # loads and stores of one core are seen in order

# --- index: header -----------------------------------------------------------------------------------------

H_MAGIC, H_VERSION, H_EPOCH, H_ENTRIES = 0, 1, 2, 3
H_FLAGS = 4
H_GENERATION = 5  # odd while entries move; other after each insertion and each move: a miss is to be repeated
H_CONNECTIONS = 6  # the words of `applied` and `posted` from here on are not in use

INCOMPLETE = 1  # flag: not all that is here is in the index, so a miss is to be asked for
FENCED = 2  # flag: the daemon looks at hazards, with a barrier, before it uses memory again

CONNECTIONS_MAX = 1024  # that can post
APPLIED_AT = 512  # word at which `applied` begins: how many posted frames of a connection were obeyed
ENTRIES_AT = APPLIED_AT + CONNECTIONS_MAX  # word at which the entries begin
POSTED_BYTES = CONNECTIONS_MAX * WORD

# --- index: entries ----------------------------------------------------------------------------------------

ENTRY_WORDS = 8  # one cache line
E_SEQ, E_TAG1, E_TAG2, E_PLACE, E_SIZE, E_CHECKSUM, E_FLAGS, E_ID = range(ENTRY_WORDS)
ENTRY = Struct("8Q")
ENTRY_BYTES = ENTRY.size
REGION_SHIFT = 48  # of the place: region << 48 | offset in bytes
OFFSET_MASK = (1 << REGION_SHIFT) - 1

READY = 1  # flag: the bytes may be read; without it the key exists, but its value must be asked for
HAS_META = 2  # flag: there is metadata, which must be asked for
HAS_CHECKSUM = 4  # flag: the checksum is known

ENTRIES_MIN = 1 << 16
ENTRIES_MAX = 1 << 28
FILL_MAX = 0.7  # of the entries; beyond it, runs of full entries become long
_BLOCK_BYTES = 64 << 10  # smaller values than this on average fill the index before the pool
SIZE_MAX = OFFSET_MASK

# --- page of a connection ----------------------------------------------------------------------------------

P_NOTES = 0  # how many notes were ever written
P_MISSES = 1  # how many keys were found missing without asking
P_WRITING = 2  # how many reserved places are being filled just now
P_REVOKED = 3  # 1: the daemon has taken reserved places back; written by the daemon
HAZARDS_AT = 64  # word at which the hazards begin: ids of blocks that are being looked at, 0 where none is
HAZARDS = 64
NOTES_AT = HAZARDS_AT + HAZARDS  # word at which the notes begin: ids of blocks that were read, a ring
NOTES = 1024
PAGE_BYTES = 12 << 10  # of memory for it, in whole pages


def entry_count(pool_bytes: int, wanted: int = 0) -> int:
    """How many entries an index has: a power of two for `wanted` blocks, or for a pool of that size."""
    count = wanted or 2 * pool_bytes // _BLOCK_BYTES
    return min(ENTRIES_MAX, max(ENTRIES_MIN, 1 << (count - 1).bit_length()))


def index_bytes(entries: int) -> int:
    """Size of the memory for an index."""
    return ENTRIES_AT * WORD + entries * ENTRY_BYTES
