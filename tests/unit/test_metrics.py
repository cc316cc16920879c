"""Metrics that are read when asked for: values, labels and names as Prometheus sees them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from mooncaked.metrics import Reading, Readings


def test_readings_are_taken_at_each_scrape_and_not_before() -> None:
    taken = []

    def used() -> float:
        taken.append(1)
        return 10.0 * len(taken)

    registry = CollectorRegistry()
    registry.register(
        Readings(
            [
                Reading("mooncaked_pool_used_bytes", "gauge", "Bytes in use.", used),
                Reading(
                    "mooncaked_puts", "counter", "Puts.", lambda: {"stored": 2, "full": 1}, label="result"
                ),
            ]
        )
    )
    assert not taken
    text = generate_latest(registry).decode()
    assert "mooncaked_pool_used_bytes 10.0" in text
    assert 'mooncaked_puts_total{result="full"} 1.0' in text
    assert "# HELP mooncaked_puts_total Puts." in text
    assert "mooncaked_pool_used_bytes 20.0" in generate_latest(registry).decode()
