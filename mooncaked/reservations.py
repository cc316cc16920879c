"""Room that writers have taken ahead of time, before they know what they will write. Pure.

A writer that stores values of one size over and over reserves room for the next few, and so needs no answer
from the node before it can write. What one owner may hold is bounded, so that a greedy writer leaves the
others their room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mooncaked.block import Extent
from mooncaked.errors import IntegrityError, InvalidRequest


class Reservations:
    """Extents by owner and token. Not thread-safe; gives no memory back, that is its caller's."""

    def __init__(self) -> None:
        self._by_owner: dict[int, dict[int, Extent]] = {}
        self._bytes: dict[int, int] = {}
        self.used_bytes = 0  # of all owners

    def owned_bytes(self, owner: int) -> int:
        """What an owner holds."""
        return self._bytes.get(owner, 0)

    def add(self, owner: int, token: int, extent: Extent) -> None:
        """Note that `owner` holds `extent` under `token`."""
        self._by_owner.setdefault(owner, {})[token] = extent
        self._count(owner, extent.size)

    def has(self, owner: int, token: int) -> bool:
        """Whether the token is a reservation of this owner."""
        return token in self._by_owner.get(owner, {})

    def look_up(self, owner: int, tokens: Sequence[int]) -> list[Extent]:
        """The extents behind an owner's tokens; raises `InvalidRequest` when one is none, or comes twice."""
        held = self._by_owner.get(owner, {})
        for token in tokens:
            if token not in held:
                problem = (
                    f"token {token} reserves nothing here: it is another connection's, or was used already"
                )
                raise InvalidRequest(problem=problem)
        if len(set(tokens)) != len(tokens):
            raise InvalidRequest(problem="a reservation comes twice in one request")
        return [held[token] for token in tokens]

    def take(self, owner: int, token: int) -> Extent:
        """End a reservation; its extent is the caller's now."""
        extent = self._by_owner[owner].pop(token)
        self._count(owner, -extent.size)
        return extent

    def end_owner(self, owner: int) -> list[Extent]:
        """End all that an owner holds."""
        return [self.take(owner, token) for token in list(self._by_owner.get(owner, {}))]

    def extents(self) -> Iterator[Extent]:
        """Every reserved extent."""
        for held in self._by_owner.values():
            yield from held.values()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the counters agree with what is held."""
        found = sum(extent.size for extent in self.extents())
        if found != self.used_bytes or found != sum(self._bytes.values()):
            detail = f"{found} bytes are held, {self.used_bytes} counted"
            raise IntegrityError(what="reservations", detail=detail)

    def _count(self, owner: int, change: int) -> None:
        self.used_bytes += change
        self._bytes[owner] = self._bytes.get(owner, 0) + change
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes[owner]
