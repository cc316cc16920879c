"""Who decides: this candidate when it leads, else the leader, and this one again when there is no leader.

A follower asks the leader over HTTP. When the leader cannot be reached, requests wait for the next one; an
election takes the lease (2 s) and a little. After `PATIENCE_S` (`PATIENCE_BLIND_S` when etcd cannot be
reached either, so that no election can end), this candidate decides by itself, from its own warm index and
from what its own gateway has running. Such decisions are marked `degraded`: they serve, but candidates that
decide apart do not see each other's load. The first leader that answers ends that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import aiohttp
import msgspec

from mooncaked.clock import Clock
from mooncaked.cluster.records import Leader
from mooncaked.conductor.core import Conductor
from mooncaked.conductor.messages import Ask, Decision, Observation, Prefetch
from mooncaked.errors import MooncakeError, NoInstance, NotLeader, from_wire
from mooncaked.gateway.wire import AskBody, ReleaseBody, ask_body

log = logging.getLogger(__name__)

PATIENCE_S = 2.5
PATIENCE_BLIND_S = 1.0
ASK_S = 1.0  # for the leader to answer
SHUN_S = 0.5  # how long a leader that did not answer is not asked again
RELAYED = "X-Mooncake-Relayed"  # the name of the candidate that asks; the asked one does not pass it on
_DECIDED_MAX = 65_536  # requests whose decider is remembered; callers of the API may never release theirs
_RELEASES_MAX = 1024  # reports to the leader under way; more are dropped, reservations expire by themselves

_encode = msgspec.json.Encoder().encode
_decision = msgspec.json.Decoder(Decision).decode


class LeaderView(Protocol):
    """What is asked of the cluster view."""

    leader: Leader | None

    @property
    def connected(self) -> bool: ...
    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]: ...


class _NoAnswer(Exception):
    """The leader did not answer, or leads no longer."""


class _ErrorBody(msgspec.Struct, frozen=True):
    code: str
    message: str = ""
    fields: dict[str, str | int | float | bool | None] = {}


class _ErrorAnswer(msgspec.Struct, frozen=True):
    error: _ErrorBody


_error = msgspec.json.Decoder(_ErrorAnswer).decode


class Dispatch:
    """Takes asks and returns decisions, wherever they are made. Call `start` before and `close` after.

    `prefetch` is called with a term and what nodes should prefetch in it; it must not wait."""

    def __init__(
        self,
        conductor: Conductor,
        view: LeaderView,
        term: Callable[[], int | None],
        candidate_id: str,
        clock: Clock,
        prefetch: Callable[[int, Sequence[Prefetch]], None],
    ) -> None:
        self._conductor = conductor
        self._prefetch = prefetch
        self._view = view
        self._term = term
        self._candidate_id = candidate_id
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._changed = asyncio.Event()
        self._stop_listening: Callable[[], None] | None = None
        self._leaderless_since_s: float | None = None
        self._shunned: tuple[int, float] = (0, 0.0)  # term of a leader that did not answer, and until when
        self._highest_term = 0
        self._decided_at: dict[str, str] = {}  # request -> gateway URL of the leader that decided it
        self._releases: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to listen for changes of the leader."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=ASK_S),
            headers={"Content-Type": "application/json", RELAYED: self._candidate_id},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._stop_listening = self._view.on_change(self.wake)

    async def close(self) -> None:
        """Let reports that are under way end, and close the connections."""
        if self._stop_listening is not None:
            self._stop_listening()
        if self._releases:
            await asyncio.wait(self._releases, timeout=ASK_S)
        if self._session is not None:
            await self._session.close()

    def wake(self) -> None:
        """The leader may have changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- decisions ------------------------------------------------------------------------------------

    def decide(self, ask: Ask, term: int, *, degraded: bool = False) -> Decision:
        """Decide and reserve here, and have nodes prefetch for it. Raises what `Conductor.schedule` does."""
        decision = self._conductor.schedule(ask, term, degraded=degraded)
        if not decision.prefetch:
            return decision
        self._prefetch(term, decision.prefetch)
        return msgspec.structs.replace(decision, prefetch=[])

    async def schedule(self, ask: Ask, seen: Observation) -> Decision:
        """Decide and reserve, here or at the leader, after taking `seen` (of an earlier try) into account.

        Raises what `Conductor.schedule` does."""
        self._conductor.observe(ask.request_id, seen)
        while True:
            if (term := self._term()) is not None:
                self._leaderless_since_s = None
                return self.decide(ask, term)
            leader = self._askable_leader()
            if leader is not None:
                try:
                    return await self._ask_leader(leader, ask, seen)
                except _NoAnswer as error:
                    self._shun(leader, error)
                    continue
            if (left_s := self._patience_left_s()) <= 0.0:
                log.info("decided without a leader request=%s", ask.request_id)
                return self.decide(ask, 0, degraded=True)
            await self._wait_for_change(left_s)

    async def decode(self, ask: Ask, seen: Observation) -> Decision:
        """The second look, with `ask.prefilled_on` set: at whoever decided, or else here. Never waits.

        Raises what `Conductor.schedule` does."""
        self._conductor.observe(ask.request_id, seen)
        self.prefill_done(ask.request_id)
        leader = self._askable_leader()
        url = self._decided_at.get(ask.request_id)
        if leader is not None and url is not None and leader.record.gateway_url == url:
            try:
                return await self._ask_leader(leader, ask, seen)
            except _NoAnswer as error:
                self._shun(leader, error)
            except NoInstance as error:
                log.info("leader cannot place the decode, deciding here cause=%s", error)
        term = self._term()
        return self.decide(ask, term or 0, degraded=term is None)

    async def explain(self, ask: Ask) -> bytes | None:
        """The leader's explanation, as JSON; None when this candidate's own is to be taken."""
        leader = None if self._term() is not None else self._askable_leader()
        if leader is None:
            return None
        try:
            url = f"{leader.record.gateway_url.rstrip('/')}/v1/explain"
            status, data = await self._post(url, _encode(ask_body(ask, None)))
        except _NoAnswer as error:
            self._shun(leader, error)
            return None
        return data if status == 200 else None

    def prefill_done(self, request_id: str) -> None:
        """A request that one instance serves alone has its first token. The leader learns it at the end."""
        self._conductor.prefill_done(request_id)

    def release(self, request_id: str, seen: Observation) -> None:
        """The request ended: free what it had reserved, and report what was seen. Never waits or raises."""
        self._conductor.observe(request_id, seen)
        self._conductor.release(request_id)
        url = self._decided_at.pop(request_id, None)  # another one may have decided an earlier try
        if url is not None and len(self._releases) < _RELEASES_MAX:
            body = ReleaseBody(request_id=request_id, observed=seen)
            task = asyncio.create_task(self._report(url, body))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    # --- the leader -----------------------------------------------------------------------------------

    def _askable_leader(self) -> Leader | None:
        leader = self._view.leader
        if leader is None or leader.record.candidate_id == self._candidate_id:
            return None
        if leader.term < self._highest_term:
            return None  # a view that is out of date; a later leader has decided already
        term, until_s = self._shunned
        return None if leader.term == term and self._clock.monotonic() < until_s else leader

    def _shun(self, leader: Leader, error: _NoAnswer) -> None:
        log.info("leader does not answer url=%s cause=%s", leader.record.gateway_url, error)
        self._shunned = (leader.term, self._clock.monotonic() + SHUN_S)

    def _patience_left_s(self) -> float:
        now_s = self._clock.monotonic()
        if self._leaderless_since_s is None:
            self._leaderless_since_s = now_s
        limit_s = PATIENCE_S if self._view.connected else PATIENCE_BLIND_S
        return self._leaderless_since_s + limit_s - now_s

    async def _wait_for_change(self, left_s: float) -> None:
        """Until the leader changes, or the shunned one may be asked again."""
        changed = self._changed
        try:
            async with asyncio.timeout(min(left_s, SHUN_S)):
                await changed.wait()
        except TimeoutError:
            return

    async def _ask_leader(self, leader: Leader, ask: Ask, seen: Observation | None) -> Decision:
        url = leader.record.gateway_url
        decision = await self._post_ask(url, ask_body(ask, seen))
        if decision.term < self._highest_term:
            raise _NoAnswer(f"its term {decision.term} is over, {self._highest_term} has begun")
        self._highest_term = decision.term
        self._leaderless_since_s = None
        self._decided_at[ask.request_id] = url
        if len(self._decided_at) > _DECIDED_MAX:
            del self._decided_at[next(iter(self._decided_at))]
        self._conductor.adopt(decision, prefilled=ask.prefilled_on is not None)
        return decision

    async def _post_ask(self, url: str, body: AskBody) -> Decision:
        status, data = await self._post(f"{url.rstrip('/')}/v1/schedule", _encode(body))
        try:
            if status == 200:
                return _decision(data)
            error = _rebuild(url, data)
        except msgspec.MsgspecError as unreadable:
            raise _NoAnswer(f"status {status}, and an answer that cannot be read: {unreadable}") from None
        if isinstance(error, NotLeader) or (status >= 500 and not isinstance(error, NoInstance)):
            raise _NoAnswer(str(error))
        raise error

    async def _report(self, url: str, body: ReleaseBody) -> None:
        try:
            await self._post(f"{url.rstrip('/')}/v1/release", _encode(body))
        except _NoAnswer as error:
            log.info("release not reported, the reservation expires url=%s cause=%s", url, error)

    async def _post(self, url: str, data: bytes) -> tuple[int, bytes]:
        if self._session is None:
            raise _NoAnswer("this gateway is closing")
        try:
            async with self._session.post(url, data=data) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise _NoAnswer(str(error) or f"no answer within {ASK_S:.0f} s") from error


def _rebuild(url: str, data: bytes) -> MooncakeError:
    body = _error(data).error
    return from_wire(body.code, dict(body.fields), body.message, url)
