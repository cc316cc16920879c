"""The scheduling and index API, as other gateways, nodes and operators use it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mooncaked.keys import chain_keys, show_key
from mooncaked.types import Role
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, pair, running
from tests.conductor.test_followers import leader_and_follower
from tests.fakes.engine import FakeEngine

TOKENS = list(range(100, 120))


@pytest.fixture
async def api() -> AsyncIterator[Running]:
    async with running() as result:
        await result.add(*pair(), FakeEngine("p2", Role.PREFILL, "n3"))
        yield result


async def test_schedule_reserves_until_release(api: Running) -> None:
    status, decision, _ = await api.post("/v1/schedule", {"model": "tiny", "prompt": TOKENS, "max_tokens": 5})
    assert status == 200
    assert decision["prefill_url"] in [engine.url for engine in api.engines]
    assert decision["decode"] == "d1"
    assert decision["term"] == 1
    assert api.reservations() == 1

    for known in (True, False):  # releasing twice does no harm
        _, answer, _ = await api.post("/v1/release", {"request_id": decision["request_id"]})
        assert answer == {"request_id": decision["request_id"], "known": known}
    assert api.reservations() == 0


async def test_decisions_see_each_other(api: Running) -> None:
    chosen = [
        (await api.post("/v1/schedule", {"model": "tiny", "prompt": TOKENS}))[1]["prefill"] for _ in range(4)
    ]
    assert sorted(chosen) == ["p1", "p1", "p2", "p2"]


async def test_releasing_the_prefill_alone_frees_the_queue_and_keeps_the_decode(api: Running) -> None:
    _, decision, _ = await api.post("/v1/schedule", {"model": "tiny", "prompt": TOKENS})
    seen = {"prefill": {"reused_tokens": 0, "wall_ms": 9.0, "prefill_ms": 7.0}}
    await api.post(
        "/v1/release", {"request_id": decision["request_id"], "stage": "prefill", "observed": seen}
    )
    by_id = {i["instance_id"]: i for i in (await api.status())["instances"]}
    assert by_id[decision["prefill"]]["queued"] == 0
    assert by_id[decision["prefill"]]["estimate"]["prefill_samples"] == 1
    assert by_id["d1"]["running"] == 1


async def test_schedule_takes_the_length_and_the_keys_instead_of_the_prompt(api: Running) -> None:
    keys = chain_keys("tiny", TOKENS, 4)
    api.hold("n3", "tiny", keys)
    chain = {"namespace": "tiny", "block_tokens": 4, "keys": [show_key(key) for key in keys]}
    _, decision, _ = await api.post(
        "/v1/schedule", {"model": "tiny", "prompt_tokens": len(TOKENS), "chains": [chain]}
    )
    assert decision["prefill"] == "p2"
    assert decision["prefill_terms"]["own_tokens"] == 19  # all blocks, but for the last token


async def test_messages_are_tokenized(api: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "four more words here"}]}
    _, decision, _ = await api.post("/v1/schedule", body)
    assert decision["prompt_tokens"] == 5


async def test_explain_shows_every_candidate_and_reserves_nothing(api: Running) -> None:
    keys = chain_keys("tiny", TOKENS, 4)
    api.hold("n3", "tiny", keys[:3])
    _, answer, _ = await api.post("/v1/explain", {"model": "tiny", "prompt": TOKENS, "max_tokens": 4})
    assert answer["policy"] == "algorithm1"
    assert answer["matched_tokens"] == {"n3": 12}
    terms = {t["instance_id"]: t for t in answer["prefill"]}
    assert terms["p2"]["own_tokens"] == 12
    assert terms["p1"]["pull_from"] == "n3"
    assert terms["p1"]["transfer_ms"] > 0
    assert answer["decision"]["prefill"] == "p2"
    assert [t["instance_id"] for t in answer["decode"]] == ["d1"]
    assert api.reservations() == 0


async def test_locate_names_the_holders(api: Running) -> None:
    key, other = chain_keys("tiny", TOKENS, 4)[:2]
    api.hold("n1", "tiny", [key])
    api.hold("n3", "tiny", [key])
    body = {"namespace": "tiny", "keys": [show_key(key), show_key(other)]}
    status, answer, _ = await api.post("/v1/locate", body)
    assert status == 200
    assert answer == {
        show_key(key): [
            {"node_id": "n1", "tier": "dram", "size": 4000},
            {"node_id": "n3", "tier": "dram", "size": 4000},
        ],
        show_key(other): [],
    }


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("schedule", {"model": "tiny"}, "give the prompt as one of"),
        ("schedule", {"model": "tiny", "prompt": [1], "messages": []}, "give the prompt as one of"),
        ("schedule", {"model": "tiny", "prompt": [1], "prefilled_on": "p1"}, "request_id is missing"),
        ("schedule", {"model": "tiny", "prompt_tokens": 0}, ">= 1"),
        ("release", {}, "request_id"),
        ("release", {"request_id": "x", "stage": "half"}, "no stage half"),
        ("locate", {"namespace": "", "keys": []}, "namespace"),
        ("locate", {"namespace": "n", "keys": ["0xzz"]}, "hexadecimal"),
        ("locate", {"namespace": "n", "keys": "k"}, "got `str`"),
    ],
)
async def test_bad_bodies(api: Running, path: str, body: dict[str, object], says: str) -> None:
    status, answer, _ = await api.post(f"/v1/{path}", body)
    assert status == 400
    assert says in answer["error"]["message"]


async def test_a_follower_passes_schedule_release_and_explain_on() -> None:
    async with leader_and_follower() as (leader, follower):
        await leader.add(*pair())
        body = {"model": "tiny", "prompt": TOKENS}
        _, decision, _ = await follower.post("/v1/schedule", body)
        assert decision["term"] == 7
        assert leader.reservations() == 1
        _, explained, _ = await follower.post("/v1/explain", body)
        assert explained["decode"][0]["batch"] == 1, "the leader's view, with what is reserved there"
        await follower.post("/v1/release", {"request_id": decision["request_id"]})
        await eventually(lambda: leader.reservations() == 0, 5)
