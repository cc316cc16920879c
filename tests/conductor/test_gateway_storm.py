"""Many requests at once while engines fail and clients leave: every request ends, nothing is left over."""

from __future__ import annotations

import asyncio
import random

import pytest

from mooncaked.types import Role
from tests.cluster.waiting import eventually
from tests.conductor.harness import Running, running
from tests.fakes.engine import FakeEngine

ENDINGS = {200, 502, 503}


@pytest.mark.parametrize("seed", [1, 2])
async def test_storm(seed: int) -> None:
    rng = random.Random(seed)
    async with running(request_timeout=15.0, admission="off") as gateway:
        prefill = [FakeEngine(f"p{i}", Role.PREFILL, f"np{i}") for i in range(3)]
        decode = [FakeEngine(f"d{i}", Role.DECODE, f"nd{i}") for i in range(3)]
        both = [FakeEngine("b0", Role.BOTH, "nb0")]
        await gateway.add(*prefill, *decode, *both)
        engines = [*prefill, *decode, *both]
        for engine in engines:
            _heal(engine)
        breaking = asyncio.create_task(_break(engines, rng))
        results = await asyncio.gather(
            *(_client(gateway, random.Random(seed * 1000 + i)) for i in range(150))
        )
        breaking.cancel()
        await asyncio.wait([breaking])

        assert None in results, "some clients left"
        assert set(results) - {None} <= ENDINGS
        assert results.count(200) > 30
        await eventually(lambda: gateway.reservations() == 0, 5)
        await eventually(lambda: gateway.candidate.gateway.in_flight == 0, 5)
        await eventually(
            lambda: not any(engine.running for engine in engines), 5, "no engine works for nobody"
        )
        assert not gateway.candidate.watchdog._calls
        for engine in engines:
            _heal(engine)
        gateway.candidate.conductor.fleet._failed.clear()
        assert (await gateway.chat())[0] == 200, "all are well again"


async def _client(gateway: Running, rng: random.Random) -> int | None:
    """One request; its status, or None when the client left before the end."""
    await asyncio.sleep(rng.uniform(0, 1.5))
    call = asyncio.create_task(
        gateway.chat(f"text {rng.randrange(20)}", max_tokens=rng.randrange(1, 30), stream=False)
        if rng.random() < 0.5
        else _stream(gateway, rng)
    )
    patience = rng.uniform(0.0, 0.05) if rng.random() < 0.2 else 30.0
    done, _ = await asyncio.wait([call], timeout=patience)
    if done:
        result = call.result()
        return result if isinstance(result, int) else result[0]
    call.cancel()
    return None


async def _stream(gateway: Running, rng: random.Random) -> int:
    body = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": %d, "stream": true}' % rng.randrange(1, 30)
    async with gateway.http.post(gateway.url + "/v1/completions", data=body) as response:
        text = await response.text()
        if response.status == 200:
            assert text.endswith("data: [DONE]\n\n") or "event: error" in text
        return response.status


async def _break(engines: list[FakeEngine], rng: random.Random) -> None:
    """Fault after fault, each for a moment."""
    while True:
        engine = rng.choice(engines)
        match rng.randrange(4):
            case 0:
                engine.fail_status = rng.choice([500, 503, 429])
            case 1:
                engine.break_before_first = 3
            case 2:
                engine.break_after = rng.randrange(5)
            case 3:
                engine.token_s, engine.prefill_s = 0.02, 0.2
        await asyncio.sleep(rng.uniform(0.02, 0.2))
        _heal(engine)


def _heal(engine: FakeEngine) -> None:
    engine.fail_status = engine.break_after = None
    engine.break_before_first = 0
    engine.token_s, engine.prefill_s = 0.002, 0.01
