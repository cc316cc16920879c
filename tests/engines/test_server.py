"""The HTTP interface: what is answered, in what shape, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from mooncaked.clock import SystemClock
from mooncaked.engines.reference.model_files import LoadedModel
from tests.engines.conftest import Start
from tests.engines.memory_store import MemoryStore
from tests.engines.serving import Http, serving
from tests.engines.test_model import prompt_of

CHAT = [{"role": "user", "content": "on the in"}]
PROMPT = prompt_of(21)


# --- whole answers ---------------------------------------------------------------------------------------


async def test_a_completion(http: Http, tiny: LoadedModel) -> None:
    answer = await http.complete(PROMPT, 6, ignore_eos=True, return_token_ids=True)
    expected = http.running.run(PROMPT, 6, ignore_eos=True).tokens
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [
        {"index": 0, "text": tiny.tokenizer.decode(expected), "finish_reason": "length", "logprobs": None}
    ]
    assert answer["token_ids"] == expected
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (21, 6, 27)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "kv_transfer_params" not in answer


async def test_text_and_its_tokens_are_the_same_prompt(http: Http, tiny: LoadedModel) -> None:
    tokens = tiny.tokenizer.encode("the in on", add_special=True, limit=100, model="tiny")
    by_text, by_tokens = await http.complete("the in on"), await http.complete([tokens])
    assert by_text["choices"] == by_tokens["choices"]
    assert by_text["usage"]["prompt_tokens"] == len(tokens)


async def test_a_chat(http: Http, tiny: LoadedModel) -> None:
    status, answer = await http.post(
        "/v1/chat/completions", {"model": "tiny", "messages": CHAT, "max_tokens": 5, "temperature": 0}
    )
    assert status == 200
    _, tokens = await http.post("/tokenize", {"model": "tiny", "messages": CHAT})
    same = await http.complete(tokens["tokens"], 5)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": same["choices"][0]["text"]}
    assert answer["usage"]["prompt_tokens"] == tokens["count"]


async def test_a_chat_without_a_limit_may_fill_the_context(http: Http) -> None:
    http.running.engine._eos = frozenset()
    status, answer = await http.post(
        "/v1/chat/completions", {"model": "tiny", "messages": CHAT, "temperature": 0}
    )
    assert status == 200
    assert answer["usage"]["total_tokens"] == http.running.engine.context_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_stop_texts_end_the_answer_and_are_left_out(http: Http) -> None:
    text = (await http.complete(PROMPT, 40, ignore_eos=True))["choices"][0]["text"]
    stop = text[7:9]
    for given in (stop, [stop, "never comes"]):
        answer = await http.complete(PROMPT, 40, ignore_eos=True, stop=given)
        assert answer["choices"][0]["text"] == text[: text.find(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 40


async def test_the_end_token_ends_the_answer_and_has_no_text(http: Http, tiny: LoadedModel) -> None:
    tokens = http.running.run(PROMPT, 10, ignore_eos=True).tokens
    end = next(t for i, t in enumerate(tokens) if i and t not in tokens[:i])
    eos, http.running.engine._eos = http.running.engine._eos, frozenset([end])
    object.__setattr__(http.running.parts.front.tokenizer, "eos", frozenset([end]))
    try:
        answer = await http.complete(PROMPT, 10)
    finally:
        object.__setattr__(http.running.parts.front.tokenizer, "eos", eos)
    kept = tokens[: tokens.index(end)]
    assert answer["choices"][0]["text"] == tiny.tokenizer.decode(kept)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(kept) + 1


async def test_seeds_make_samples_repeatable(http: Http) -> None:
    async def text(**fields: Any) -> str:
        answer = await http.complete(PROMPT, 20, ignore_eos=True, **{"temperature": 1.5, **fields})
        return str(answer["choices"][0]["text"])

    assert await text(seed=-5) == await text(seed=-5)
    assert await text(seed=1) != await text(seed=2)
    assert await text() != await text()
    assert await text(top_k=1) == await text(temperature=0)


# --- streams ------------------------------------------------------------------------------------------


async def test_a_stream_has_one_event_per_token_and_adds_up(http: Http) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = await http.complete(PROMPT, 12, ignore_eos=True)
    events = await http.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    *chunks, last = events
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 12 + ["length"]
    assert len({c["id"] for c in events}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert "usage" not in (await http.stream("/v1/completions", body))[-1]


async def test_a_chat_stream_begins_with_the_role(http: Http) -> None:
    events = await http.stream(
        "/v1/chat/completions", {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 0}
    )
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")


async def test_characters_are_never_cut(http: Http, tiny: LoadedModel) -> None:
    """The tiny model answers in random bytes, so nearly all characters are broken: as in one piece."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 2, "seed": 4}
    events = await http.stream("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
    tokens = [t for event in events for t in event["token_ids"]]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert len(tokens) == 60
    plain = tiny.tokenizer.decode(tokens)
    assert text.replace("\ufffd", "") == plain.replace("\ufffd", "")


async def test_a_client_that_leaves_frees_its_blocks(http: Http) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 480, "stream": True, "ignore_eos": True}
    for stream in (True, False):
        async with (
            http.session.post(http.url + "/v1/completions", data=json.dumps(body | {"stream": stream}))
            if stream
            else _impatient(http, body | {"stream": False}) as response
        ):
            if response is not None:
                await response.content.readany()
                response.close()
        await asyncio.to_thread(http.running.settle)
    _, metrics = await _metrics(http)
    assert 'mooncaked_engine_requests_total{end="cancelled"} 2.0' in metrics


class _impatient:
    """A request whose client goes away before the answer."""

    def __init__(self, http: Http, body: dict[str, Any]) -> None:
        self._http, self._body = http, body

    async def __aenter__(self) -> None:
        host, port = self._http.url.removeprefix("http://").split(":")
        data = json.dumps(self._body).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        while not self._http.running.parts.scheduler.running:
            await SystemClock().sleep(0.001)
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        return


async def _metrics(http: Http) -> tuple[int, str]:
    async with http.session.get(http.url + "/metrics") as response:
        return response.status, await response.text()


# --- prefill here, decode there --------------------------------------------------------------------------


async def test_prefill_hands_over_and_decode_goes_on(start: Start, store: MemoryStore) -> None:
    async with serving(start(store), "node-a") as prefill, serving(start(store), "node-b") as decode:
        alone = await prefill.complete(PROMPT, 9, ignore_eos=True, return_token_ids=True)
        store.values.clear()
        first = await prefill.complete(
            PROMPT, 1, ignore_eos=True, kv_transfer_params={"do_remote_decode": True, "request_id": "r-1"}
        )
        params = first["kv_transfer_params"]
        assert first["id"] == "cmpl-r-1"
        assert params["node_id"] == "node-a"
        assert params["first_token"] == alone["token_ids"][0]
        assert params["finished"] is False
        assert set(params["timing"]) == {"queue_ms", "load_ms", "prefill_ms", "store_ms"}
        assert first["usage"]["completion_tokens"] == 1
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "ignore_eos": True}
        remote = {"do_remote_prefill": True, "first_token": params["first_token"], "sources": ["node-a"]}
        more = {"kv_transfer_params": remote, "return_token_ids": True}
        events = await decode.stream(
            "/v1/completions", body | more | {"stream_options": {"include_usage": True}}
        )
        assert [t for e in events for t in e.get("token_ids", [])] == alone["token_ids"]
        text = "".join(e["choices"][0]["text"] for e in events if e["choices"])
        assert text == alone["choices"][0]["text"]
        assert events[-2]["kv_transfer_params"]["loaded_tokens"] == 21
        assert events[-1]["usage"]["completion_tokens"] == 9
        # Handed over, not reused: the prompt was computed for this very request.
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert store.got[-1][1] == ["node-a"]


async def test_reuse_is_reported_with_the_first_event(http: Http) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream_options": {"include_usage": True}}
    await http.complete(PROMPT, 1)
    await asyncio.to_thread(http.running.settle)
    events = await http.stream("/v1/completions", body | {"kv_transfer_params": {"sources": []}})
    assert events[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_a_prefill_whose_first_token_is_the_end_says_so(http: Http) -> None:
    tokens = http.running.run(PROMPT, 1, ignore_eos=True).tokens
    http.running.engine._eos = frozenset(tokens)
    answer = await http.complete(PROMPT, 1, kv_transfer_params={"do_remote_decode": True})
    assert answer["kv_transfer_params"]["finished"] is True
    assert answer["choices"][0]["finish_reason"] == "stop"


# --- the other routes -----------------------------------------------------------------------------------


async def test_models_and_health(http: Http) -> None:
    status, models = await http.get("/v1/models")
    assert status == 200
    assert [card["id"] for card in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == http.running.engine.context_tokens
    assert (await http.get("/v1/models/tiny"))[1]["id"] == "tiny"
    assert (await http.get("/v1/models/other"))[0] == 404
    assert await http.get("/health") == (200, {"status": "ok", "requests": 0})
    http.server.draining = True
    assert (await http.get("/health"))[0] == 503


async def test_health_tells_when_the_engine_is_dead(http: Http) -> None:
    http.running.engine.close()
    status, answer = await http.get("/health")
    assert status == 503
    assert answer["error"]["code"] == "unhealthy"
    status, answer = await http.post("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert (status, answer["error"]["code"]) == (503, "draining")


async def test_tokenize(http: Http, tiny: LoadedModel) -> None:
    _, text = await http.post("/tokenize", {"prompt": "the"})
    expected = tiny.tokenizer.encode("the", add_special=True, limit=9, model="tiny")
    assert text == {"tokens": expected, "count": len(expected), "max_model_len": 512}
    _, chat = await http.post("/tokenize", {"messages": CHAT})
    assert chat["tokens"][0] == 1
    assert tiny.tokenizer.decode(chat["tokens"]).startswith("user\non the in")


async def test_metrics(http: Http) -> None:
    await http.complete(PROMPT, 5, ignore_eos=True)
    await asyncio.to_thread(http.running.settle)
    status, text = await _metrics(http)
    assert status == 200
    for line in (
        "mooncaked_engine_generated_tokens_total 5.0",
        "mooncaked_engine_computed_prompt_tokens_total 21.0",
        "mooncaked_engine_cached_prompt_tokens_total 0.0",
        "mooncaked_engine_ttft_seconds_count 1.0",
        "mooncaked_engine_tbt_seconds_count 4.0",
        "mooncaked_engine_store_saved_blocks_total 5.0",
        "mooncaked_engine_running_requests 0.0",
        'mooncaked_engine_requests_total{end="length"} 1.0',
    ):
        assert line in text
