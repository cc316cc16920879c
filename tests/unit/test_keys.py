"""What can be a key."""

from __future__ import annotations

import pytest

from mooncaked.errors import InvalidKey
from mooncaked.keys import KEY_BYTES_MAX, as_key, parse_key, show_key


@pytest.mark.parametrize("key", [b"k", "k", bytearray(b"k"), memoryview(b"k")])
def test_text_and_bytes_are_keys(key: object) -> None:
    assert as_key(key) == b"k"


@pytest.mark.parametrize("key", [5, True, None, 10**11, 1.5, ["k"]])
def test_what_is_neither_is_no_key(key: object) -> None:
    with pytest.raises(InvalidKey, match="a key is bytes or text"):
        as_key(key)


@pytest.mark.parametrize("size", [0, KEY_BYTES_MAX + 1])
def test_a_key_has_a_size(size: int) -> None:
    with pytest.raises(InvalidKey, match=f"it has {size} bytes"):
        as_key(b"k" * size)


@pytest.mark.parametrize("key", [b"plain", b"0x", b"\x00\xff", "ü".encode()])
def test_a_key_is_read_back_as_it_is_shown(key: bytes) -> None:
    assert parse_key(show_key(key)) == key
