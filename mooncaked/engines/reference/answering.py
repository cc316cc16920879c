"""One answer on the event loop: the engine's tokens as pieces of text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from mooncaked.engines.reference.engine import Engine
from mooncaked.engines.reference.sequence import Finish, GenerationRequest, Output
from mooncaked.engines.reference.text import AnswerText
from mooncaked.engines.reference.tokenizer import Tokenizer
from mooncaked.gateway.shapes import Usage


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one token adds to the answer, or the end of it."""

    text: str = ""
    token: int | None = None
    reason: str | None = None  # "stop" | "length": the last piece
    usage: Usage
    finish: Finish | None = None  # with the last piece, unless a stop text ended the answer early


async def answer(
    engine: Engine, tokenizer: Tokenizer, request: GenerationRequest, stops: list[str]
) -> AsyncGenerator[Piece, None]:
    """Run `request`. Leaving the iterator early cancels it.

    Raises what `Engine.submit` does, before the first piece, and the error that ends the request."""
    news: asyncio.Queue[Output] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    sequence = engine.submit(request, lambda output: _tell(loop, news, output))
    text = AnswerText(tokenizer.decode, stops)
    count, cached = 0, 0
    # KV that the prefill has computed for this very request is handed over, not reused.
    handed_over = request.first_token is not None
    stopped = False
    try:
        while True:
            output = await news.get()
            if output.error is not None:
                raise output.error
            cached = 0 if handed_over else max(cached, output.cached_tokens)
            if output.token is not None:
                count += 1
                usage = Usage(len(request.prompt), count, cached)
                hidden = output.token in tokenizer.eos and not request.ignore_eos
                yield Piece(text="" if hidden else text.push(output.token), token=output.token, usage=usage)
                stopped = stopped or text.stopped
                if not stopped or request.handover:  # a handover is over only when its KV is stored
                    continue
            usage = Usage(len(request.prompt), count, cached)
            rest, reason = text.flush(), output.finish.reason if output.finish else "stop"
            yield Piece(
                text=rest, reason="stop" if text.stopped else reason, usage=usage, finish=output.finish
            )
            return
    finally:
        engine.cancel(sequence)


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Output], output: Output) -> None:
    try:
        loop.call_soon_threadsafe(news.put_nowait, output)
    except RuntimeError:
        return  # the loop has ended, and with it whoever wanted to know


def timing_of(finish: Finish | None) -> dict[str, Any] | None:
    """A request's times for its answer."""
    return (
        None if finish is None else {k: round(v, 3) for k, v in msgspec.structs.asdict(finish.timing).items()}
    )
