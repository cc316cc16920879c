"""What both clients promise: each test runs with the blocking and with the asyncio one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mooncaked.client import AsyncClient, Client, PutResult
from mooncaked.errors import (
    BufferTooSmall,
    InvalidKey,
    InvalidRequest,
    PoolFull,
    Refused,
    Unreachable,
    ValueTooLarge,
)
from tests.node.running import node_thread, until
from tests.node.small_node import SmallNode

POOL_BYTES = 16 << 20


class Awaited:
    """The blocking client with the methods of the other, each run in a thread."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call

    @asynccontextmanager
    async def get_view(self, *args: Any, **kwargs: Any) -> AsyncIterator[memoryview | None]:
        with self.client.get_view(*args, **kwargs) as view:
            yield view


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallNode]:
    with node_thread(tmp_path_factory.mktemp("node") / "c.sock", size=POOL_BYTES) as node:
        yield node
        until(lambda: node.store.stats().owners == 0, "all connections end")
        assert node.store.stats().pinned == node.store.stats().filling == 0


def make_client(kind: str, path: Path, **options: Any) -> Any:
    return AsyncClient(path, **options) if kind == "asyncio" else Awaited(Client(path, **options))


@pytest.fixture(params=["blocking", "asyncio"])
async def client(request: pytest.FixtureRequest, node: SmallNode) -> AsyncIterator[Any]:
    """A client in a namespace of its own."""
    namespace = request.node.name
    client = make_client(request.param, node.socket, namespace=namespace)
    client.make = lambda **options: make_client(
        request.param, node.socket, **{"namespace": namespace, **options}
    )
    yield client
    await client.close()


def test_both_have_the_same_methods_and_arguments() -> None:
    for name in [name for name in vars(Client) if not name.startswith("_")]:
        blocking, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters, name
        assert blocking.__doc__
        assert awaited.__doc__
    extra = {name for name in vars(AsyncClient) if not name.startswith("_")} - set(vars(Client))
    assert extra == {"connect"}


async def test_what_is_put_is_read(client: Any) -> None:
    assert await client.put("k", b"value") is PutResult.STORED
    assert await client.get("k") == b"value"
    assert await client.get(b"k") == b"value"


async def test_a_value_never_changes(client: Any) -> None:
    await client.put("k", b"first")
    assert await client.put("k", b"second") is PutResult.EXISTS
    assert await client.get("k") == b"first"


async def test_a_miss_is_a_value(client: Any) -> None:
    assert await client.get("nothing") is None
    assert await client.get_into("nothing", bytearray(10)) is None
    assert await client.get_tensor("nothing") is None
    assert await client.exists("nothing") is False
    assert await client.remove("nothing") is False
    assert await client.prefix_match(["nothing"]) == 0
    async with client.get_view("nothing") as view:
        assert view is None


async def test_batches_keep_their_order_and_have_their_misses(client: Any) -> None:
    results = await client.put_batch(["a", "b", "a"], [b"1", b"22", b"3"])
    assert results == [PutResult.STORED, PutResult.STORED, PutResult.BUSY]
    assert await client.get_batch(["b", "x", "a", "b"]) == [b"22", None, b"1", b"22"]
    assert await client.exists_batch(["a", "x", "b"]) == [True, False, True]
    buffers = [bytearray(2) for _ in range(3)]
    assert await client.get_into_batch(["a", "x", "b"], buffers) == [1, None, 2]
    assert buffers == [b"1\0", b"\0\0", b"22"]
    assert await client.remove_batch(["a", "x"]) == [True, False]
    assert await client.exists_batch(["a", "b"]) == [False, True]


async def test_empty_batches_are_fine(client: Any) -> None:
    assert await client.put_batch([], []) == []
    assert await client.get_batch([]) == []
    assert await client.get_into_batch([], []) == []
    assert await client.exists_batch([]) == []
    assert await client.remove_batch([]) == []
    assert await client.prefix_match([]) == 0


async def test_a_prefix_ends_at_its_first_gap(client: Any) -> None:
    keys = [f"k{i}" for i in range(5)]
    parents = [None, *keys[:-1]]
    await client.put_batch([*keys[:3], keys[4]], [b"x"] * 4, parents=[*parents[:3], parents[4]])
    assert await client.prefix_match(keys) == 3


async def test_batches_larger_than_one_exchange(client: Any) -> None:
    keys = [f"k{i}" for i in range(2500)]
    values = [key.encode() for key in keys]
    assert set(await client.put_batch(keys, values)) == {PutResult.STORED}
    assert await client.get_batch(keys) == values
    assert await client.prefix_match(keys) == len(keys)
    assert all(await client.remove_batch(keys))


async def test_namespaces_are_apart(client: Any) -> None:
    await client.put("k", b"here")
    other = client.make(namespace="another")
    assert await other.get("k") is None
    await other.close()


async def test_several_buffers_are_gathered_and_scattered(client: Any) -> None:
    parts = [b"abc", bytearray(b"de"), np.frombuffer(b"fghi", np.uint8)]
    await client.put("k", parts)
    assert await client.get("k") == b"abcdefghi"
    first, second = bytearray(4), np.zeros(8, np.uint8)
    assert await client.get_into("k", [first, second]) == 9
    assert first == b"abcd"
    assert second.tobytes() == b"efghi\0\0\0"


async def test_large_values_are_gathered_and_scattered(client: Any) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3_000_001, np.uint8)
    await client.put("k", [data[:1_200_000], data[1_200_000:]])
    target = [np.empty(1_000_001, np.uint8), np.empty(2_000_000, np.uint8)]
    assert await client.get_into("k", target) == len(data)
    assert np.array_equal(np.concatenate(target), data)
    checking = client.make(verify=True)
    assert await checking.get("k") == data.tobytes()
    await checking.close()


async def test_a_buffer_that_is_too_small_is_an_error_and_leaves_nothing_pinned(
    client: Any, node: SmallNode
) -> None:
    await client.put("k", b"12345")
    with pytest.raises(BufferTooSmall, match=r"5 bytes.*hold 4 bytes"):
        await client.get_into("k", bytearray(4))
    assert await client.exists("k")  # the connection works, and what was sent before was obeyed
    assert node.store.stats().pinned == 0


@pytest.mark.parametrize(
    "value", ["text", 5, None, object(), b"", [], memoryview(b"abcd")[::2], np.ones(9)[::2]]
)
async def test_what_cannot_be_stored_is_refused(client: Any, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        await client.put("k", value)
    assert await client.exists("k") is False


async def test_what_cannot_be_read_into_is_refused(client: Any) -> None:
    await client.put("k", b"1234")
    readonly = np.zeros(4, np.uint8)
    readonly.flags.writeable = False
    for target in (b"1234", readonly, "text", np.zeros(8, np.uint8)[::2]):
        with pytest.raises(InvalidRequest):
            await client.get_into("k", target)


async def test_keys_that_cannot_be_are_refused(client: Any) -> None:
    for key in ("", b"", b"x" * 513):
        with pytest.raises(InvalidKey):
            await client.get(key)
    with pytest.raises(InvalidRequest, match="list of keys"):
        await client.exists_batch("abc")
    with pytest.raises(InvalidRequest, match="2 keys were given with 1 values"):
        await client.put_batch(["a", "b"], [b"1"])


@pytest.mark.parametrize("shape", [(3, 4), (7,), (), (1, 1, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "uint8", "complex64"])
async def test_numpy_tensors(client: Any, shape: tuple[int, ...], dtype: str) -> None:
    array = np.asarray(np.random.default_rng(2).random(shape) * 9).astype(dtype)
    await client.put_tensor("k", array)
    back = await client.get_tensor("k")
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.bool])
async def test_torch_tensors(client: Any, dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(2, 3, 4) % 7).to(dtype)
    await client.put_tensor("k", tensor)
    back = await client.get_tensor("k")
    assert isinstance(back, torch.Tensor)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


async def test_tensors_of_the_other_framework(client: Any) -> None:
    await client.put_tensor("k", np.arange(6, dtype=np.float32).reshape(2, 3))
    as_torch = await client.get_tensor("k", framework="torch")
    assert torch.equal(as_torch, torch.arange(6, dtype=torch.float32).reshape(2, 3))
    await client.put_tensor("bf16", torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(InvalidRequest, match="numpy cannot hold"):
        await client.get_tensor("bf16", framework="numpy")
    await client.put("bytes", b"123")
    with pytest.raises(InvalidRequest, match="not put as a tensor"):
        await client.get_tensor("bytes")


async def test_torch_buffers_are_read_into_in_place(client: Any) -> None:
    source = torch.randn(5, 8, dtype=torch.float32, requires_grad=True)
    await client.put("k", source)
    target = torch.zeros(6, 8, dtype=torch.float32)
    assert await client.get_into("k", target[:5]) == 160
    assert torch.equal(target[:5], source.detach())
    assert not target[5].any()
    with pytest.raises(InvalidRequest, match="contiguous"):
        await client.put("t", source.t())


async def test_a_view_is_read_only_and_pinned(client: Any, node: SmallNode) -> None:
    await client.put("k", b"value")
    async with client.get_view("k") as view:
        assert bytes(view) == b"value"
        assert view.readonly
        assert node.pages.viewing() == 1
        assert await client.remove("k") is False  # it goes with this reader
        assert bytes(view) == b"value"
    assert await client.get("k") is None
    assert node.pages.viewing() == 0
    until(lambda: node.store.stats().hidden == 0, "its memory goes")
    with pytest.raises(ValueError, match="released"):
        view[0]


async def test_a_view_ends_also_when_its_user_fails(client: Any, node: SmallNode) -> None:
    await client.put("k", b"value")
    with pytest.raises(ZeroDivisionError):
        async with client.get_view("k"):
            _ = 1 / 0
    assert await client.exists("k")
    assert node.pages.viewing() == node.store.stats().pinned == 0


async def test_a_full_pool_evicts_what_is_old(client: Any) -> None:
    block = np.zeros(1 << 20, np.uint8)
    keys = [f"k{i}" for i in range(40)]  # of 1 MiB each, in a pool of 16
    for key in keys:
        assert await client.put(key, block) is PutResult.STORED
    found = await client.exists_batch(keys)
    assert found[-10:] == [True] * 10
    assert not any(found[:20])


async def test_a_batch_larger_than_the_pool_evicts_its_own_first(client: Any) -> None:
    keys = [f"k{i}" for i in range(40)]
    assert set(await client.put_batch(keys, [bytes(1 << 20)] * 40)) == {PutResult.STORED}
    assert (await client.exists_batch(keys))[-1]


async def test_a_pool_full_of_pinned_values_says_so(client: Any) -> None:
    await client.put("pinned", bytes(15 << 20))
    async with client.get_view("pinned"):
        with pytest.raises(PoolFull):
            await client.put("k", bytes(2 << 20))
        assert await client.put_batch(["k", "s"], [bytes(2 << 20), b"s"]) == [
            PutResult.FULL,
            PutResult.STORED,
        ]
    assert await client.put("k", bytes(2 << 20)) is PutResult.STORED


async def test_a_value_larger_than_the_pool_is_refused(client: Any) -> None:
    with pytest.raises(ValueTooLarge, match=str(POOL_BYTES)):
        await client.put("k", bytes(POOL_BYTES + 1))
    assert await client.put_batch(["k"], [bytes(POOL_BYTES + 1)]) == [PutResult.TOO_LARGE]


async def test_damage_in_memory_is_a_miss_when_asked_to_look(client: Any, node: SmallNode) -> None:
    await client.put("k", b"a value found nowhere else")
    checking = client.make(verify=True)
    assert await checking.get("k") == b"a value found nowhere else"
    at = bytes(node.pool.view).index(b"a value found nowhere else")
    node.pool.view[at] ^= 1
    assert await checking.get("k") is None
    assert await checking.get_into("k", bytearray(50)) is None
    async with checking.get_view("k") as view:
        assert view is None
    await checking.close()


async def test_what_a_daemon_says_of_itself(client: Any, node: SmallNode) -> None:
    hello = await client.hello()
    assert hello.node_id == "n1"
    assert hello.epoch == node.store.epoch


async def test_a_closed_client_refuses(client: Any) -> None:
    await client.put("k", b"1")
    await client.close()
    with pytest.raises(Refused):
        await client.get("k")


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
async def test_no_daemon_is_an_error_that_names_the_socket(kind: str, tmp_path: Path) -> None:
    client = make_client(kind, tmp_path / "none.sock")
    with pytest.raises(Unreachable, match=r"none\.sock.*Is mooncaked running"):
        await client.get("k")
    await client.close()


async def test_many_at_once(client: Any) -> None:
    async def one(i: int) -> None:
        value = f"value {i}".encode() * (i % 50 + 1)
        assert await client.put(f"k{i}", value) is PutResult.STORED
        assert await client.get(f"k{i}") == value

    await asyncio.gather(*(one(i) for i in range(100)))
