"""Sizes, durations and addresses survive being written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.units import (
    format_duration,
    format_size,
    join_address,
    parse_duration,
    parse_ranges,
    parse_size,
    split_address,
)


@given(st.integers(0, 1 << 50))
def test_sizes_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(0, 10**11))
def test_durations_round_trip(micros: int) -> None:
    seconds = round(micros / 1e6, 6)
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, abs=1e-9)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration, split_address):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)  # noqa: PT017 - any text may also be fine


@given(st.sampled_from(["localhost", "10.0.0.1", "::1", "a-b.example"]), st.integers(0, 65535))
def test_addresses_round_trip(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


def test_people_read_the_unit_that_fits() -> None:
    assert [format_size(n) for n in (0, 1000, 4 << 30, 1536 << 20)] == ["0B", "1000B", "4GiB", "1536MiB"]
    assert [format_duration(s) for s in (0, 0.0005, 0.1, 2.5, 10, 600, 3600, 90)] == [
        "0s", "500us", "100ms", "2.5s", "10s", "10min", "1h", "90s",
    ]  # fmt: skip


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_the_numbers_in_them(numbers: set[int]) -> None:
    assert parse_ranges(",".join(map(str, numbers))) == sorted(numbers)
    first, last = min(numbers, default=0), max(numbers, default=0)
    assert parse_ranges(f" {first}-{last} ") == list(range(first, last + 1))


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-2", "1024", "0-5000", "1 2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no number or range|does not go up"):
        parse_ranges(text)
