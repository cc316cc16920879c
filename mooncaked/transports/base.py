"""What moves blocks between nodes, whichever way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from mooncaked.api.protocol import FetchedBlock
from mooncaked.clock import Deadline
from mooncaked.errors import MooncakeError

Place: TypeAlias = Callable[[Sequence[FetchedBlock | None]], Sequence[memoryview | None]]
"""Is told which blocks are about to come, and returns where each is to land: writable memory of just its
size, or None for a block that is not wanted after all. For a None it returns None."""


class Outcome(msgspec.Struct, frozen=True):
    """How far one fetch got."""

    landed: list[bool]
    """For the first of the keys asked for, as many as the other side answered: whether the block's bytes are
    in place and match its checksum. Never true for a part of them."""
    error: MooncakeError | None = None  # what ended the fetch early; what has landed before stays


class Transport(Protocol):
    """Fetches blocks from other nodes into memory of this one. Safe to use from several threads."""

    def fetch(
        self, address: str, namespace: str, keys: Sequence[bytes], place: Place, deadline: Deadline
    ) -> Outcome:
        """One exchange with the node at `address`; blocks until it is through, at most until the deadline.

        It answers for the first keys only when the blocks together are large: ask again for the rest. `place`
        is called at most once, in this thread, and the memory that it gives is not touched after the return.
        An error of the network or of the other node is in the outcome and is not raised."""

    def close(self) -> None:
        """Close all connections; fetches under way end with an error."""
