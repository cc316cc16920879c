"""The session with a real etcd: calls leave dead members, watches resume, leases are kept alive."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self

import msgspec

from mooncaked.clock import Clock, Deadline, SystemClock
from mooncaked.cluster import _convert as convert
from mooncaked.cluster._calls import Caller, Compacted, MemberStatus
from mooncaked.cluster._etcd3 import rpc
from mooncaked.cluster._keeper import Keeper
from mooncaked.cluster._rpc import EtcdOptions
from mooncaked.cluster._stream import WatchStream
from mooncaked.cluster.kv import (
    Compare,
    Delete,
    Etcd,
    KeyValue,
    Listing,
    Op,
    Put,
    TxnResult,
    WatchEvent,
    unchanged_since,
)
from mooncaked.cluster.lease import Lease
from mooncaked.cluster.watch import Cursor
from mooncaked.errors import MooncakeError, OutcomeUnknown, Refused, Unauthenticated, Unreachable

__all__ = ["Etcd", "EtcdOptions", "EtcdSession", "MemberStatus"]

log = logging.getLogger(__name__)

_WATCH_PAUSE_S = 0.05  # before a watch is opened anew; doubles with each failure in a row, up to
_WATCH_PAUSE_MAX_S = 2.0
_PROBE_INTERVAL_S = 2.0  # how often members with open watches are asked whether they live
_CHANGE_TRIES = 8
_RANGE_TRIES = 5


class EtcdSession:
    """`Etcd` over gRPC, on the event loop that first uses it; `async with`, or `start` and `close`.

    Nothing connects before the first call, so a session can be made while etcd is away.
    Raises `ConfigError` at once for options that cannot work."""

    def __init__(
        self, options: EtcdOptions, clock: Clock | None = None, rng: random.Random | None = None
    ) -> None:
        self.options = options
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._caller = Caller(options, self._clock, self._rng)
        self._keepers: set[Keeper] = set()
        self._streams: set[WatchStream] = set()
        self._probing: asyncio.Task[None] | None = None

    @property
    def endpoint(self) -> str:
        """The member that is asked at present."""
        return self._caller.ring.current

    @property
    def keepers_alive(self) -> bool:
        """Whether the thread of every lease that is to be kept alive runs. Any thread may ask."""
        return all(keeper.alive for keeper in list(self._keepers))

    async def start(self) -> None:
        """Begin to look after the members that watches are open at."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe_for_ever(), name="etcd-probe")

    async def close(self) -> None:
        """End every call, watch and keepalive. Leases that nobody closed expire by themselves."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
            self._probing = None
        await asyncio.gather(*(asyncio.to_thread(keeper.stop) for keeper in self._keepers))
        self._keepers.clear()
        for stream in list(self._streams):
            stream.hang_up("the session is closed")
        await self._caller.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def members(self) -> list[MemberStatus]:
        """How each etcd member does; one that is away is a `problem` in its status, not an error."""
        return await self._caller.status()

    # --- keys ------------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        """See `Etcd.get`."""
        return await self._get(key, self._caller.deadline())

    async def _get(self, key: str, deadline: Deadline) -> KeyValue | None:
        reply = await self._caller.call("KV", "Range", convert.get_request(key), deadline)
        return convert.key_value(reply.kvs[0]) if reply.kvs else None

    async def range(self, prefix: str) -> Listing:
        """See `Etcd.range`."""
        for _ in range(_RANGE_TRIES):
            if (listing := await self._pages(prefix)) is not None:
                return listing
        problem = f"{prefix} could not be read, etcd is compacted faster than its pages can be"
        raise Refused(problem=problem, remedy="Compact less often.")

    async def _pages(self, prefix: str) -> Listing | None:
        """All pages at one revision; None when that was compacted between two of them."""
        items: list[KeyValue] = []
        start, revision = convert.raw(prefix), 0
        while True:
            request = convert.range_request(prefix, start, revision)
            try:
                reply = await self._caller.call("KV", "Range", request)
            except Compacted:
                return None
            items += [convert.key_value(kv) for kv in reply.kvs]
            revision = revision or reply.header.revision
            if not reply.more:
                return Listing(revision, items)
            start = reply.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        """See `Etcd.put`."""
        return (await self._change(Put(key, value, lease))).revision

    async def delete(self, key: str) -> bool:
        """See `Etcd.delete`."""
        return (await self._change(Delete(key))).existed

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op] = ()
    ) -> TxnResult:
        """See `Etcd.txn`."""
        return await self._txn(compares, then, otherwise, self._caller.deadline())

    async def _txn(
        self, compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op], deadline: Deadline
    ) -> TxnResult:
        request = convert.txn_request(compares, then, otherwise)
        return convert.txn_result(await self._caller.call("KV", "Txn", request, deadline, write=True))

    async def _change(self, op: Put | Delete) -> _Changed:
        """Do `op` once. Each request is guarded by the revision that the key was seen with, so one that
        comes to life late, after it was given up and sent anew, finds the key changed and does nothing."""
        deadline = self._caller.deadline()
        doubt: OutcomeUnknown | None = None
        before = 0
        for _ in range(_CHANGE_TRIES):
            try:
                seen = await self._get(op.key, deadline)
                now = seen.mod_revision if seen else 0
                if doubt is not None and now != before:
                    return _judge(op, seen, doubt)
                if isinstance(op, Delete) and seen is None:
                    return _Changed(0, existed=False)
                before = now
                result = await self._txn([unchanged_since(op.key, before)], [op], [], deadline)
            except OutcomeUnknown as error:
                if error is doubt:
                    raise  # it stays in doubt
                deadline = deadline if doubt else self._caller.deadline()  # time to read the key again
                doubt = error
            except Unreachable as error:
                raise doubt or error from error
            else:
                if result.succeeded:
                    return _Changed(result.revision, existed=seen is not None)
        problem = f"{op.key} could not be changed, others change it all the time"
        raise doubt or Refused(problem=problem, remedy="Find out who writes it.")

    # --- leases ----------------------------------------------------------------------------------------

    async def grant(self, ttl_s: float, what: str) -> Lease:
        """See `Etcd.grant`."""
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        # A repetition after a timeout grants a second lease; the first expires unused. What counts is when
        # the call began, which is not later than when etcd began to count.
        sent_at_s = self._clock.monotonic()
        reply = await self._caller.call("Lease", "LeaseGrant", request)

        async def end(revoke: bool) -> None:
            self._keepers.discard(keeper)
            await asyncio.to_thread(keeper.stop)
            if revoke:
                await self._revoke(lease)

        lease = Lease(reply.ID, reply.TTL, sent_at_s, self._clock, what=what, end=end)
        keeper = Keeper(lease, self._caller, self._clock)
        keeper.start()
        self._keepers.add(keeper)
        return lease

    async def _revoke(self, lease: Lease) -> None:
        try:
            await self._caller.call("Lease", "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease.id))
        except MooncakeError as error:
            log.info("lease left to expire what=%s ttl_s=%.0f cause=%s", lease.what, lease.times.ttl_s, error)

    # --- watches ---------------------------------------------------------------------------------------

    async def watch(self, prefix: str, revision: int | None = None) -> AsyncGenerator[WatchEvent, None]:
        """See `Etcd.watch`."""
        cursor = Cursor(revision)
        denied = False
        while not self._caller.closed:
            try:
                if cursor.next_revision is None:
                    for event in cursor.snapshot(await self.range(prefix)):
                        yield event
                async with aclosing(self._one_stream(prefix, cursor)) as events:
                    async for event in events:
                        denied = False
                        yield event
                continue  # a gap: take a snapshot
            except Unauthenticated:
                # The token may only have aged: etcd's answer does not tell that from a missing right. The
                # stream has seen to a new one.
                if denied or not self.options.user:
                    raise
                denied = True
                continue
            except Unreachable as error:
                cause = str(error.fields["cause"])
            for event in cursor.broke(cause):
                log.info("watch stalled prefix=%s cause=%s", prefix, cause)
                yield event
            await self._pause_watch(cursor.breaks)

    async def _pause_watch(self, breaks: int) -> None:
        """Not at all after the first break, then ever longer, and not in step with other programs."""
        if breaks > 1:
            longest_s = min(_WATCH_PAUSE_S * 2.0 ** min(breaks, 10), _WATCH_PAUSE_MAX_S)
            await self._clock.sleep(self._rng.uniform(longest_s / 2, longest_s))

    async def _one_stream(self, prefix: str, cursor: Cursor) -> AsyncGenerator[WatchEvent, None]:
        """Events of one stream until a snapshot is due; raises `Unreachable` when it breaks."""
        member = self._caller.member()
        stream = WatchStream(self._caller, member)
        self._streams.add(stream)
        try:
            response = await stream.open(prefix, cursor.next_revision or 0)
            while True:
                for event in cursor.take(response):
                    yield event
                if cursor.next_revision is None:
                    return
                response = await stream.read()
        except Unreachable:
            self._caller.ring.failed(member.address)
            raise
        except Unauthenticated:
            self._caller.forget_token(stream.token)
            raise
        finally:
            self._streams.discard(stream)
            stream.hang_up("it is no longer read")

    async def _probe_for_ever(self) -> None:
        """A watch at a hung member is as silent as one without changes. So ask the member, and end its
        streams when it does not answer or has no leader: they resume elsewhere."""
        while True:
            await self._clock.sleep(_PROBE_INTERVAL_S)
            addresses = {stream.member.address for stream in self._streams}
            await asyncio.gather(*map(self._probe, addresses))

    async def _probe(self, address: str) -> None:
        status = await self._caller.member_status(address)
        if status.away:
            self._caller.ring.failed(address)
            for stream in list(self._streams):
                if stream.member.address == address:
                    stream.hang_up(status.problem)


class _Changed(msgspec.Struct, frozen=True):
    """What a put or delete came to."""

    revision: int
    existed: bool


def _judge(op: Put | Delete, seen: KeyValue | None, doubt: OutcomeUnknown) -> _Changed:
    """The key has changed since a request whose fate is unknown: was it by that request? Raises `doubt`
    where that cannot be told, since somebody may have written after it, or instead of it."""
    match op:
        case Put() if seen and (seen.value, seen.lease) == (op.value, op.lease):
            return _Changed(seen.mod_revision, existed=True)
        case Delete() if seen is None:
            return _Changed(0, existed=True)
    raise doubt
