"""How gRPC is used to speak to etcd: credentials, channels, the ring of members, what its errors mean."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec

from mooncaked.cluster._etcd3 import rpc, stubs
from mooncaked.errors import ConfigError, LeaseLost, MooncakeError, Refused, Unauthenticated, Unreachable

MESSAGE_BYTES_MAX = 64 << 20
CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # a proxy for the web is none for etcd
    ("grpc.use_local_subchannel_pool", 1),  # a lease keeper's connection is its own
    # etcd's servers end connections that ping more often than every 5 s, or at all while no call is open.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # this is how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.service_config", '{"methodConfig": []}'),  # no retries behind our back
    ("grpc.enable_retries", 0),
]
_REMEDY = "Check that etcd runs there and that etcd.endpoints names it."
_STALE_TOKEN = (
    "user name is empty",
    "invalid auth token",
    "revision of auth store is old",
    "revision in header is old",
)
_NEED_LEADER = ("hasleader", "true")  # a member cut off from its cluster must refuse instead of waiting


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where etcd is and how to prove oneself to it."""

    endpoints: list[str]  # "host:port" each, optionally after http:// or https://
    ca_file: Path | None = None  # with it (or https://) connections use TLS
    cert_file: Path | None = None  # client certificate, for mutual TLS
    key_file: Path | None = None
    user: str = ""
    password: str = ""
    request_timeout_s: float = 3.0  # of one call, all its attempts together


class Endpoints(msgspec.Struct, frozen=True):
    """Checked addresses ("host:port") and whether to use TLS."""

    addresses: list[str]
    tls: bool


def _bad(key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(file="etcd options", key=f"etcd.{key}", problem=problem, remedy=remedy)


def parse_endpoints(options: EtcdOptions) -> Endpoints:
    """The members' addresses; raises `ConfigError` when one is malformed or none is given."""
    addresses, schemes = [], set()
    for endpoint in options.endpoints:
        scheme, separator, address = endpoint.strip().rpartition("://")
        host, _, port = address.rstrip("/").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or scheme not in ("", "http", "https"):
            raise _bad("endpoints", f"{endpoint!r} is no address", 'Write "host:port", e.g. "10.0.0.1:2379".')
        schemes.add(scheme if separator else "")
        addresses.append(f"{host}:{port}")
    if not addresses:
        raise _bad("endpoints", "it is empty", "Name at least one etcd member.")
    certain = options.ca_file is not None or options.cert_file is not None
    if (certain or "https" in schemes) and "http" in schemes:
        raise _bad("endpoints", "http:// and TLS do not go together", "Use https://, or leave out the files.")
    return Endpoints(list(dict.fromkeys(addresses)), certain or "https" in schemes)


def _read(path: Path | None, key: str) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise _bad(key, f"cannot read {path}: {error.strerror}", "Correct the path or its rights.") from error


def channel_credentials(options: EtcdOptions, tls: bool) -> Any:
    """gRPC's channel credentials, or None without TLS; raises `ConfigError` when a file cannot be used."""
    if (options.cert_file is None) != (options.key_file is None):
        raise _bad("cert_file", "cert_file and key_file belong together", "Give both or neither.")
    if not tls:
        return None
    ca, key = _read(options.ca_file, "ca_file"), _read(options.key_file, "key_file")
    return grpc.ssl_channel_credentials(ca, key, _read(options.cert_file, "cert_file"))


# --- what an error means -------------------------------------------------------------------------------


class Failure(Enum):
    """What to do about a failed call."""

    AWAY = "this member cannot answer: try another"
    STALE_TOKEN = "log in again"
    DENIED = "the credentials do not suffice"
    COMPACTED = "the revision is gone"
    LEASE_GONE = "the lease is gone"
    REFUSED = "etcd declines the request"


_BY_CODE = {
    grpc.StatusCode.PERMISSION_DENIED: Failure.DENIED,
    grpc.StatusCode.OUT_OF_RANGE: Failure.COMPACTED,
    grpc.StatusCode.INVALID_ARGUMENT: Failure.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: Failure.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: Failure.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.REFUSED,
}


def classify(code: Any, details: str) -> Failure:
    """Decide by gRPC's code and etcd's message; what is unknown counts as `AWAY`, which deadlines bound."""
    if any(text in details for text in _STALE_TOKEN) or code is grpc.StatusCode.UNAUTHENTICATED:
        return Failure.STALE_TOKEN
    if "invalid user ID or password" in details:
        return Failure.DENIED
    if code is grpc.StatusCode.NOT_FOUND:
        return Failure.LEASE_GONE if "lease" in details else Failure.REFUSED
    if "too many requests" in details:
        return Failure.AWAY
    return _BY_CODE.get(code, Failure.AWAY)


def to_error(failure: Failure, details: str, addresses: str, user: str) -> MooncakeError:
    """The error that a caller gets for a failure that trying again does not heal."""
    match failure:
        case Failure.DENIED | Failure.STALE_TOKEN:
            who = f"user {user}" if user else "no user is configured"
            remedy = "Check etcd.user, etcd.password_file and the roles in etcd."
            return Unauthenticated(what=f"etcd at {addresses}", cause=f"{details} ({who})", remedy=remedy)
        case Failure.LEASE_GONE:
            return LeaseLost(what="this request", cause=details)
        case Failure.AWAY:
            return unreachable(addresses, details)
        case _:
            remedy = "See etcd's log."
            if "space exceeded" in details:
                remedy = "Compact and defragment etcd or raise its quota, then disarm its NOSPACE alarm."
            return Refused(problem=f"etcd at {addresses} declined: {details}", remedy=remedy)


_CONNECT_PROBLEMS = (  # what gRPC says, what that means to an operator
    ("Connection refused", "connection refused"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate does not stand the check against etcd.ca_file"),
    ("Handshake read failed", "no TLS handshake, does it expect TLS at all?"),
    ("_ALERT_", "TLS refused, does it demand another client certificate (etcd.cert_file)?"),
    ("TSI_DATA_CORRUPTED", "TLS refused, does it demand another client certificate (etcd.cert_file)?"),
    ("Socket closed", "it closes the connection, does it expect TLS?"),
    ("Domain name not found", "no such host"),
)


def connect_problem(details: str) -> str:
    """Why a connection failed, from gRPC's words, in a few of ours."""
    for theirs, ours in _CONNECT_PROBLEMS:
        if theirs in details:
            return ours
    return details.rpartition("last error: ")[2] or "no connection"


def unreachable(addresses: str, cause: str) -> Unreachable:
    """No member could be reached in time."""
    return Unreachable(what="etcd", address=addresses, cause=cause or "no answer in time", remedy=_REMEDY)


# --- members -------------------------------------------------------------------------------------------


class Ring:
    """Which member to ask: the same one while it answers, the next one after a failure. Pure."""

    def __init__(self, addresses: list[str], rng: random.Random) -> None:
        self.addresses = addresses
        self._current = rng.randrange(len(addresses))

    @property
    def current(self) -> str:
        """The member to ask now."""
        return self.addresses[self._current]

    def failed(self, address: str) -> None:
        """Move on from `address`, unless another caller has already."""
        if address == self.current:
            self._current = (self._current + 1) % len(self.addresses)


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    return (_NEED_LEADER, ("token", token)) if token else (_NEED_LEADER,)


_SETTLED = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)
_STUBS = {
    "KV": stubs.KVStub,
    "Watch": stubs.WatchStub,
    "Lease": stubs.LeaseStub,
    "Auth": stubs.AuthStub,
    "Maintenance": stubs.MaintenanceStub,
}


class Member:
    """One etcd member's channel and stubs on the running event loop."""

    def __init__(self, address: str, credentials: Any) -> None:
        self.address = address
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stubs: Mapping[str, Any] = {name: stub(self.channel) for name, stub in _STUBS.items()}

    def method(self, service: str, name: str) -> Any:
        """The callable of one RPC."""
        return getattr(self._stubs[service], name)

    async def connect(self, timeout_s: float) -> str:
        """Wait for a connection: "" when there is one, else why not. Connecting apart from calling tells a
        request that was never sent from one whose fate is unknown."""
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self.channel.get_state(try_to_connect=True)) not in _SETTLED:
                    await self.channel.wait_for_state_change(state)
                if state is grpc.ChannelConnectivity.READY:
                    return ""
                return await self._why_not(timeout_s)
        except TimeoutError:
            return "no connection in time"

    async def _why_not(self, timeout_s: float) -> str:
        """gRPC tells the cause only to a call, so make one that does no harm should it get through."""
        try:
            await self.method("Maintenance", "Status")(rpc.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return connect_problem(error.details() or "")
        return "connected too late"

    async def authenticate(self, user: str, password: str, timeout_s: float) -> str | None:
        """A token, or None where etcd has authentication switched off."""
        request = rpc.AuthenticateRequest(name=user, password=password)
        try:
            reply = await self.method("Auth", "Authenticate")(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return None
            raise
        return str(reply.token)

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self.channel.close(grace=None)


class Broken(NamedTuple):
    """How a call failed."""

    failure: Failure
    details: str


def broken(error: Any) -> Broken:
    """Classify a gRPC error."""
    code, details = error.code(), error.details() or ""
    name = code.name.lower().replace("_", " ")
    return Broken(classify(code, details), f"{name}: {details}" if details else name)


def being_cancelled() -> bool:
    """Whether the running task itself is to end. gRPC reports the end of a call that this side cancelled, and
    of one whose channel was closed, to whoever waits for it, as if the task were."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
