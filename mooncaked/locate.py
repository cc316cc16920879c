"""Asking the leading conductor which nodes hold a block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from mooncaked.errors import InvalidKey
from mooncaked.keys import parse_key, show_key

log = logging.getLogger(__name__)

LIMIT_S = 2.0  # a reader waits for the answer, and can compute instead of waiting long
ANSWER_BYTES_MAX = 16 << 20


class Holder(msgspec.Struct, frozen=True):
    """A node that holds a block; further fields of the answer are not needed here."""

    node_id: str


_decode = msgspec.json.Decoder(dict[str, list[Holder]]).decode


class Locator:
    """Asks `POST /v1/locate` of the gateway at `leader_url()`. Use on one event loop."""

    def __init__(self, leader_url: Callable[[], str | None]) -> None:
        self._leader_url = leader_url
        self._session: aiohttp.ClientSession | None = None

    async def locate(self, namespace: str, keys: Sequence[bytes]) -> dict[bytes, list[str]]:
        """The nodes that hold each key, best first. Without a leader, or a good answer in time, nothing
        is known to be held anywhere, which is a miss and no error."""
        url = self._leader_url()
        if url is None:
            return {}
        body = {"namespace": namespace, "keys": [show_key(key) for key in keys]}
        try:
            answer = _decode(await self._post(f"{url.rstrip('/')}/v1/locate", body))
            return {parse_key(key): [holder.node_id for holder in holders] for key, holders in answer.items()}
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, InvalidKey, ValueError) as error:
            log.info("blocks not located url=%s cause=%s", url, str(error) or type(error).__name__)
            return {}

    async def _post(self, url: str, body: dict[str, Any]) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S))
        async with asyncio.timeout(LIMIT_S), self._session.post(url, data=msgspec.json.encode(body)) as reply:
            reply.raise_for_status()
            answer = bytearray()
            async for chunk in reply.content.iter_any():
                answer += chunk
                if len(answer) > ANSWER_BYTES_MAX:
                    raise ValueError(f"the answer is larger than {ANSWER_BYTES_MAX} bytes")
            return bytes(answer)

    async def close(self) -> None:
        """Close the connections to the leader."""
        if self._session is not None:
            await self._session.close()
