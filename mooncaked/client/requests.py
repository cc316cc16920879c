"""From what a caller passes to an operation: the argument checks that both clients share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from mooncaked.api.protocol import META_BYTES_MAX, PinnedBlock, PutItem
from mooncaked.client import operations
from mooncaked.client.buffers import Buffer, Value, as_views, copy_out, describe_tensor, make_tensor
from mooncaked.client.mapping import Mapping
from mooncaked.client.operations import Operation, PutResult, ReadOptions, Sink, Source
from mooncaked.errors import BufferTooSmall, InvalidRequest, PoolFull, ValueTooLarge
from mooncaked.keys import as_key, check_namespace, show_key

Key: TypeAlias = bytes | str
# The node gives up a fetch before the client gives up on the node, so that the client hears of it.
_FETCH_SHARE = 0.8


class Requests:
    """Builds operations in one namespace. Raises `InvalidKey` or `InvalidRequest` before anything is sent."""

    def __init__(self, namespace: str, timeout_s: float, verify: bool) -> None:
        self._namespace = check_namespace(namespace)
        self._deadline_ms = max(1, int(timeout_s * 1000 * _FETCH_SHARE))
        self._verify = verify

    # --- writing -----------------------------------------------------------------------------------

    def put(self, key: Key, value: Value, parent: Key | None) -> Operation[PutResult]:
        """One put, for which a full pool is an error."""
        return self._put_one(_source(key, as_views(value), parent, b""))

    def put_tensor(self, key: Key, tensor: Buffer, parent: Key | None) -> Operation[PutResult]:
        """One put of a tensor with its shape and type."""
        return self._put_one(_source(key, as_views(tensor), parent, describe_tensor(tensor)))

    def _put_one(self, source: Source) -> Operation[PutResult]:
        (result,) = yield from operations.put(self._namespace, [source])
        item = source.item
        if result is PutResult.FULL or result is PutResult.TOO_LARGE:
            capacity = yield operations.Work(Mapping.capacity, 0)
            if result is PutResult.TOO_LARGE:
                raise ValueTooLarge(key=show_key(item.key), size=item.size, limit=capacity)
            raise PoolFull(size=item.size, capacity=capacity, pinned="too many", key="[dram] size")
        return result

    def put_batch(
        self, keys: Sequence[Key], values: Sequence[Value], parents: Sequence[Key | None] | None
    ) -> Operation[list[PutResult]]:
        """Many puts."""
        _check_lengths(keys, values, "values")
        if parents is not None:
            _check_lengths(keys, parents, "parents")
        ancestry = parents or [None] * len(keys)
        sources = [_source(k, as_views(v), p, b"") for k, v, p in zip(keys, values, ancestry, strict=True)]
        return operations.put(self._namespace, sources)

    # --- reading -----------------------------------------------------------------------------------

    def get(self, keys: Sequence[Key], sources: Sequence[str], locate: bool) -> Operation[list[bytes | None]]:
        """Values as bytes of their own."""
        return self._read(keys, sources, locate, Sink(take=lambda _index, _block, view: bytes(view)))

    def get_into(
        self, keys: Sequence[Key], targets: Sequence[Value], sources: Sequence[str], locate: bool
    ) -> Operation[list[int | None]]:
        """Values into the caller's buffers."""
        _check_lengths(keys, targets, "targets")
        views = [as_views(target, writable=True) for target in targets]
        sizes = [sum(map(len, parts)) for parts in views]

        def take(index: int, block: PinnedBlock, view: memoryview) -> int:
            if block.size > sizes[index]:
                raise BufferTooSmall(key=show_key(as_key(keys[index])), size=block.size, limit=sizes[index])
            copy_out(view, views[index])
            return block.size

        return self._read(keys, sources, locate, Sink(take=take, sizes=sizes))

    def get_tensor(
        self, key: Key, framework: str | None, sources: Sequence[str], locate: bool
    ) -> Operation[list[Any | None]]:
        """A value as a tensor."""
        if framework not in (None, "numpy", "torch"):
            raise InvalidRequest(problem=f'framework is "numpy" or "torch", not {framework!r}')

        def take(_index: int, block: PinnedBlock, view: memoryview) -> Any:
            return make_tensor(show_key(as_key(key)), block.meta, view, framework)

        return self._read([key], sources, locate, Sink(take=take))

    def pin(self, key: Key, sources: Sequence[str], locate: bool) -> Operation[list[PinnedBlock | None]]:
        """Pin one value, for a view."""
        return operations.pin(self._namespace, [as_key(key)], self._options(sources, locate))

    def open_view(self, key: Key, block: PinnedBlock, mapping: Mapping) -> memoryview | None:
        """The bytes of a pinned block, read-only; None if they are damaged and this is to be checked."""
        view = mapping.view(block.region, block.offset, block.size).toreadonly()
        damaged = self._verify and not operations.intact(as_key(key), block, view)
        return None if damaged else view

    def _read(
        self, keys: Sequence[Key], sources: Sequence[str], locate: bool, sink: Sink[Any]
    ) -> Operation[list[Any | None]]:
        return operations.read(self._namespace, _keys(keys), self._options(sources, locate), sink)

    def _options(self, sources: Sequence[str], locate: bool) -> ReadOptions:
        return ReadOptions(list(sources), locate, self._deadline_ms, self._verify)

    # --- questions and removal ---------------------------------------------------------------------

    def exists(self, keys: Sequence[Key]) -> Operation[list[bool]]:
        """Which keys have a value."""
        return operations.exists(self._namespace, _keys(keys))

    def prefix_match(self, keys: Sequence[Key]) -> Operation[int]:
        """How long a prefix of a chain is here."""
        return operations.prefix_match(self._namespace, _keys(keys))

    def remove(self, keys: Sequence[Key]) -> Operation[list[bool]]:
        """Remove values."""
        return operations.remove(self._namespace, _keys(keys))


def close_view(view: memoryview | None) -> None:
    """Make `view` unusable, so that nobody reads on after its pin has ended."""
    try:
        if view is not None:
            view.release()
    except BufferError:
        return  # something made from it, e.g. an array, still lives; the caller was told not to use it


def _keys(keys: Sequence[Key]) -> list[bytes]:
    if isinstance(keys, str | bytes):
        raise InvalidRequest(problem="a batch takes a list of keys, not a single key")
    return [as_key(key) for key in keys]


def _source(key: Key, views: list[memoryview], parent: Key | None, meta: bytes) -> Source:
    raw = as_key(key)
    size = sum(map(len, views))
    if not size:
        raise InvalidRequest(
            problem=f"the value for key {show_key(raw)} is empty; a value has at least one byte"
        )
    if len(meta) > META_BYTES_MAX:
        problem = f"the shape and type of the tensor for key {show_key(raw)} take {len(meta)} bytes"
        raise InvalidRequest(problem=f"{problem}, the limit is {META_BYTES_MAX}")
    return Source(
        PutItem(key=raw, size=size, parent=None if parent is None else as_key(parent), meta=meta), views
    )


def _check_lengths(keys: Sequence[Key], others: Sequence[object], what: str) -> None:
    if len(keys) != len(others):
        raise InvalidRequest(
            problem=f"{len(keys)} keys were given with {len(others)} {what}; give one for each"
        )
