"""Which block goes next. Pure: the store tells what was touched and freed up, the policy names victims.

All policies evict leaf before root: a block goes only when no block below it in its prefix chain is
present, because a child is worth nothing without its parent.
"""

from __future__ import annotations

from typing import Any

from mooncaked.errors import InvalidRequest
from mooncaked.eviction.base import B, Evictable, Policy
from mooncaked.eviction.length_aware import LengthAwarePolicy
from mooncaked.eviction.lfu import LfuPolicy
from mooncaked.eviction.lru import LruPolicy
from mooncaked.eviction.prefix_aware import PrefixAwarePolicy
from mooncaked.eviction.s3fifo import S3FifoPolicy
from mooncaked.eviction.sieve import SievePolicy
from mooncaked.eviction.watermarks import Watermarks

__all__ = [
    "POLICIES",
    "Evictable",
    "LengthAwarePolicy",
    "LfuPolicy",
    "LruPolicy",
    "Policy",
    "PrefixAwarePolicy",
    "S3FifoPolicy",
    "SievePolicy",
    "Watermarks",
    "make_policy",
]

_CLASSES: dict[str, type[Policy[Any]]] = {
    "prefix-aware": PrefixAwarePolicy,
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "length-aware": LengthAwarePolicy,
    "s3fifo": S3FifoPolicy,
    "sieve": SievePolicy,
}

POLICIES = tuple(_CLASSES)  # names, ours first


def make_policy(name: str, seed: int = 0) -> Policy[B]:
    """A new policy of that name; equal seeds and calls give equal victims. Raises `InvalidRequest`."""
    try:
        return _CLASSES[name]()
    except KeyError:
        names = ", ".join(POLICIES)
        raise InvalidRequest(problem=f"there is no eviction policy {name!r}; there are {names}") from None
