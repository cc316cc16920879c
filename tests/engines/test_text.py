"""Tokens to text as they come: whole characters, and nothing past a stop text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.engines.reference.text import REPLACEMENT, AnswerText, Detokenizer, StopFinder


def bytes_as_tokens(tokens: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(tokens).decode(errors="replace")


@given(st.text(max_size=40))
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    detokenizer = Detokenizer(bytes_as_tokens)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all(REPLACEMENT not in piece for piece in pieces if REPLACEMENT not in text)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_are_replaced_and_hold_nothing_up_for_ever(data: bytes) -> None:
    detokenizer = Detokenizer(bytes_as_tokens)
    pieces = [detokenizer.push(byte) for byte in data]
    text = "".join(pieces) + detokenizer.flush()
    assert [c for c in text if c != REPLACEMENT] == [
        c for c in data.decode(errors="replace") if c != REPLACEMENT
    ]


def test_a_run_of_broken_bytes_is_given_up_after_a_while() -> None:
    detokenizer = Detokenizer(bytes_as_tokens)
    pieces = [detokenizer.push(0xFF) for _ in range(40)]
    assert any(pieces)
    assert detokenizer.push(ord("a")).endswith("a")


@pytest.mark.parametrize("text", ["", "ab", "xxstopyy", "stop", "xsto", "ststop", "s" * 5, "a<end>b<end>"])
@given(cuts=st.lists(st.integers(1, 3), max_size=12))
def test_a_stop_text_cuts_however_the_text_is_cut(text: str, cuts: list[int]) -> None:
    stops = ["stop", "<end>"]
    finder, given_out, rest = StopFinder(stops), "", text
    for size in [*cuts, len(text)]:
        given_out += finder.push(rest[:size])
        rest = rest[size:]
    given_out += finder.flush()
    found = [text.find(stop) for stop in stops if stop in text]
    assert given_out == (text[: min(found)] if found else text)
    assert finder.stopped == bool(found)


def test_text_that_may_become_a_stop_text_waits() -> None:
    finder = StopFinder(["\n\nUser:"])
    assert finder.push("Yes.\n") == "Yes."
    assert finder.push("\nU") == ""
    assert finder.push("nless") == "\n\nUnless"


def test_both_together() -> None:
    answer = AnswerText(bytes_as_tokens, ["é!"])
    given_out = [answer.push(byte) for byte in "caféé!x".encode()]
    assert "".join(given_out) == "café"
    assert answer.stopped
    assert answer.flush() == ""
    assert AnswerText(bytes_as_tokens, []).push(ord("a")) == "a"
