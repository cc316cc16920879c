"""Everything that holds bytes, seen as bytes."""

from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mooncaked.client.buffers import (
    DIGEST_BYTES_MAX,
    as_view,
    as_views,
    copy_in,
    copy_out,
    describe_tensor,
    make_tensor,
)
from mooncaked.errors import InvalidRequest


@pytest.mark.parametrize(
    "buffer",
    [
        b"12345678",
        bytearray(b"12345678"),
        memoryview(b"12345678"),
        memoryview(b"0012345678")[2:],
        array.array("H", b"12345678"),
        memoryview(array.array("I", b"12345678")),
        (ctypes.c_uint32 * 2).from_buffer_copy(b"12345678"),
        np.frombuffer(b"12345678", np.uint8),
        np.frombuffer(b"12345678", "<f4"),
        np.frombuffer(b"12345678", ">i8"),
        np.frombuffer(b"12345678", np.float16).reshape(2, 1, 2),
        np.frombuffer(b"12345678", "datetime64[s]"),
        np.frombuffer(b"12345678", [("a", "u1"), ("b", "u1", 7)]),
        np.frombuffer(b"12345678", np.complex64)[0],
        np.frombuffer(b"12345678", np.int64).reshape(()),
        np.asfortranarray(np.frombuffer(b"12345678", np.uint8)),
        torch.frombuffer(bytearray(b"12345678"), dtype=torch.bfloat16),
        torch.frombuffer(bytearray(b"12345678"), dtype=torch.int16).reshape(2, 2),
        torch.frombuffer(bytearray(b"12345678"), dtype=torch.int64).reshape(()),
        torch.frombuffer(bytearray(b"00012345678"), dtype=torch.uint8)[3:],
        torch.frombuffer(bytearray(b"12345678"), dtype=torch.float32).requires_grad_(),
    ],
)
def test_bytes_are_bytes(buffer: Any) -> None:
    view = as_view(buffer)
    assert (view.format, view.ndim, bytes(view)) == ("B", 1, b"12345678")


@pytest.mark.parametrize(
    "buffer", [b"", bytearray(), memoryview(b""), np.zeros(0), torch.zeros(0), np.zeros((3, 0))]
)
def test_nothing_is_nothing(buffer: Any) -> None:
    assert len(as_view(buffer)) == 0


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        ("text", "a str cannot be used as a buffer"),
        (5, "a int cannot"),
        ([1, 2], "a list cannot"),
        (memoryview(b"123456")[::2], "a memoryview cannot"),
        (np.zeros((4, 4)).T[1:], "strides"),
        (np.asfortranarray(np.zeros((4, 4))), "strides"),
        (np.array([object()]), "Python objects"),
        (torch.zeros(4, 4).t(), "contiguous"),
        (torch.zeros(4, device="meta"), "a tensor on meta"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_with_a_reason(buffer: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        as_view(buffer)


@pytest.mark.parametrize(
    "target",
    [
        bytearray(6),
        np.zeros(6, np.uint8),
        np.zeros((3, 1), np.float16),
        torch.zeros(3, dtype=torch.bfloat16),
        mmap.mmap(-1, 6),
        array.array("B", bytes(6)),
    ],
)
def test_writing_to_a_view_writes_to_its_buffer(target: Any) -> None:
    as_view(target, writable=True)[:] = b"abcdef"
    assert bytes(as_view(target)) == b"abcdef"


def test_a_read_only_buffer_is_not_written_to() -> None:
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    for target in (b"123", readonly, memoryview(b"123"), np.frombuffer(b"123", np.uint8)):
        with pytest.raises(InvalidRequest, match="read-only"):
            as_view(target, writable=True)


pieces = st.lists(st.integers(0, 3000).map(lambda n: np.random.default_rng(n).bytes(n)), max_size=6)


@given(parts=pieces, sizes=st.lists(st.integers(0, 4000), min_size=1, max_size=6))
def test_gather_and_scatter_are_one_copy_each(parts: list[bytes], sizes: list[int]) -> None:
    whole = b"".join(parts)
    stored = bytearray(len(whole))
    checksum = copy_in(memoryview(stored), as_views(parts))
    assert checksum == (xxhash.xxh3_64_intdigest(whole) if len(whole) <= DIGEST_BYTES_MAX else None)
    assert stored == whole
    targets = [bytearray(size) for size in sizes]
    copy_out(memoryview(stored), as_views(targets, writable=True))
    spread = b"".join(targets)
    fits = min(len(whole), len(spread))
    assert spread[:fits] == whole[:fits]
    assert not any(spread[fits:])


@pytest.mark.parametrize("size", [DIGEST_BYTES_MAX, DIGEST_BYTES_MAX + 1, 3_333_333])
def test_only_small_values_are_hashed_by_who_writes_them(size: int) -> None:
    source = np.random.default_rng(size).bytes(size)
    stored = bytearray(size)
    checksum = copy_in(memoryview(stored), [memoryview(source)])
    assert checksum == (xxhash.xxh3_64_intdigest(source) if size <= DIGEST_BYTES_MAX else None)
    assert stored == source


def test_the_checksum_is_of_what_was_stored() -> None:
    """A writer that changes its buffer meanwhile damages its value, but never makes it look damaged."""

    class Changing(bytearray):
        pass

    source = Changing(b"a" * DIGEST_BYTES_MAX)
    stored = memoryview(bytearray(DIGEST_BYTES_MAX))
    checksum = copy_in(stored, [memoryview(source)])
    source[0] = 0
    assert checksum == xxhash.xxh3_64_intdigest(stored)


def test_tensor_metadata_is_small() -> None:
    assert len(describe_tensor(np.zeros((1, 2, 3, 4, 5), np.float32))) < 64
    assert len(describe_tensor(torch.zeros(2, 2, dtype=torch.bfloat16))) < 64


@pytest.mark.parametrize("what", [b"bytes", [1], "x", None])
def test_what_is_no_tensor_is_refused(what: Any) -> None:
    with pytest.raises(InvalidRequest, match="is no tensor"):
        describe_tensor(what)


@pytest.mark.parametrize(
    "meta",
    [b"", b"x", b"\x94\xa8tensor/1\xa3f99\x91\x01\xa5numpy", b"\x94\xa8tensor/1\xa2f4\x91\x63\xa5numpy"],
)
def test_metadata_that_does_not_fit_is_an_error_and_no_crash(meta: bytes) -> None:
    with pytest.raises(InvalidRequest, match="key k"):
        make_tensor("k", meta, memoryview(bytes(8)), None)


def test_a_type_that_torch_lacks() -> None:
    meta = describe_tensor(np.zeros(2, "datetime64[s]"))
    with pytest.raises(InvalidRequest, match="torch has no type"):
        make_tensor("k", meta, memoryview(bytes(16)), "torch")
    assert make_tensor("k", meta, memoryview(bytes(16)), None) is not None


def test_an_array_of_records_is_no_tensor() -> None:
    with pytest.raises(InvalidRequest, match="an array of records is no tensor"):
        describe_tensor(np.zeros(3, [("a", "f4"), ("b", "i2")]))


def test_the_byte_order_of_another_machine_is_turned_for_torch() -> None:
    array_ = np.array([1, 2, 3], ">i4")
    tensor: Any = make_tensor("k", describe_tensor(array_), as_view(array_), "torch")
    assert tensor.tolist() == [1, 2, 3]
    assert np.array_equal(make_tensor("k", describe_tensor(array_), as_view(array_), None), array_)
