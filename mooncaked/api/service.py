"""What the unix socket and the peer listener do alike: greet, check what arrives, answer questions."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence

from mooncaked.api.counters import ApiCounters
from mooncaked.api.protocol import (
    Exists,
    ExistsReply,
    FrameHead,
    Hello,
    Kind,
    PrefixMatch,
    PrefixMatchReply,
    check_batch,
    choose_version,
    decode_body,
)
from mooncaked.clock import Clock
from mooncaked.errors import MooncakeError, ProtocolError, Unauthenticated
from mooncaked.keys import as_key, check_namespace
from mooncaked.store import Store

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0  # from connecting to a complete greeting
FRAME_TIMEOUT_S = 10.0  # from the first byte of a frame to its last
_WARNING_EVERY_S = 10.0


class Reception:
    """Greets whoever connects, and keeps account of those who were refused."""

    def __init__(
        self, node_id: str, epoch: int, token: str | None, counters: ApiCounters, clock: Clock
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self._token = token
        self._counters = counters
        self._clock = clock
        self._warned_at_s: dict[str, float] = {}  # by error code

    def greet(self, head: FrameHead, data: bytes | memoryview, peer: str) -> tuple[Hello, int]:
        """The greeting and the version to speak.

        Raises `ProtocolError`, `VersionMismatch` or `Unauthenticated`."""
        if head.kind is not Kind.HELLO or head.reply or head.payload_len:
            raise ProtocolError(peer=peer, problem=f"{head.kind.name} came where HELLO was due")
        hello = decode_body(data, Hello, peer)
        version = choose_version(hello, f"{hello.name} at {peer}")
        if self._token is not None:
            given = (hello.token or "").encode()
            if not hmac.compare_digest(given, self._token.encode()):
                cause = "the token is wrong" if given else "a token is needed and none was given"
                remedy = "Use the token of this node's [listen] token_file."
                raise Unauthenticated(what=f"node {self.node_id}", cause=cause, remedy=remedy)
        return hello, version

    def refused(self, error: MooncakeError, peer: str) -> None:
        """Count a refusal, and log it: as a warning now and then, so that nobody can flood the log."""
        self._counters.refusals.labels(error.code).inc()
        now = self._clock.monotonic()
        level = logging.DEBUG
        if now - self._warned_at_s.get(error.code, float("-inf")) >= _WARNING_EVERY_S:
            self._warned_at_s[error.code] = now
            level = logging.WARNING
        log.log(level, "refused peer=%s code=%s detail=%s", peer, error.code, error)


def check_keys(namespace: str, keys: Sequence[bytes], peer: str) -> None:
    """Raise `ProtocolError` for a batch over the limit, `InvalidKey` for a name that cannot be one."""
    check_batch(len(keys), peer)
    check_namespace(namespace)
    for key in keys:
        as_key(key)


def answer_exists(store: Store, request: Exists, peer: str) -> ExistsReply:
    """Answer `Exists`."""
    check_keys(request.namespace, request.keys, peer)
    return ExistsReply(found=store.exists(request.namespace, request.keys))


def answer_prefix_match(store: Store, request: PrefixMatch, peer: str) -> PrefixMatchReply:
    """Answer `PrefixMatch`."""
    check_keys(request.namespace, request.keys, peer)
    return PrefixMatchReply(matched=store.prefix_match(request.namespace, request.keys))
