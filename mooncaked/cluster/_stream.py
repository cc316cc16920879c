"""One watch stream to one etcd member."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc

from mooncaked.cluster import _convert as convert
from mooncaked.cluster._calls import Caller
from mooncaked.cluster._rpc import Failure, Member, being_cancelled, broken, metadata, unreachable
from mooncaked.cluster.watch import WatchResponse
from mooncaked.errors import MooncakeError

_DENIED = ("permission denied", "auth", "user name is empty")


class WatchStream:
    """A stream that can be ended from outside, which its reader sees as `Unreachable`."""

    def __init__(self, caller: Caller, member: Member) -> None:
        self.member = member
        self._caller = caller
        self._call: Any = None
        self._hung_up = ""
        self.token: str | None = None  # that it was opened with

    async def open(self, prefix: str, start_revision: int) -> WatchResponse:
        """Connect and ask; the first response, which says that the watch is created."""
        limit_s = self._caller.attempt_s
        if problem := await self.member.connect(limit_s):
            raise unreachable(self.member.address, problem)
        try:
            async with asyncio.timeout(limit_s):
                self.token = await self._caller.login(self.member, limit_s)
                self._call = self.member.method("Watch", "Watch")(metadata=metadata(self.token))
                await self._wait(self._call.write(convert.watch_request(prefix, start_revision)))
                return await self.read()
        except TimeoutError:
            raise unreachable(self.member.address, "the watch was not answered") from None
        except grpc.aio.AioRpcError as error:  # of the log-in
            raise self._error(error) from error

    async def read(self) -> WatchResponse:
        """The next response. Raises `Unreachable` when the stream has ended, `Unauthenticated` or `Refused`
        when etcd cancelled the watch for another reason than compaction."""
        message = await self._wait(self._call.read())
        if message is grpc.aio.EOF:
            raise unreachable(self.member.address, self._hung_up or "the watch stream ended")
        response = convert.watch_response(message)
        if response.canceled and not response.compact_revision:
            denied = any(word in response.reason for word in _DENIED)
            raise self._caller.error(Failure.DENIED if denied else Failure.REFUSED, response.reason)
        return response

    async def _wait(self, operation: Awaitable[Any]) -> Any:
        """The operation's result, with gRPC's ways of failing made ours."""
        try:
            return await operation
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error
        except asyncio.InvalidStateError as error:
            raise unreachable(self.member.address, self._hung_up or str(error)) from error
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise unreachable(self.member.address, self._hung_up or "the connection was closed") from None

    def hang_up(self, cause: str) -> None:
        """End the stream from this side."""
        self._hung_up = cause
        if self._call is not None:
            self._call.cancel()

    def _error(self, error: Any) -> MooncakeError:
        failure, details = broken(error)
        if failure is Failure.STALE_TOKEN:
            failure = Failure.DENIED
        return self._caller.error(failure, details)
