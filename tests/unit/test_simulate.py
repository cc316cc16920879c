"""Traces, generated workloads, and hit rates that were worked out by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mooncaked.errors import InvalidRequest, NotFound
from mooncaked.eviction import make_policy
from mooncaked.sim.belady import count_best_hits, next_uses
from mooncaked.sim.evict import count_hits
from mooncaked.sim.traces import Request, parse_trace, read_trace
from mooncaked.sim.workloads import WORKLOADS, make_workload


def requests(*chains: str) -> list[Request]:
    """A request for each text, with a block for each letter."""
    return [Request(float(i), tuple(map(ord, chain))) for i, chain in enumerate(chains)]


class TestHits:
    def test_a_prefix_is_found_until_the_first_block_that_is_not_there(self) -> None:
        assert count_hits(make_policy("lru"), requests("abc", "abd", "abc"), 10) == 2 + 3

    def test_lru_by_hand(self) -> None:
        # abc and xy fill five blocks; z drives out c, the end of the oldest chain, and so abc finds two
        assert count_hits(make_policy("lru"), requests("abc", "xy", "z", "abc"), 5) == 2

    def test_a_chain_that_is_longer_than_the_pool_keeps_its_head(self) -> None:
        assert count_hits(make_policy("lru"), requests("abcdef", "abcdef"), 4) == 4

    def test_belady_declines_what_never_comes_back(self) -> None:
        trace = requests("ab", "xy", "ab", "uv", "ab")
        assert count_hits(make_policy("lru"), trace, 2) == 0
        assert count_best_hits(trace, 2) == 4

    def test_belady_evicts_what_is_needed_last(self) -> None:
        trace = requests("a", "b", "c", "a", "b", "c")
        assert next_uses(trace) == [[3], [4], [5], [1 << 60], [1 << 60], [1 << 60]]
        assert count_best_hits(trace, 2) == 2

    def test_belady_keeps_the_root_of_a_chain_that_is_needed(self) -> None:
        assert count_best_hits(requests("abc", "x", "abd"), 2) == 2

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_nobody_beats_belady_here(self, name: str) -> None:
        trace = make_workload(name, 1, 400)
        best = count_best_hits(trace, 300)
        assert all(count_hits(make_policy(p), trace, 300) <= best for p in ("lru", "prefix-aware"))

    def test_progress_adds_up(self) -> None:
        told: list[int] = []
        count_hits(make_policy("lru"), requests(*"ab" * 125), 5, told.append)
        assert sum(told) == 250


class TestTraces:
    GOOD = b'{"timestamp": 1500, "input_length": 9, "output_length": 3, "hash_ids": [1, 2]}\n'

    def test_a_line_is_a_request(self) -> None:
        assert parse_trace([self.GOOD, b"\n", self.GOOD], "t") == [Request(1.5, (1, 2))] * 2

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (b"{", "truncated"),
            (b"[]", "Expected `object`"),
            (b'{"timestamp": 1}', "missing required field `hash_ids`"),
            (b'{"timestamp": "1", "hash_ids": []}', r"\$.timestamp"),
            (b'{"timestamp": 1, "hash_ids": [1, "2"]}', r"\$.hash_ids"),
            (b'{"timestamp": 1, "hash_ids": [2]}', "block 2 stands at the start here, and after 1 elsewhere"),
            (b'{"timestamp": 1, "hash_ids": [7, 7]}', "block 7 stands after 7 here, and at the start"),
            (b"\xff\xfe", "malformed"),
        ],
    )
    def test_a_bad_line_is_named(self, line: bytes, problem: str) -> None:
        with pytest.raises(InvalidRequest, match=f"trace.jsonl, line 3: .*{problem}"):
            parse_trace([self.GOOD, self.GOOD, line], "trace.jsonl")

    def test_numbers_of_blocks_may_be_hashes(self) -> None:
        line = b'{"timestamp": 0, "hash_ids": [18446744073709551615, -5]}'
        assert count_hits(make_policy("lru"), parse_trace([line, line], "t"), 5) == 2

    def test_a_file_that_is_missing_or_empty_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="--workload"):
            read_trace(tmp_path / "none")
        (tmp_path / "empty").touch()
        with pytest.raises(InvalidRequest, match="no requests"):
            read_trace(tmp_path / "empty")
        with pytest.raises(InvalidRequest, match="cannot be read"):
            read_trace(tmp_path)


@pytest.mark.parametrize("name", WORKLOADS)
class TestWorkloads:
    def test_equal_seeds_give_equal_requests(self, name: str) -> None:
        first = make_workload(name, 1, 300)
        assert first == make_workload(name, 1, 300) != make_workload(name, 2, 300)
        assert len(first) == 300

    def test_blocks_follow_the_same_block_each_time_and_time_goes_on(self, name: str) -> None:
        made = make_workload(name, 1, 2000)
        parents: dict[int, int] = {}
        for request in made:
            assert request.chain
            for parent, block in pairwise((-1, *request.chain)):
                assert parents.setdefault(block, parent) == parent
        assert all(a.at_s <= b.at_s for a, b in pairwise(made))


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"no workload 'x'; there are conversations, "):
        make_workload("x", 1, 1)
