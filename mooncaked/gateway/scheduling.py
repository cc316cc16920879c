"""The scheduling and index API, for gateways of other makers, the nodes, operators, and among candidates.

POST /v1/schedule decides and reserves; what it reserved is freed by POST /v1/release, or expires. A follower
passes both on to the leader. POST /v1/explain and /v1/locate change nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from aiohttp import web

from mooncaked.conductor.core import Conductor
from mooncaked.conductor.index import Holder
from mooncaked.conductor.messages import Ask, Observation
from mooncaked.errors import InvalidRequest, NotLeader
from mooncaked.gateway.dispatch import RELAYED, Dispatch, LeaderView
from mooncaked.gateway.http import Gateway, as_json
from mooncaked.gateway.openai import Request, check_prompt, decode, invalid, plain_messages
from mooncaked.gateway.prompts import Prompts
from mooncaked.gateway.wire import AskBody, LocateBody, ReleaseBody, chains_of
from mooncaked.keys import check_namespace, parse_key

LOCATE_KEYS_MAX = 16384

_ask = msgspec.json.Decoder(AskBody).decode
_release = msgspec.json.Decoder(ReleaseBody).decode
_locate = msgspec.json.Decoder(LocateBody).decode


class SchedulingApi:
    """`routes` adds it to an application."""

    def __init__(
        self,
        conductor: Conductor,
        dispatch: Dispatch,
        gateway: Gateway,
        prompts: Prompts,
        view: LeaderView,
        term: Callable[[], int | None],
    ) -> None:
        self._conductor = conductor
        self._dispatch = dispatch
        self._gateway = gateway
        self._prompts = prompts
        self._view = view
        self._term = term

    def routes(self, app: web.Application) -> None:
        """Add the routes."""
        for path, handler in {
            "/v1/schedule": self._schedule,
            "/v1/release": self._release,
            "/v1/explain": self._explain,
            "/v1/locate": self._locate,
        }.items():
            app.router.add_post(path, handler, expect_handler=self._gateway.expect)

    async def _schedule(self, request: web.Request) -> web.StreamResponse:
        body: AskBody = decode(_ask, await self._gateway.body(request))
        seen = body.observed or Observation()
        if RELAYED in request.headers:
            term = self._leading()
            ask = await self._asked(body)
            self._conductor.observe(ask.request_id, seen)
            return as_json(self._dispatch.decide(ask, term))
        ask = await self._asked(body)
        if ask.prefilled_on is not None:
            return as_json(await self._dispatch.decode(ask, seen))
        return as_json(await self._dispatch.schedule(ask, seen))

    async def _release(self, request: web.Request) -> web.StreamResponse:
        body: ReleaseBody = decode(_release, await self._gateway.body(request))
        seen = body.observed or Observation()
        if body.stage not in ("prefill", "all"):
            raise invalid(f"stage: there is no stage {body.stage}, only prefill and all", "stage")
        known = self._conductor.ledger.get(body.request_id) is not None
        if body.stage == "prefill":
            self._conductor.observe(body.request_id, seen)
            self._dispatch.prefill_done(body.request_id)
        else:
            self._dispatch.release(body.request_id, seen)
        return as_json({"request_id": body.request_id, "known": known})

    async def _explain(self, request: web.Request) -> web.StreamResponse:
        body: AskBody = decode(_ask, await self._gateway.body(request))
        ask = await self._asked(body)
        if RELAYED not in request.headers:
            answer = await self._dispatch.explain(ask)
            if answer is not None:
                return web.Response(body=answer, content_type="application/json")
        return as_json(self._conductor.explain(ask, self._term() or 0))

    async def _locate(self, request: web.Request) -> web.StreamResponse:
        body: LocateBody = decode(_locate, await self._gateway.body(request))
        namespace = check_namespace(body.namespace)
        if len(body.keys) > LOCATE_KEYS_MAX:
            raise invalid(f"keys: {len(body.keys)} in one request, the limit is {LOCATE_KEYS_MAX}", "keys")
        found: dict[str, list[Holder]] = {
            text: self._conductor.index.holders(namespace, parse_key(text)) for text in body.keys
        }
        return as_json(found)

    # --- helpers ---------------------------------------------------------------------------------------

    def _leading(self) -> int:
        term = self._term()
        if term is None:
            leader = self._view.leader
            raise NotLeader(leader=leader.record.gateway_url if leader else "not known")
        return term

    async def _asked(self, body: AskBody) -> Ask:
        """The ask in a body; raises `InvalidRequest` and what tokenizing raises."""
        if body.prefilled_on is not None and body.request_id is None:
            raise invalid("request_id is missing: it names what was scheduled before", "request_id")
        model = self._gateway.model(body.model)
        if body.prompt_tokens is not None:
            prompt_tokens, chains = body.prompt_tokens, chains_of(body)
        else:
            prompt = await self._prompts.prompt(_as_request(body), model.sites(), model.families())
            prompt_tokens, chains = prompt.count, prompt.chains(model.families())
        return Ask(
            request_id=body.request_id or secrets.token_hex(12),
            model=body.model,
            prompt_tokens=prompt_tokens,
            max_tokens=body.max_tokens,
            chains=chains,
            avoid=frozenset(body.avoid),
            prefilled_on=body.prefilled_on,
        )


def _as_request(body: AskBody) -> Request:
    if (body.messages is None) == (body.prompt is None):
        problem = "give the prompt as one of: messages, prompt, or prompt_tokens with chains"
        raise InvalidRequest(problem=problem, param="prompt")
    return Request(
        model=body.model,
        messages=None if body.messages is None else plain_messages(body.messages),
        prompt=None if body.prompt is None else check_prompt(body.prompt),
        max_tokens=body.max_tokens,
        stream=False,
        include_usage=False,
        sampling={},
    )
