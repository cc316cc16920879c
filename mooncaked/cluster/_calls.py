"""One call to etcd, at whichever member answers: rotation, login, and what may be sent twice."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import msgspec

from mooncaked.clock import Clock, Deadline
from mooncaked.cluster._etcd3 import rpc
from mooncaked.cluster._rpc import (
    EtcdOptions,
    Failure,
    Member,
    Ring,
    being_cancelled,
    broken,
    channel_credentials,
    metadata,
    parse_endpoints,
    to_error,
    unreachable,
)
from mooncaked.errors import MooncakeError, OutcomeUnknown, Refused

_PAUSE_S = 0.05  # after a round in which no member answered; doubles with each round, up to
_PAUSE_MAX_S = 0.5
_LOGIN_TIMEOUT_S = 10.0


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How one etcd member does."""

    address: str
    version: str = ""
    leads: bool = False
    database_bytes: int = 0
    problem: str = ""  # why it cannot serve, or did not say how it does; "" when it can
    away: bool = False  # it did not answer, or has no leader


class Compacted(Refused):
    """{problem}. {remedy}"""


class Caller:
    """The members, the login, and the calls to them. Belongs to the event loop that first calls."""

    def __init__(self, options: EtcdOptions, clock: Clock, rng: random.Random) -> None:
        endpoints = parse_endpoints(options)
        self.options = options
        self.credentials = channel_credentials(options, endpoints.tls)
        self.ring = Ring(endpoints.addresses, rng)
        self.attempt_s = options.request_timeout_s / min(3, len(endpoints.addresses))
        self.closed = False
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._token: str | None = None
        self._logins: dict[str, asyncio.Task[None]] = {}
        self._anonymous = not options.user  # also while etcd has authentication switched off

    @property
    def addresses(self) -> str:
        """All members, for messages."""
        return ",".join(self.ring.addresses)

    def member(self) -> Member:
        """The member to ask now."""
        return self._member(self.ring.current)

    def _member(self, address: str) -> Member:
        if self.closed:
            raise unreachable(self.addresses, "the session is closed")
        if address not in self._members:
            self._members[address] = Member(address, self.credentials)
        return self._members[address]

    def deadline(self) -> Deadline:
        """The request timeout, from now on."""
        return Deadline(self._clock, self.options.request_timeout_s)

    async def call(
        self, service: str, name: str, request: Any, deadline: Deadline | None = None, *, write: bool = False
    ) -> Any:
        """One RPC within `deadline` (the request timeout). A write that may have reached etcd is never sent
        again: `OutcomeUnknown`. Otherwise raises what `Etcd` promises."""
        deadline = deadline or self.deadline()
        failures, renewed, cause = 0, False, ""
        while not deadline.passed():
            member = self.member()
            outcome = await self._attempt(member, service, name, request, deadline)
            if not isinstance(outcome, _Failed):
                return outcome
            failure, cause = outcome.failure, self._cause(member, outcome.details)
            if failure is Failure.STALE_TOKEN and not renewed:
                self.forget_token(outcome.token)
                renewed = True
                continue
            if failure is Failure.COMPACTED:
                raise Compacted(problem=cause, remedy="Read the present state.")
            if failure is not Failure.AWAY:
                raise self.error(failure, cause)
            if write and outcome.sent:
                self.ring.failed(member.address)
                raise OutcomeUnknown(operation=f"etcd {name.lower()}", cause=cause)
            failures += 1
            await self._move_on(member.address, failures, deadline)
        raise unreachable(self.addresses, cause)

    async def _attempt(
        self, member: Member, service: str, name: str, request: Any, deadline: Deadline
    ) -> Any:
        """The reply, or `_Failed`."""
        limit_s = min(self.attempt_s, deadline.left())
        if problem := await member.connect(limit_s):
            return _Failed(Failure.AWAY, problem, sent=False)
        token, sent = None, False
        try:
            token = await self.login(member, limit_s)
            sent, limit_s = True, min(self.attempt_s, deadline.left())
            return await member.method(service, name)(request, timeout=limit_s, metadata=metadata(token))
        except TimeoutError:
            return _Failed(Failure.AWAY, "the log-in was not answered in time", sent=False)
        except asyncio.CancelledError:
            if self.closed and not being_cancelled():
                return _Failed(Failure.AWAY, "the session was closed meanwhile", sent=sent)
            raise
        except grpc.aio.AioRpcError as error:
            failure, details = broken(error)
            return _Failed(failure, details, sent=sent, token=token)

    def _cause(self, member: Member, details: str) -> str:
        """Details, with the member that they are about where there are several."""
        return f"{member.address}: {details}" if len(self.ring.addresses) > 1 else details

    async def _move_on(self, address: str, failures: int, deadline: Deadline) -> None:
        self.ring.failed(address)
        rounds, rest = divmod(failures, len(self.ring.addresses))
        if rest == 0:
            pause_s = min(_PAUSE_S * 2.0 ** min(rounds, 10), _PAUSE_MAX_S)
            await self._clock.sleep(min(pause_s, deadline.left()))

    def error(self, failure: Failure, cause: str) -> MooncakeError:
        """The error for a failure that trying again does not heal."""
        return to_error(failure, cause, self.addresses, self.options.user)

    async def login(self, member: Member, timeout_s: float) -> str | None:
        """The token for calls; None where none is needed. Raises `TimeoutError`, and gRPC's error when etcd
        refuses the log-in. Checking a password costs etcd much of a second of computing, so all calls share
        one log-in per member, and it goes on when one of them gives up waiting."""
        if self._token is None and not self._anonymous:
            pending = self._logins.get(member.address)
            if pending is None or pending.done():
                pending = asyncio.create_task(self._log_in(member), name=f"etcd-login-{member.address}")
                pending.add_done_callback(_look_at_error)
                self._logins[member.address] = pending
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(pending)
        return self._token

    async def _log_in(self, member: Member) -> None:
        options = self.options
        self._token = await member.authenticate(options.user, options.password, _LOGIN_TIMEOUT_S)
        self._anonymous = self._token is None

    @property
    def token(self) -> str | None:
        """The token in use."""
        return self._token

    def forget_token(self, refused: str | None) -> None:
        """Log in again at the next call, unless that has happened since `refused` was the token."""
        if self._token == refused:
            self._token, self._anonymous = None, not self.options.user

    async def status(self) -> list[MemberStatus]:
        """How each member does; one that is away is a `problem`, not an error."""
        return list(await asyncio.gather(*(self.member_status(address) for address in self.ring.addresses)))

    async def member_status(self, address: str) -> MemberStatus:
        """How one member does."""
        deadline = Deadline(self._clock, self.attempt_s)
        reply = await self._attempt(
            self._member(address), "Maintenance", "Status", rpc.StatusRequest(), deadline
        )
        if isinstance(reply, _Failed):
            away = reply.failure is Failure.AWAY
            return MemberStatus(address=address, problem=reply.details, away=away)
        return MemberStatus(
            address=address,
            version=reply.version,
            leads=reply.leader == reply.header.member_id,
            database_bytes=reply.dbSize,
            problem="" if reply.leader else "it sees no leader",
            away=not reply.leader,
        )

    async def close(self) -> None:
        """Close every connection."""
        self.closed = True
        for login in self._logins.values():
            login.cancel()
        members, self._members = self._members, {}
        for member in members.values():
            await member.close()


class _Failed(msgspec.Struct, frozen=True):
    """How an attempt failed, and whether the request may have reached etcd."""

    failure: Failure
    details: str
    sent: bool
    token: str | None = None  # that it was sent with


def _look_at_error(login: asyncio.Task[None]) -> None:
    """Whoever still waits for the log-in gets its error; nobody may."""
    if not login.cancelled():
        login.exception()
