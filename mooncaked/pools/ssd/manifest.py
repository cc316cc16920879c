"""Whose directory it is, and how its segments are cut: a small JSON file, replaced as a whole, and its
copy."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
import xxhash

from mooncaked.errors import Refused
from mooncaked.failpoints import failpoint
from mooncaked.pools.ssd.disk import Disk, read_all, write_all
from mooncaked.pools.ssd.layout import FORMAT
from mooncaked.units import format_size

NAMES = ("manifest.json", "manifest-copy.json")
TEMPORARY = "manifest.json.new"
_BYTES_MAX = 4096


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    format: int  # of everything in the directory
    node_id: str
    segment_bytes: int
    tag: str  # random hexadecimal digits, in every header that counts
    checksum: str = ""  # XXH3-64 of the others, in hexadecimal

    @property
    def owner(self) -> bytes:
        """What headers carry."""
        return bytes.fromhex(self.tag)


def make_manifest(node_id: str, segment_bytes: int) -> Manifest:
    """The manifest of a directory that this program begins to fill."""
    return Manifest(format=FORMAT, node_id=node_id, segment_bytes=segment_bytes, tag=secrets.token_hex(16))


def read_manifest(disk: Disk, directory: str) -> tuple[Manifest | None, bool]:
    """The manifest, None where neither copy is there; and whether both are. Raises `OSError`."""
    copies = [_read(disk, str(Path(directory, name))) for name in NAMES]
    return copies[0] or copies[1], copies[0] is not None and copies[0] == copies[1]


def _read(disk: Disk, path: str) -> Manifest | None:
    try:
        size = disk.size(path)
    except FileNotFoundError:
        return None
    fd = disk.open(path, write=False)
    try:
        data = bytearray(min(size, _BYTES_MAX))
        whole = read_all(disk, fd, [memoryview(data)], 0) if data else False
    finally:
        disk.close(fd)
    return _decode(bytes(data)) if whole else None


def _decode(data: bytes) -> Manifest | None:
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return manifest if manifest.checksum == _checksum(manifest) else None


def _checksum(manifest: Manifest) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(msgspec.structs.replace(manifest, checksum="")))


def write_manifest(disk: Disk, directory: str, manifest: Manifest) -> None:
    """Put both copies in place, so that after a crash at any point there is at least the old one or the
    new."""
    manifest = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    for name in NAMES:
        _write(disk, directory, str(Path(directory, name)), msgspec.json.encode(manifest))


def _write(disk: Disk, directory: str, path: str, data: bytes) -> None:
    temporary = str(Path(directory, TEMPORARY))
    fd = disk.open(temporary, create=True)
    try:
        failpoint("ssd.manifest.before_write")
        write_all(disk, fd, [memoryview(data)], 0)
        failpoint("ssd.manifest.before_sync")
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    failpoint("ssd.manifest.before_rename")
    disk.rename(temporary, path)
    failpoint("ssd.manifest.before_directory_sync")
    disk.sync_directory(directory)


def check_manifest(found: Manifest, node_id: str, segment_bytes: int, directory: str) -> None:
    """Raise `Refused` unless the directory may be used by this node in this configuration."""
    if found.format != FORMAT:
        problem = f"{directory} is in format {found.format}, and this version reads format {FORMAT}"
        remedy = "Run the version that wrote it, or empty the directory to start anew."
        raise Refused(problem=problem, remedy=remedy)
    if found.node_id != node_id:
        problem = f"{directory} holds the blocks of node {found.node_id}, and this is node {node_id}"
        remedy = "Give this node a directory of its own, set node.id, or empty the directory to start anew."
        raise Refused(problem=problem, remedy=remedy)
    if found.segment_bytes != segment_bytes:
        has, asked = format_size(found.segment_bytes), format_size(segment_bytes)
        problem = f"{directory} has segments of {has}, and ssd.segment_size is {asked}"
        remedy = f"Set ssd.segment_size to {has}, or empty the directory to start anew."
        raise Refused(problem=problem, remedy=remedy)
