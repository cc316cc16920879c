"""Metrics that are read, not counted, when somebody asks: the owner of a number stays its only keeper.

Names are `mooncaked_<what>_<unit>`, counters end in `_total`, label values come from small fixed sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Reading(msgspec.Struct, frozen=True):
    """One metric and where its value comes from. `read` gives a number, or one number for each label value
    (then `label` names the label). It runs on the scraping thread and must not block."""

    name: str  # a counter's without _total
    kind: Literal["gauge", "counter"]
    doc: str
    read: Callable[[], float | Mapping[str, float]]
    label: str = ""


class Readings(Collector):
    """A collector of `Reading`s, to register with an injected registry."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = tuple(readings)

    def collect(self) -> Iterable[Metric]:
        """The values now."""
        for reading in self._readings:
            family = GaugeMetricFamily if reading.kind == "gauge" else CounterMetricFamily
            metric = family(reading.name, reading.doc, labels=[reading.label] if reading.label else [])
            result = reading.read()
            for label, number in result.items() if isinstance(result, Mapping) else [("", result)]:
                metric.add_metric([label] if reading.label else [], number)
            yield metric

    def describe(self) -> Iterable[Metric]:
        """The names alone, so that registering reads no value."""
        for reading in self._readings:
            family = GaugeMetricFamily if reading.kind == "gauge" else CounterMetricFamily
            yield family(reading.name, reading.doc, labels=[reading.label] if reading.label else [])
