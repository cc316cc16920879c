"""How long things take: prefill, decode steps, block transfers and answers, learnt from what really happened.

Every estimator starts from a prior, which only has to be sane in its proportions: until `TRUST_SAMPLES`
samples are in, admission does not rely on it. All times in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mooncaked.conductor.regression import Regression
from mooncaked.types import InstanceRecord, Role

TRUST_SAMPLES = 16  # fewer than these, and a prediction is a guess
TRUST_ERROR = 0.5  # |predicted - actual| / max of both; above it the predictor is off by more than 2x
_OWN_SAMPLES = 8  # fewer than these, and an instance is judged by its group

# A machine between a laptop and a GPU node: 20 ms and half a millisecond for each new token.
_PREFILL_PRIOR = (20.0, 500.0, 5.0)  # constant, per 1000 new tokens, per 10^6 of n^2 - p^2
_STEP_PRIOR = (20.0, 1.0, 0.1)  # constant, per request in the batch, per 1000 KV tokens in it
_PULL_PRIOR = 1e6  # bytes per ms between nodes: 1 GB/s
_DRAM_PRIOR = 4e6  # bytes per ms from a node's DRAM into an engine
_SSD_PRIOR = 1e6
PULL_LATENCY_MS = 2.0
_OUTPUT_PRIOR = 256.0  # tokens of an answer
_SAMPLE_BYTES_MIN = 256 << 10  # smaller transfers measure latency, not bandwidth

_NO_RATES: dict[str, float] = {}


class Average:
    """A mean that forgets: the first samples count fully, later ones with `weight`."""

    def __init__(self, prior: float, weight: float = 0.1) -> None:
        self.value = prior
        self.samples = 0
        self._weight = weight

    def add(self, sample: float) -> None:
        """Take one sample into account."""
        self.samples += 1
        self.value += max(self._weight, 1.0 / self.samples) * (sample - self.value)


class Accuracy:
    """How far predictions were from what happened, 0 (exact) to 1."""

    def __init__(self) -> None:
        self.error = Average(0.0)

    def add(self, predicted: float, actual: float) -> None:
        """Compare one prediction with its outcome."""
        if (greater := max(predicted, actual)) > 0.0:
            self.error.add(abs(predicted - actual) / greater)

    @property
    def trusted(self) -> bool:
        """Enough samples, and right within a factor of two on average."""
        return self.error.samples >= TRUST_SAMPLES and self.error.value <= TRUST_ERROR


class PrefillModel:
    """T(n, p) = a + b (n - p) + c (n^2 - p^2), for n prompt tokens of which p are reused."""

    def __init__(self) -> None:
        self.fit = Regression(_PREFILL_PRIOR)

    def predict(self, prompt: int, reused: int) -> float:
        """Milliseconds of computing what is not reused."""
        a, b, c = self.fit.coefficients
        new = prompt - reused
        ms = a + (b + c * (prompt + reused) * 1e-3) * new * 1e-3
        return ms if ms > 0.0 else 0.0

    def learn(self, prompt: int, reused: int, ms: float) -> None:
        """One prefill took `ms`."""
        new = prompt - reused
        self.fit.learn((1.0, new * 1e-3, new * (prompt + reused) * 1e-6), ms)


class StepModel:
    """TBT = a + b batch + c KV tokens in the batch."""

    def __init__(self) -> None:
        self.fit = Regression(_STEP_PRIOR)

    def predict(self, batch: int, kv_tokens: int) -> float:
        """Milliseconds between tokens."""
        a, b, c = self.fit.coefficients
        ms = a + b * batch + c * kv_tokens * 1e-3
        return ms if ms > 0.0 else 0.0

    def learn(self, batch: int, kv_tokens: int, ms: float) -> None:
        """Tokens came `ms` apart."""
        self.fit.learn((1.0, float(batch), kv_tokens * 1e-3), ms)


class InstanceEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimators of one instance as operators see them."""

    prefill_samples: int
    prefill_error: float
    prefill_coefficients: list[float]  # ms: constant, per 1000 new tokens, per 10^6 of n^2 - p^2
    step_samples: int
    step_error: float
    step_coefficients: list[float]  # ms: constant, per request, per 1000 KV tokens


class _Pair:
    """A prefill and a step model."""

    __slots__ = ("prefill", "step")

    def __init__(self) -> None:
        self.prefill = PrefillModel()
        self.step = StepModel()


class InstanceModels:
    """The models of one instance. `prefill` and `step` are those that speak for it now: its group's, until
    it has shown enough itself. The two lists are their coefficients, for those who read many of them."""

    __slots__ = ("_group", "_own", "prefill", "prefill_coefficients", "step", "step_coefficients")

    def __init__(self, group: _Pair) -> None:
        self._own, self._group = _Pair(), group
        self._speak(group.prefill, group.step)

    def _speak(self, prefill: PrefillModel, step: StepModel) -> None:
        self.prefill, self.step = prefill, step
        self.prefill_coefficients, self.step_coefficients = prefill.fit.coefficients, step.fit.coefficients

    def learn_prefill(self, prompt: int, reused: int, ms: float) -> None:
        """One prefill took `ms`."""
        for pair in (self._own, self._group):
            pair.prefill.learn(prompt, reused, ms)
        if self._own.prefill.fit.samples >= _OWN_SAMPLES:
            self._speak(self._own.prefill, self.step)

    def learn_step(self, batch: int, kv_tokens: int, ms: float) -> None:
        """Tokens came `ms` apart."""
        for pair in (self._own, self._group):
            pair.step.learn(batch, kv_tokens, ms)
        if self._own.step.fit.samples >= _OWN_SAMPLES:
            self._speak(self.prefill, self._own.step)

    def estimate(self) -> InstanceEstimate:
        """What predictions rest on now."""
        prefill, step = self.prefill.fit, self.step.fit
        return InstanceEstimate(
            prefill_samples=prefill.samples,
            prefill_error=prefill.error,
            prefill_coefficients=list(prefill.coefficients),
            step_samples=step.samples,
            step_error=step.error,
            step_coefficients=list(step.coefficients),
        )


class Estimators:
    """All estimators of one conductor. An instance that is new is judged by its group: same model, engine
    and role. A link that is new is judged by the mean of all links."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceModels] = {}
        self._groups: dict[tuple[str, str, Role], _Pair] = {}
        self._links: dict[tuple[str, str], Average] = {}
        self._all_links = Average(_PULL_PRIOR)
        self._dram: dict[str, Average] = {}
        self._all_dram = Average(_DRAM_PRIOR)
        # The values of the averages above, in bytes per ms, for those who read many of them at once.
        self.link_rates: dict[str, dict[str, float]] = {}  # by source, then target
        self.dram_rates: dict[str, float] = {}  # by node
        self._output: dict[str, Average] = {}
        self._ttft: dict[str, Accuracy] = {}
        self._tbt: dict[str, Accuracy] = {}

    def of(self, record: InstanceRecord) -> InstanceModels:
        """The models of an instance; the same object for as long as the instance is retained."""
        models = self._instances.get(record.instance_id)
        if models is None:
            group = self._groups.setdefault((record.model, record.engine, record.role), _Pair())
            models = self._instances[record.instance_id] = InstanceModels(group)
        return models

    # --- predictions ---------------------------------------------------------------------------------

    def pull_ms(self, source: str, target: str, size: int, in_flight: int) -> float:
        """Moving `size` bytes between nodes, while the source serves `in_flight` other pulls."""
        rate = self.link_rates.get(source, _NO_RATES).get(target, self.any_link_rate)
        return PULL_LATENCY_MS + size * (1 + in_flight) / rate

    @property
    def any_link_rate(self) -> float:
        """Bytes per ms of a link that nothing has been pulled over yet."""
        return self._all_links.value

    @property
    def any_dram_rate(self) -> float:
        """Bytes per ms from the DRAM of a node that nothing has been read from yet."""
        return self._all_dram.value

    def load_ms(self, node_id: str, dram_bytes: int, ssd_bytes: int) -> float:
        """Reading blocks of the instance's own node into the engine."""
        return dram_bytes / self.dram_rates.get(node_id, self.any_dram_rate) + ssd_bytes / _SSD_PRIOR

    def output_tokens(self, model: str, max_tokens: int) -> int:
        """How long an answer will be."""
        seen = self._output.get(model)
        return max(1, min(max_tokens, int(_OUTPUT_PRIOR if seen is None else seen.value)))

    def ttft_trusted(self, model: str) -> bool:
        """Predicted TTFTs of this model have been right within a factor of two."""
        accuracy = self._ttft.get(model)
        return accuracy is not None and accuracy.trusted

    def tbt_trusted(self, model: str) -> bool:
        """Predicted TBTs of this model have been right within a factor of two."""
        accuracy = self._tbt.get(model)
        return accuracy is not None and accuracy.trusted

    # --- observations --------------------------------------------------------------------------------

    def saw_pull(self, source: str, target: str, size: int, ms: float) -> None:
        """Blocks came over the network."""
        if size >= _SAMPLE_BYTES_MIN and ms > 0.0:
            rate = size / max(ms - PULL_LATENCY_MS, 0.1 * ms)
            link = self._links.setdefault((source, target), Average(self._all_links.value))
            link.add(rate)
            self._all_links.add(rate)
            self.link_rates.setdefault(source, {})[target] = link.value

    def saw_load(self, node_id: str, size: int, ms: float) -> None:
        """Blocks came from the node's own DRAM."""
        if size >= _SAMPLE_BYTES_MIN and ms > 0.0:
            dram = self._dram.setdefault(node_id, Average(self._all_dram.value))
            dram.add(size / ms)
            self._all_dram.add(size / ms)
            self.dram_rates[node_id] = dram.value

    def saw_output(self, model: str, tokens: int) -> None:
        """An answer ended."""
        self._output.setdefault(model, Average(_OUTPUT_PRIOR)).add(tokens)

    def saw_ttft(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        """Compare a predicted TTFT with the real one."""
        self._ttft.setdefault(model, Accuracy()).add(predicted_ms, actual_ms)

    def saw_tbt(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        """Compare a predicted TBT with the real one."""
        self._tbt.setdefault(model, Accuracy()).add(predicted_ms, actual_ms)

    # --- upkeep --------------------------------------------------------------------------------------

    def retain(self, instances: Iterable[str], nodes: Iterable[str]) -> None:
        """Forget instances and nodes that exist no longer; their groups remember what they showed."""
        instance_ids, node_ids = set(instances), set(nodes)
        self._instances = {k: v for k, v in self._instances.items() if k in instance_ids}
        self._links = {k: v for k, v in self._links.items() if node_ids.issuperset(k)}
        self._dram = {k: v for k, v in self._dram.items() if k in node_ids}
        self.dram_rates = {k: v.value for k, v in self._dram.items()}
        self.link_rates = {}
        for (source, target), link in self._links.items():
            self.link_rates.setdefault(source, {})[target] = link.value

    def errors(self, model: str) -> dict[str, float | None]:
        """Mean relative errors of the end-to-end predictions for a model; None without a sample."""
        ttft, tbt = self._ttft.get(model), self._tbt.get(model)
        return {"ttft": ttft.error.value if ttft else None, "tbt": tbt.error.value if tbt else None}
