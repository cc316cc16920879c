"""What engines import: `Client` for threads and `AsyncClient` for asyncio, with the same methods.

    client = Client("/run/mooncaked/client.sock", namespace="tenant/model")
    client.put("key", b"value")
    client.get("key")        # b"value", or None for a miss

Values move through memory that the node's daemon shares with this process; the socket carries only control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncaked.client.buffers import Buffer, Value
from mooncaked.client.operations import PutResult
from mooncaked.client.requests import Key
from mooncaked.client.sync import Client

if TYPE_CHECKING:
    from mooncaked.client.aio import AsyncClient

__all__ = ["AsyncClient", "Buffer", "Client", "Key", "PutResult", "Value"]


def __getattr__(name: str) -> object:
    """Import `AsyncClient` when it is first asked for: asyncio would double the time that an import takes."""
    if name != "AsyncClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mooncaked.client.aio import AsyncClient

    return AsyncClient
