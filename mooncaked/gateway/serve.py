"""One request from its decision to its last token: prefill here, decode there; and what if one fails.

Until the client has been sent something, a failed instance costs a try and not the request: a prefill moves
to another instance, a decode moves and pulls the prompt's KV from where the prefill left it. Tries are
bounded, and the caller's deadline covers all of it."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from mooncaked.clock import Clock
from mooncaked.conductor.messages import Ask, Decision, DecodeSeen, Observation
from mooncaked.errors import EngineFailed
from mooncaked.gateway import bodies
from mooncaked.gateway.answers import Answer
from mooncaked.gateway.counters import Counters
from mooncaked.gateway.dispatch import Dispatch
from mooncaked.gateway.engines import Completion, Engines, Generation, Target
from mooncaked.gateway.openai import Request
from mooncaked.gateway.prompts import Prompt
from mooncaked.gateway.shapes import Usage
from mooncaked.gateway.watchdog import Call, Watchdog

log = logging.getLogger(__name__)

TRIES_MAX = 4  # failed instances per request, prefill and decode together
_PAUSE_S = 0.2  # before an instance that failed this request is tried again, for want of another; doubles
_FINISH_S = 1.0  # for what follows the end of a stream


@dataclass(slots=True)
class Run:
    """The course of one request."""

    request: Request
    prompt: Prompt
    ask: Ask
    answer: Answer
    began_s: float  # when the request arrived
    failed: list[str] = field(default_factory=list)  # instances, in order
    seen: Observation = field(default_factory=Observation)  # not yet reported to whoever decides
    decided_s: float = 0.0  # when the decision in force was asked for
    prefilled: Decision | None = None  # set once the prefill is done: only the decode is to be tried again
    kv_node: str | None = None  # where the prefill left the prompt's KV
    first_token: int | None = None
    reused_tokens: int = 0
    first_s: float | None = None  # when the first token of the answer came
    last_s: float = 0.0
    tokens: int = 0  # of the answer


class Serving:
    """Runs requests. One for the whole gateway."""

    def __init__(
        self, engines: Engines, dispatch: Dispatch, watchdog: Watchdog, counters: Counters, clock: Clock
    ) -> None:
        self._engines = engines
        self._dispatch = dispatch
        self._watchdog = watchdog
        self._counters = counters
        self._clock = clock

    async def run(self, run: Run) -> web.StreamResponse:
        """Serve one request; returns the finished response.

        Raises `EngineFailed` when every try failed, and what `Dispatch.schedule` raises."""
        try:
            while True:
                try:
                    return await self._try(run)
                except EngineFailed as error:
                    await self._after_failure(run, error)
        finally:
            self._dispatch.release(run.ask.request_id, self._last_words(run))

    async def _try(self, run: Run) -> web.StreamResponse:
        """From where the request stands to its end."""
        decision = run.prefilled
        if decision is None:
            decision = await self._decide(run)
            if decision.single:
                await self._generate(run, decision, bodies.single(run.request, run.prompt, decision))
                return await self._end(run, decision)
            done = await self._prefill(run, decision)
            if done is not None:
                return await self._end_with_prefill(run, decision, done)
            run.prefilled = decision
        decision = run.prefilled = await self._second_look(run, decision)
        body = bodies.decode(run.request, run.prompt, decision, run.kv_node, run.first_token)
        await self._generate(run, decision, body)
        return await self._end(run, decision)

    async def _decide(self, run: Run) -> Decision:
        run.decided_s = self._clock.monotonic()
        ask = msgspec.structs.replace(run.ask, avoid=frozenset(run.failed))
        decision = await self._dispatch.schedule(ask, _take_seen(run))
        self._counters.decided(decision, self._clock.monotonic() - run.decided_s)
        return decision

    async def _after_failure(self, run: Run, error: EngineFailed) -> None:
        """Note which instance failed; raises `error` when there is no further try."""
        instance = str(error.fields["instance"])
        again = instance in run.failed
        self._counters.engine_failures.inc()
        log.warning("engine failed instance=%s cause=%s", instance, error.fields["cause"])
        run.failed.append(instance)
        run.seen = msgspec.structs.replace(run.seen, failed=[*run.seen.failed, instance])
        if run.answer.begun or len(run.failed) >= TRIES_MAX:
            raise error
        if again:
            await self._clock.sleep(_PAUSE_S * 2.0 ** (len(run.failed) - 2))

    # --- the stages ------------------------------------------------------------------------------------

    async def _prefill(self, run: Run, decision: Decision) -> Completion | None:
        """Run the prefill. Returns its completion when that is the whole answer already."""
        target = Target(decision.prefill, decision.prefill_url)
        sent_s = self._clock.monotonic()
        async with self._watchdog.watching(decision.prefill):
            done = await self._engines.complete(target, bodies.prefill(run.request, run.prompt, decision))
        wall_ms = (self._clock.monotonic() - sent_s) * 1000.0
        if not done.choices:
            raise EngineFailed(instance=decision.prefill, cause="its answer to a prefill holds no choice")
        params = done.kv_transfer_params
        run.reused_tokens = done.usage.reused_tokens if done.usage else 0
        timing = params.timing if params else None
        run.seen = msgspec.structs.replace(
            run.seen, prefill=bodies.prefill_seen(run.reused_tokens, wall_ms, timing)
        )
        run.kv_node = (params.node_id if params else None) or decision.prefill_terms.node_id
        run.first_token = params.first_token if params else None
        return done if decision.max_tokens == 1 or (params is not None and params.finished) else None

    async def _second_look(self, run: Run, decision: Decision) -> Decision:
        """The decode instance, looked at again now that the prefill is done, or after one has failed."""
        ask = msgspec.structs.replace(run.ask, avoid=frozenset(run.failed), prefilled_on=decision.prefill)
        return await self._dispatch.decode(ask, _take_seen(run))

    async def _generate(self, run: Run, decision: Decision, body: bodies.Body) -> None:
        """Stream an answer from the decode instance to the client."""
        target = Target(decision.decode, decision.decode_url)
        run.first_s, run.tokens = None, 0
        async with (
            self._watchdog.watching(decision.decode) as call,
            self._engines.generate(target, body) as stream,
        ):
            reason = None
            while chunks := await stream.next():
                call.heard_s = math.inf  # what follows waits for the client
                if run.first_s is None:
                    await self._first(run, decision, chunks[0])
                    call.streaming = True
                reason = await self._pass_on(run, chunks) or reason
                call.heard_s = asyncio.get_running_loop().time()
            if reason is None:
                raise EngineFailed(instance=decision.decode, cause="its stream ended without a finish reason")
            await self._finish(stream, call)

    async def _finish(self, stream: Generation, call: Call) -> None:
        """Keep the connection for the next request, where the engine ends its answer properly."""
        call.heard_s = math.inf
        try:
            async with asyncio.timeout(_FINISH_S):
                await stream.finish()
        except TimeoutError:
            return

    async def _first(self, run: Run, decision: Decision, chunk: Completion) -> None:
        run.first_s = run.last_s = self._clock.monotonic()
        if decision.single:
            self._dispatch.prefill_done(run.ask.request_id)
            run.reused_tokens = chunk.usage.reused_tokens if chunk.usage else run.reused_tokens
        self._counters.ttft.observe(run.first_s - run.began_s)
        await run.answer.start(bodies.headers(run.ask.request_id, run.prompt, decision, run.reused_tokens))

    async def _pass_on(self, run: Run, chunks: list[Completion]) -> str | None:
        """Send chunks to the client; the finish reason if one of them has it."""
        pieces = [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks if c.choices]
        if run.tokens:
            now_s = self._clock.monotonic()
            self._counters.tbt.observe((now_s - run.last_s) / max(1, len(pieces)))
            run.last_s = now_s
        run.tokens += len(pieces)
        if (usage := chunks[-1].usage) is not None:
            run.tokens = usage.completion_tokens or run.tokens
            if run.prefilled is None:  # a decode instance loads the whole prompt: that is no reuse
                run.reused_tokens = usage.reused_tokens
        if pieces:
            await run.answer.add(pieces)
        return next((reason for _, reason in pieces if reason is not None), None)

    # --- the end ---------------------------------------------------------------------------------------

    async def _end(self, run: Run, decision: Decision) -> web.StreamResponse:
        usage = Usage(run.prompt.count, run.tokens, min(run.reused_tokens, run.prompt.count))
        self._counters.served(usage)
        response = await run.answer.end(usage)
        log.info(
            "served prefill=%s decode=%s prompt_tokens=%d reused_tokens=%d answer_tokens=%d ttft_ms=%.0f"
            " term=%d",
            decision.prefill,
            decision.decode,
            usage.prompt_tokens,
            usage.reused_tokens,
            usage.completion_tokens,
            ((run.first_s or run.began_s) - run.began_s) * 1000.0,
            decision.term,
        )
        return response

    async def _end_with_prefill(self, run: Run, decision: Decision, done: Completion) -> web.StreamResponse:
        """The first token is also the last one."""
        choice = done.choices[0]
        await self._first(run, decision, done)
        run.tokens = (done.usage.completion_tokens if done.usage else 0) or 1
        reason = choice.finish_reason or ("length" if decision.max_tokens == 1 else "stop")
        await run.answer.add([(choice.text, reason)])
        return await self._end(run, decision)

    def _last_words(self, run: Run) -> Observation:
        """What is still to be reported when the request ends."""
        if run.first_s is None:
            return run.seen
        gaps = run.tokens - 1
        decode = DecodeSeen(
            tokens=run.tokens,
            tbt_ms=(run.last_s - run.first_s) * 1000.0 / gaps if gaps > 0 else None,
            ttft_ms=(run.first_s - run.decided_s) * 1000.0,
        )
        return msgspec.structs.replace(run.seen, decode=decode)


def _take_seen(run: Run) -> Observation:
    seen, run.seen = run.seen, Observation()
    return seen
