"""What an HTTP body asks of the engine. OpenAI's part is read by `mooncaked.gateway.openai`, for the gateway
and the engine must take and refuse the same; here are the fields that only engines know."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mooncaked.engines.reference.chat import ChatTemplate
from mooncaked.engines.reference.sampling import SamplingParams
from mooncaked.engines.reference.sequence import GenerationRequest
from mooncaked.engines.reference.tokenizer import Tokenizer
from mooncaked.errors import ContextLengthExceeded, ModelNotFound
from mooncaked.gateway.openai import Message, Request, check_prompt, decode, invalid, plain_messages

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class KvTransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """How this request's KV moves between instances."""

    do_remote_decode: bool = False  # another instance decodes: store all KV, end after the first token
    do_remote_prefill: bool = False  # another instance has done the prefill
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    sources: list[str] | None = None  # nodes whose store may have the prompt's KV
    first_token: TokenId | None = None  # that the prefill gave


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a completion that are not OpenAI's."""

    kv_transfer_params: KvTransferParams | None = None
    return_token_ids: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: either of the two."""

    model: str | None = None
    messages: list[Message] | None = None
    prompt: str | list[str | int | list[int]] | None = None


_decode_extras = msgspec.json.Decoder(Extras).decode
_decode_tokenize = msgspec.json.Decoder(TokenizeBody).decode


def parse_extras(body: bytes) -> Extras:
    """The engine's own fields of a completion body; raises `InvalidRequest`."""
    extras: Extras = decode(_decode_extras, body)
    params = extras.kv_transfer_params
    if params is not None:
        if params.do_remote_decode and params.do_remote_prefill:
            raise invalid(
                "kv_transfer_params: of do_remote_decode and do_remote_prefill, one at most can be true",
                "kv_transfer_params",
            )
        if params.first_token is not None and not params.do_remote_prefill:
            raise invalid(
                "kv_transfer_params: first_token goes with do_remote_prefill only", "kv_transfer_params"
            )
    return extras


def parse_tokenize(body: bytes) -> TokenizeBody:
    """The body of /tokenize; raises `InvalidRequest`."""
    parsed: TokenizeBody = decode(_decode_tokenize, body)
    if (parsed.messages is None) == (parsed.prompt is None):
        raise invalid("give either messages or prompt")
    return parsed


class Front:
    """The model as requests see it: its name, its texts, its limits."""

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        vocab: int,
        context_tokens: int,
        rng: random.Random,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._template, self._vocab, self._rng = template, vocab, rng

    def check_model(self, name: str | None) -> None:
        """Raise `ModelNotFound` unless `name` is this model, or none is named."""
        if name is not None and name != self.name:
            raise ModelNotFound(name=name, served=self.name, param="model")

    # Encoding takes a while for a long text: call these two on a worker thread.

    def tokens_of(self, request: Request) -> list[int]:
        """The prompt of a completion as token ids; raises `InvalidRequest`."""
        if request.messages is not None:
            return self._chat(request.messages)
        return self._text(request.prompt if request.prompt is not None else "")

    def tokenize(self, body: TokenizeBody) -> list[int]:
        """The ids that /tokenize answers with; raises `InvalidRequest`."""
        if body.messages is not None:
            return self._chat(plain_messages(body.messages))
        return self._text(check_prompt(body.prompt if body.prompt is not None else ""))

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self._encode(self._template.render(messages), add_special=False)

    def _text(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, add_special=True)
        if prompt and max(prompt) >= self._vocab:
            raise invalid(
                f"prompt has the token id {max(prompt)}, but {self.name} has {self._vocab} tokens", "prompt"
            )
        return prompt

    def _encode(self, text: str, *, add_special: bool) -> list[int]:
        return self.tokenizer.encode(
            text, add_special=add_special, limit=self.context_tokens, model=self.name
        )

    def generation(
        self, request: Request, extras: Extras, prompt: list[int], request_id: str
    ) -> GenerationRequest:
        """What the engine is to do; raises `InvalidRequest`."""
        if not prompt:
            raise invalid("the prompt is empty", "messages" if request.chat else "prompt")
        room = self.context_tokens - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                tokens=len(prompt) + (request.max_tokens or 1), model=self.name, limit=self.context_tokens
            )
        params = extras.kv_transfer_params or KvTransferParams()
        if params.first_token is not None and params.first_token >= self._vocab:
            raise invalid("kv_transfer_params: first_token is no token of this model", "kv_transfer_params")
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=1 if params.do_remote_decode else request.max_tokens or room,
            sampling=self._sampling(request.sampling),
            ignore_eos=bool(request.sampling.get("ignore_eos")),
            sources=params.sources,
            handover=params.do_remote_decode,
            first_token=params.first_token,
        )

    def _sampling(self, asked: dict[str, Any]) -> SamplingParams:
        seed = asked.get("seed")
        return SamplingParams(
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=max(0, asked.get("top_k", 0)),
            seed=self._rng.getrandbits(64) if seed is None else seed,
        )


def stops_of(request: Request) -> list[str]:
    """The texts that end the answer."""
    stop = request.sampling.get("stop", [])
    return [stop] if isinstance(stop, str) else list(stop)


Parse = Callable[[bytes], Request]
