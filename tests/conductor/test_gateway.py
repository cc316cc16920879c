"""The OpenAI-compatible gateway against engines that really listen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mooncaked.keys import chain_keys
from mooncaked.types import Role
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, pair, running
from tests.fakes.engine import FakeEngine


@pytest.fixture
async def gateway() -> AsyncIterator[Running]:
    async with running() as result:
        yield result


# --- the two ways of serving ---------------------------------------------------------------------------


async def test_a_chat_goes_through_prefill_and_decode(gateway: Running) -> None:
    prefill, decode = pair()
    prefill.cached_tokens = 4
    decode.cached_tokens = 5  # it loads the whole prompt, which is no reuse
    await gateway.add(prefill, decode)

    status, answer, headers = await gateway.chat("tell me a story", temperature=0, seed=7)

    assert status == 200
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "w0 w1 w2 w3 "}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert headers["X-Mooncake-Prefill"] == "p1"
    assert headers["X-Mooncake-Decode"] == "d1"
    assert headers["X-Mooncake-Reused-Tokens"] == "4"
    assert headers["X-Mooncake-Prompt-Tokens"] == "5"
    assert headers["X-Mooncake-Term"] == "1"
    [asked] = prefill.prefills
    assert asked["max_tokens"] == 1
    assert asked["stream"] is False
    assert (asked["temperature"], asked["seed"]) == (0, 7)
    assert len(asked["prompt"]) == 5
    [asked] = decode.decodes
    assert asked["max_tokens"] == 4
    assert asked["prompt"] == prefill.prefills[0]["prompt"]
    assert asked["kv_transfer_params"]["sources"] == ["n1"]
    assert asked["kv_transfer_params"]["first_token"] == 42
    assert gateway.reservations() == 0


async def test_an_aggregated_instance_does_it_in_one_call(gateway: Running) -> None:
    both = FakeEngine("b1", Role.BOTH, "n1")
    both.cached_tokens = 4
    await gateway.add(both)

    status, answer, headers = await gateway.chat()

    assert status == 200
    assert answer["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
    assert headers["X-Mooncake-Prefill"] == headers["X-Mooncake-Decode"] == "b1"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert len(both.bodies) == 1
    assert not both.prefills
    assert not both.decodes


async def test_a_stream_is_passed_on_as_chat_chunks(gateway: Running) -> None:
    await gateway.add(*pair())
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream_options": {"include_usage": True},
    }

    headers, events = await gateway.events("/v1/chat/completions", body)

    assert headers["Content-Type"].startswith("text/event-stream")
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert [c["object"] for c in chunks] == ["chat.completion.chunk"] * 3
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "w0 "}
    assert chunks[1]["choices"][0]["delta"] == {"content": "w1 "}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


async def test_a_stream_without_include_usage_has_no_usage_chunk(gateway: Running) -> None:
    await gateway.add(*pair())
    _, events = await gateway.events("/v1/completions", {"model": "tiny", "prompt": "a b", "max_tokens": 2})
    assert [e if e == "[DONE]" else e["choices"][0]["text"] for e in events] == ["w0 ", "w1 ", "[DONE]"]
    assert all(e == "[DONE]" or e["object"] == "text_completion" for e in events)


async def test_tokens_come_as_they_are_made(gateway: Running) -> None:
    prefill, decode = pair()
    decode.token_s = 0.05
    await gateway.add(prefill, decode)
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 5, "stream": true}'
    times = []
    async with gateway.http.post(gateway.url + "/v1/completions", data=body) as response:
        async for _ in response.content.iter_any():
            times.append(asyncio.get_running_loop().time())
    assert times[-1] - times[0] > 0.15


async def test_completions_take_token_ids(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    status, answer, _ = await gateway.post(
        "/v1/completions", {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
    )
    assert status == 200
    assert answer["choices"][0]["text"] == "w0 w1 "
    assert prefill.prefills[0]["prompt"] == [5, 6, 7]
    assert not prefill.tokenized
    assert not decode.tokenized


async def test_one_token_needs_no_decode(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    status, answer, _ = await gateway.chat(max_tokens=1)
    assert status == 200
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": "w0 "},
    }
    assert not decode.decodes


async def test_an_answer_that_ends_at_its_first_token_needs_no_decode(gateway: Running) -> None:
    prefill, decode = pair()
    prefill.stop_at_first = True
    await gateway.add(prefill, decode)
    _, answer, _ = await gateway.chat()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["content"] == ""
    assert not decode.decodes


async def test_without_max_tokens_a_chat_may_fill_the_context(gateway: Running) -> None:
    prefill, decode = pair()
    prefill.context_tokens = decode.context_tokens = 12
    await gateway.add(prefill, decode)
    status, answer, _ = await gateway.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "one two three"}]}
    )
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 8


# --- reuse ---------------------------------------------------------------------------------------------


async def test_the_prefill_goes_to_the_node_that_has_the_prefix(gateway: Running) -> None:
    first, second = FakeEngine("p1", Role.PREFILL, "n1"), FakeEngine("p2", Role.PREFILL, "n2")
    decode = FakeEngine("d1", Role.DECODE, "n3")
    await gateway.add(first, second, decode)
    tokens = list(range(100, 140))
    gateway.hold("n2", "tiny", chain_keys("tiny", tokens, 4))

    _, _, headers = await gateway.post("/v1/completions", {"model": "tiny", "prompt": tokens})

    assert headers["X-Mooncake-Prefill"] == "p2"
    assert second.prefills[0]["kv_transfer_params"]["sources"] == []


async def test_a_busy_holder_is_pulled_from_instead(gateway: Running) -> None:
    first, second = FakeEngine("p1", Role.PREFILL, "n1"), FakeEngine("p2", Role.PREFILL, "n2")
    await gateway.add(first, second, FakeEngine("d1", Role.DECODE, "n3"))
    tokens = list(range(100, 140))
    gateway.hold("n2", "tiny", chain_keys("tiny", tokens, 4))
    long = {"model": "tiny", "prompt": tokens + list(range(900)), "max_tokens": 2}
    assert (await gateway.post("/v1/schedule", long))[1]["prefill"] == "p2"

    _, _, headers = await gateway.post(
        "/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 2}
    )

    assert headers["X-Mooncake-Prefill"] == "p1"
    assert first.prefills[0]["kv_transfer_params"]["sources"] == ["n2"]


async def test_a_prompt_is_tokenized_once(gateway: Running) -> None:
    prefill, decode = pair()
    await gateway.add(prefill, decode)
    for _ in range(3):
        assert (await gateway.chat("the same again"))[0] == 200
    await gateway.chat("another one")
    assert len(prefill.tokenized) + len(decode.tokenized) == 2


# --- models --------------------------------------------------------------------------------------------


async def test_models_are_those_of_the_instances(gateway: Running) -> None:
    await gateway.add(*pair(), FakeEngine("b1", Role.BOTH, None, model="other"))
    async with gateway.http.get(gateway.url + "/v1/models") as response:
        listing = await response.json()
    assert [m["id"] for m in listing["data"]] == ["other", "tiny"]
    assert listing["data"][1] == {
        "id": "tiny",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "fake",
        "max_model_len": 1000,
    }
    async with gateway.http.get(gateway.url + "/v1/models/tiny") as response:
        assert (await response.json())["id"] == "tiny"
    async with gateway.http.get(gateway.url + "/v1/models/none") as response:
        assert response.status == 404


async def test_an_unknown_model_is_answered_with_those_that_exist(gateway: Running) -> None:
    await gateway.add(*pair())
    status, answer, _ = await gateway.chat(model="huge")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert answer["error"]["param"] == "model"
    assert "tiny" in answer["error"]["message"]


async def test_without_any_instance_it_is_a_503(gateway: Running) -> None:
    status, answer, headers = await gateway.chat()
    assert status == 503
    assert answer["error"]["code"] == "no_instance"
    assert "Retry-After" in headers


async def test_a_model_whose_instances_are_gone_for_now_is_a_503(gateway: Running) -> None:
    await gateway.add(*pair(), FakeEngine("b1", Role.BOTH, None, model="other"))
    gateway.view.instances = {k: v for k, v in gateway.view.instances.items() if k == "b1"}
    gateway.view.tell()
    assert (await gateway.chat())[0] == 503
    assert (await gateway.chat(model="never"))[0] == 404


async def test_prefill_without_decode_cannot_serve_and_says_so(gateway: Running) -> None:
    await gateway.add(FakeEngine("p1", Role.PREFILL, "n1"))
    status, answer, _ = await gateway.chat()
    assert status == 503
    assert "1 for prefill, 0 for decode" in answer["error"]["message"]


# --- admission -----------------------------------------------------------------------------------------


async def test_what_would_miss_its_slo_is_refused_with_429() -> None:
    async with running(slo_ttft=0.5) as gateway:
        prefill, decode = pair()
        prefill.prefill_s = 0.1
        prefill.timing = {"prefill_ms": 100.0}
        await gateway.add(prefill, decode)
        for i in range(18):  # the predictor has to earn its trust first
            assert (await gateway.chat(f"number {i}"))[0] == 200

        answers = await asyncio.gather(*(gateway.chat(f"at once {i}") for i in range(12)))

        refused = [(answer["error"], headers) for status, answer, headers in answers if status == 429]
        assert len(refused) + sum(status == 200 for status, *_ in answers) == 12
        assert refused
        error, headers = refused[0]
        assert (error["type"], error["code"], error["reason"]) == (
            "rate_limit_error",
            "admission_refused",
            "ttft",
        )
        assert error["predicted_ms"] > error["limit_ms"] == 500
        assert int(headers["Retry-After"]) >= 1
        assert f'refusals_total{{reason="ttft"}} {float(len(refused))}' in await gateway.metrics()
        assert gateway.reservations() == 0


# --- clients that go away ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_the_decode(gateway: Running, stream: bool) -> None:
    prefill, decode = pair()
    decode.token_s = 0.05
    await gateway.add(prefill, decode)
    call = asyncio.create_task(gateway.chat(stream=stream, max_tokens=500))
    await eventually(lambda: decode.running == 1, 5)

    call.cancel()

    await eventually(lambda: decode.broken_off == 1, 5)
    await eventually(lambda: gateway.reservations() == 0, 5)
    assert gateway.candidate.gateway.in_flight == 0


async def test_a_client_that_goes_away_ends_the_prefill(gateway: Running) -> None:
    prefill, decode = pair()
    prefill.prefill_s = 30
    await gateway.add(prefill, decode)
    call = asyncio.create_task(gateway.chat())
    await eventually(lambda: prefill.running == 1, 5)

    call.cancel()

    await eventually(lambda: prefill.broken_off == 1, 5)
    await eventually(lambda: gateway.reservations() == 0, 5)
    assert not decode.bodies


# --- metrics and probes --------------------------------------------------------------------------------


async def test_metrics_count_what_happened(gateway: Running) -> None:
    prefill, decode = pair()
    prefill.cached_tokens = 4
    await gateway.add(prefill, decode)
    await gateway.chat()
    await gateway.chat(model="huge")
    text = await gateway.metrics()
    for line in (
        'mooncaked_conductor_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'mooncaked_conductor_requests_total{route="/v1/chat/completions",status="404"} 1.0',
        "mooncaked_conductor_ttft_seconds_count 1.0",
        "mooncaked_conductor_reused_tokens_total 4.0",
        "mooncaked_conductor_prompt_tokens_total 5.0",
        "mooncaked_conductor_answer_tokens_total 4.0",
        "mooncaked_conductor_leader 1.0",
        "mooncaked_conductor_degraded_decisions_total 0.0",
        "mooncaked_conductor_index_blocks 0.0",
        'mooncaked_conductor_sources{state="live"} 0.0',
    ):
        assert line in text, line


async def test_probes(gateway: Running) -> None:
    for path in ("/livez", "/healthz", "/readyz"):
        async with gateway.http.get(gateway.url + path) as response:
            assert (response.status, await response.text()) == (200, "ok\n")
    gateway.view.complete = False
    async with gateway.http.get(gateway.url + "/readyz?verbose") as response:
        assert response.status == 503
        assert "the cluster has not been read yet" in await response.text()


async def test_the_status_shows_loads_and_estimates(gateway: Running) -> None:
    prefill, decode = pair()
    decode.token_s = 0.05
    await gateway.add(prefill, decode)
    call = asyncio.create_task(gateway.chat(max_tokens=200))
    await eventually(lambda: decode.running == 1, 5)

    status = await gateway.status()

    assert status["leading"] is True
    assert status["term"] == 1
    assert status["reservations"] == status["in_flight"] == 1
    by_id = {i["instance_id"]: i for i in status["instances"]}
    assert by_id["d1"]["running"] == 1
    assert by_id["d1"]["kv_tokens"] > 200
    assert by_id["p1"]["queued"] == 0
    assert by_id["p1"]["estimate"]["prefill_samples"] == 1
    call.cancel()
