"""Whether to take a request: refuse at arrival what is predicted to miss its SLO, before it costs anything.

Modes, after the papers:
- `off`: take everything.
- `baseline`: each stage refuses by its own load when the request reaches it: at decode that wastes a prefill.
- `early`: at arrival, by predicted TTFT, and by the TBT of all that is reserved at the decode instance now.
- `predicted`: at arrival, by predicted TTFT, and by the TBT at the time that this prefill will end; and once
  more before decode.

Three rules keep a wrong prediction from doing harm. A predictor that has few samples, or that is measured to
be off by more than 2x, is not asked: then only queue limits count. An instance with nothing to do takes any
request: refusing it would protect nobody, and what it takes teaches the estimator. And a request that has
been prefilled is refused only for what its decode would do to the others."""

from __future__ import annotations

import math

import msgspec

from mooncaked.conductor.messages import Refusal

MODES = ("off", "baseline", "early", "predicted")
_RETRY_AFTER_MAX_S = 60


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What admission protects."""

    slo_ttft_ms: float
    slo_tbt_ms: float
    prefill_queue_max: int = 256  # requests waiting at one prefill instance
    decode_queue_batches: int = 16  # requests reserved at one decode instance, in multiples of its batch


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What is predicted for one request on the instances chosen for it."""

    ttft_ms: float
    ttft_trusted: bool
    queued: int  # requests before it at the prefill instance
    wait_ms: float  # part of ttft_ms: until the decode instance has KV room
    tbt_now_ms: float  # with all that is reserved there now
    tbt_then_ms: float  # with what will be decoding when this prefill ends
    tbt_trusted: bool
    batch: int  # requests reserved at the decode instance
    batch_max: int


def admit_arrival(mode: str, forecast: Forecast, limits: Limits) -> Refusal | None:
    """Judge a request that just came. None: take it."""
    if mode == "off":
        return None
    refusal = _prefill(forecast, limits)
    if refusal is None and mode == "early":
        refusal = _decode(forecast, forecast.tbt_now_ms, limits)
    if refusal is None and mode == "predicted":
        refusal = _decode(forecast, forecast.tbt_then_ms, limits)
    return refusal


def admit_decode(mode: str, forecast: Forecast, limits: Limits) -> Refusal | None:
    """Judge a request whose prefill is done, before it decodes. None: take it."""
    if mode in ("baseline", "predicted"):
        return _decode(forecast, forecast.tbt_now_ms, limits)
    return None


def _prefill(forecast: Forecast, limits: Limits) -> Refusal | None:
    if forecast.queued >= limits.prefill_queue_max:
        detail = f"{forecast.queued} requests wait at the best prefill instance"
        return _refusal("prefill_queue", detail, forecast.ttft_ms, limits.slo_ttft_ms)
    if not forecast.ttft_trusted or forecast.ttft_ms <= limits.slo_ttft_ms:
        return None
    if forecast.wait_ms > 0.0 and forecast.ttft_ms - forecast.wait_ms <= limits.slo_ttft_ms:
        detail = "no decode instance has KV room for it in time"
        return _refusal("kv_room", detail, forecast.ttft_ms, limits.slo_ttft_ms)
    if forecast.queued == 0:
        return None
    return _refusal("ttft", "its first token would come too late", forecast.ttft_ms, limits.slo_ttft_ms)


def _decode(forecast: Forecast, tbt_ms: float, limits: Limits) -> Refusal | None:
    if forecast.batch >= limits.decode_queue_batches * forecast.batch_max:
        detail = (
            f"{forecast.batch} requests are at the best decode instance, whose batch is {forecast.batch_max}"
        )
        return _refusal("decode_queue", detail, tbt_ms, limits.slo_tbt_ms)
    if not forecast.tbt_trusted or forecast.batch == 0 or tbt_ms <= limits.slo_tbt_ms:
        return None
    return _refusal("tbt", "its tokens would come too slowly", tbt_ms, limits.slo_tbt_ms)


def _refusal(reason: str, detail: str, predicted_ms: float, limit_ms: float) -> Refusal:
    over_s = math.ceil(max(0.0, predicted_ms - limit_ms) / 1000.0)
    return Refusal(
        reason=reason,
        detail=detail,
        predicted_ms=round(predicted_ms, 3),
        limit_ms=limit_ms,
        retry_after_s=min(max(1, over_s), _RETRY_AFTER_MAX_S),
    )
