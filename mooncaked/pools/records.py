"""The journal of a pool as bytes: what a file begins with, and what was stored and removed since. Pure.

    header page (4096 bytes)   magic, length, XXH3-64, msgpack of `Header`; zeros where it counts as empty
    frames                     length, XXH3-64, msgpack list of records; one or more for each change

A frame counts whole or not at all: one that is cut off, or disagrees with its checksum, ends the journal.
Whoever wrote it was not told yet that the change is done, and the memory it frees was not used again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

VERSION = 1  # of this format, and of how blocks lie in a region
HEADER_BYTES = 4096
FRAME_RECORDS_MAX = 4096
_MAGIC = b"mooncakJ"
MAGIC_BYTES = len(_MAGIC)  # zeros there: the journal does not count
_HEAD = struct.Struct("<8sIQ")  # magic, length, checksum
_FRAME = struct.Struct("<IQ")  # length, checksum
_STAMP = struct.Struct("<dQ")  # time, checksum
STAMP_AT = HEADER_BYTES - _STAMP.size
_PAYLOAD_MAX = STAMP_AT - _HEAD.size
_FRAME_BYTES_MAX = 1 << 30


class RegionShape(msgspec.Struct, frozen=True, tag="region", array_like=True):
    """A region that blocks may lie in; as a record: it was added."""

    region: int
    size: int  # bytes
    huge_pages: str


class RegionGone(msgspec.Struct, frozen=True, tag="gone", array_like=True):
    """A region was given back."""

    region: int


class Stored(msgspec.Struct, frozen=True, tag="s", array_like=True):
    """A block became readable."""

    namespace: str
    key: bytes
    parent: bytes | None
    meta: bytes
    region: int
    offset: int  # bytes
    size: int  # bytes
    checksum: int | None  # XXH3-64 of the value; None: not known yet
    hold: int
    expires_at_s: float  # monotonic, of this boot


class Removed(msgspec.Struct, frozen=True, tag="r", array_like=True):
    """A block ceased to be readable."""

    namespace: str
    key: bytes


class Checked(msgspec.Struct, frozen=True, tag="c", array_like=True):
    """The checksum of a block became known."""

    namespace: str
    key: bytes
    checksum: int


Record = Stored | Removed | Checked | RegionShape | RegionGone


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal is of."""

    version: int = VERSION
    generation: int  # of two journals, the one with the higher generation counts
    node_id: str
    epoch: int  # of the daemon that wrote it
    grain: int  # bytes; offsets of blocks depend on it
    huge_pages: str  # as configured
    regions: list[RegionShape]  # when the journal was begun


class _Version(msgspec.Struct, frozen=True):
    version: int


class Unreadable(ValueError):
    """This is no journal, or one that cannot be read; the text says why."""


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(list[Record])


# --- the header --------------------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """The bytes at the start of a journal; raises `ValueError` when there are too many regions for them."""
    payload = _encoder.encode(header)
    if len(payload) > _PAYLOAD_MAX:
        raise ValueError(f"a header of {len(payload)} bytes is too long")
    return _HEAD.pack(_MAGIC, len(payload), _sum(payload)) + payload


def decode_header(page: bytes) -> Header | None:
    """The header in a journal's first bytes; None when it is empty: never begun, or given up.

    Raises `Unreadable` for anything else, such as another version's."""
    if not page[:MAGIC_BYTES].strip(b"\0"):
        return None
    if len(page) < _HEAD.size or not page.startswith(_MAGIC):
        raise Unreadable("it is no journal of this program")
    _, length, checksum = _HEAD.unpack_from(page)
    payload = page[_HEAD.size : _HEAD.size + length]
    if length > _PAYLOAD_MAX or len(payload) != length or _sum(payload) != checksum:
        raise Unreadable("its header is damaged")
    try:
        version = msgspec.msgpack.decode(payload, type=_Version).version
        if version != VERSION:
            raise Unreadable(f"it has format version {version}, this program reads {VERSION}")
        return msgspec.msgpack.decode(payload, type=Header)
    except msgspec.MsgspecError as error:
        raise Unreadable(f"its header makes no sense: {error}") from error


def encode_stamp(now_s: float) -> bytes:
    """A sign of life, for `STAMP_AT`."""
    return _STAMP.pack(now_s, _sum(struct.pack("<d", now_s)))


def decode_stamp(page: bytes) -> float | None:
    """The last sign of life in a header page, None when there is none."""
    if len(page) < HEADER_BYTES:
        return None
    now_s, checksum = _STAMP.unpack_from(page, STAMP_AT)
    return float(now_s) if checksum == _sum(struct.pack("<d", now_s)) else None


# --- frames ------------------------------------------------------------------------------------------------


def encode_frames(records: Sequence[Record]) -> Iterator[bytes]:
    """`records` as frames."""
    for first in range(0, len(records), FRAME_RECORDS_MAX):
        payload = _encoder.encode(records[first : first + FRAME_RECORDS_MAX])
        yield _FRAME.pack(len(payload), _sum(payload)) + payload


class Frames:
    """Reads the frames in `data`, which begins with the header page. `end` is where the last whole one that
    was read ends, `torn` whether something else than zeros follows when there are no more."""

    def __init__(self, data: memoryview | bytes, start: int = HEADER_BYTES) -> None:
        self._data = memoryview(data)
        self.end = start
        self.torn = False

    def release(self) -> None:
        """Let go of `data`."""
        self._data.release()

    def __iter__(self) -> Iterator[list[Record]]:
        while (records := self._next()) is not None:
            yield records

    def _next(self) -> list[Record] | None:
        head = bytes(self._data[self.end : self.end + _FRAME.size])
        if len(head) < _FRAME.size:
            self.torn = any(head)
            return None
        length, checksum = _FRAME.unpack(head)
        first = self.end + _FRAME.size
        self.torn = bool(length or checksum)
        if not 0 < length <= _FRAME_BYTES_MAX:
            return None
        with self._data[first : first + length] as payload:
            if len(payload) != length or _sum(payload) != checksum:
                return None
            try:
                records = _records.decode(payload)
            except msgspec.MsgspecError:
                return None  # whole, but not ours: what comes after it cannot be trusted either
        self.torn = False
        self.end = first + length
        return records


class Replay:
    """What the records come to: the blocks that are there, last stored last, and the regions."""

    def __init__(self, regions: Iterable[RegionShape]) -> None:
        self.blocks: dict[tuple[str, bytes], Stored] = {}
        self.regions = {shape.region: shape for shape in regions}
        self.records = 0  # of blocks

    def apply(self, records: Iterable[Record]) -> None:
        """Take further records into account."""
        for record in records:
            match record:
                case Stored():
                    name = (record.namespace, record.key)
                    self.blocks.pop(name, None)  # a later record of one name goes to the end
                    self.blocks[name] = record
                case Removed():
                    self.blocks.pop((record.namespace, record.key), None)
                case Checked():
                    self._check(record)
                case RegionShape():
                    self.regions[record.region] = record
                case RegionGone():
                    self.regions.pop(record.region, None)
            self.records += 1

    def _check(self, record: Checked) -> None:
        name = (record.namespace, record.key)
        if (block := self.blocks.get(name)) is not None:
            self.blocks[name] = msgspec.structs.replace(block, checksum=record.checksum)


def _sum(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)
