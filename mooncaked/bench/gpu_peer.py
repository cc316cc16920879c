"""The other process in a check of `mooncaked.bench.gpu`: opens a pool, hashes pieces of it, inverts them.

Reads one line of JSON (`Task`), writes one line of JSON: the XXH3-64 of each piece as it was."""

from __future__ import annotations

import sys

import msgspec
import xxhash

from mooncaked.client.gpu import open_handle
from mooncaked.types import GpuHandle


class Task(msgspec.Struct, frozen=True):
    """What to do."""

    handle: GpuHandle
    pieces: list[tuple[int, int]]  # offset and size in bytes


def main() -> None:
    """Do it."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    tensor = open_handle(task.handle)
    digests = []
    for offset, size in task.pieces:
        piece = tensor[offset : offset + size]
        digests.append(xxhash.xxh3_64_intdigest(piece.cpu().numpy()))
        piece.bitwise_not_()
        piece.cpu()  # returns when the change is made
    sys.stdout.buffer.write(msgspec.json.encode(digests) + b"\n")


if __name__ == "__main__":
    main()
