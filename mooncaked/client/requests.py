"""From what a caller passes to an operation: the argument checks that both clients share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from mooncaked.api.protocol import GPU_REGION, META_BYTES_MAX, Kind, PinnedBlock, PutItem, Unpin
from mooncaked.client import operations
from mooncaked.client.buffers import Value, as_views, copy_out, make_tensor
from mooncaked.client.direct import ASK, Direct, Found
from mooncaked.client.mapping import Mapping
from mooncaked.client.operations import Operation, PutResult, ReadOptions, Sink, Source, intact
from mooncaked.errors import BufferTooSmall, InvalidRequest, PoolFull, ValueTooLarge
from mooncaked.keys import as_key, check_namespace, show_key

Key: TypeAlias = bytes | str
# The node gives up a fetch before the client gives up on the node, so that the client hears of it.
_FETCH_SHARE = 0.8
HOLDS = ("", "soft", "hard")
TTL_S_MAX = 10 * 365 * 86400.0


class Reading(msgspec.Struct, frozen=True):
    """What is to be read, and where it goes."""

    keys: list[bytes]
    sink: Sink[Any]
    direct: bool = True  # the bytes alone are enough
    targets: list[memoryview] | None = None  # where they just go, one for each key


class Requests:
    """Builds operations in one namespace. Raises `InvalidKey` or `InvalidRequest` before anything is sent."""

    def __init__(self, namespace: str, timeout_s: float, verify: bool) -> None:
        self.namespace = check_namespace(namespace)
        self._deadline_ms = max(1, int(timeout_s * 1000 * _FETCH_SHARE))
        self._verify = verify

    # --- writing -----------------------------------------------------------------------------------

    def put(self, source: Source) -> Operation[PutResult]:
        """One put, for which a full pool is an error."""
        (result,) = yield from operations.put(self.namespace, [source])
        item = source.item
        if result is PutResult.FULL or result is PutResult.TOO_LARGE:
            if result is PutResult.TOO_LARGE:
                largest = yield operations.Work(Mapping.largest, 0)
                raise ValueTooLarge(key=show_key(item.key), size=item.size, limit=largest)
            capacity = yield operations.Work(Mapping.capacity, 0)
            raise PoolFull(size=item.size, capacity=capacity, pinned="too many", key="[dram] size")
        return result

    def put_batch(self, sources: Sequence[Source]) -> Operation[list[PutResult]]:
        """Many puts."""
        return operations.put(self.namespace, sources)

    # --- reading -----------------------------------------------------------------------------------

    def get(self, keys: Sequence[Key]) -> Reading:
        """Values as bytes of their own."""
        return Reading(as_keys(keys), Sink(take=lambda _index, view, _meta: bytes(view)))

    def get_into(self, keys: Sequence[Key], targets: Sequence[Value]) -> Reading:
        """Values into the caller's buffers."""
        _check_lengths(keys, targets, "targets")
        views = [as_views(target, writable=True) for target in targets]
        sizes = [sum(map(len, parts)) for parts in views]

        def take(index: int, view: memoryview, _meta: bytes) -> int:
            if len(view) > sizes[index]:
                raise BufferTooSmall(key=show_key(as_key(keys[index])), size=len(view), limit=sizes[index])
            copy_out(view, views[index])
            return len(view)

        plain = not self._verify and all(len(parts) == 1 for parts in views)
        whole = [parts[0] for parts in views] if plain else None
        return Reading(as_keys(keys), Sink(take=take, sizes=sizes), targets=whole)

    def get_tensor(self, key: Key, framework: str | None) -> Reading:
        """A value as a tensor."""
        if framework not in (None, "numpy", "torch"):
            raise InvalidRequest(problem=f'framework is "numpy" or "torch", not {framework!r}')

        def take(_index: int, view: memoryview, meta: bytes) -> Any:
            return make_tensor(show_key(as_key(key)), meta, view, framework)

        return Reading([as_key(key)], Sink(take=take), direct=False)

    def read(self, reading: Reading, sources: Sequence[str], locate: bool) -> Operation[list[Any | None]]:
        """Read through the daemon."""
        return operations.read(self.namespace, reading.keys, self._options(sources, locate), reading.sink)

    def read_direct(self, direct: Direct, reading: Reading) -> list[Any]:
        """Read without the daemon; `ASK` in place of what needs it. Moves all bytes, so it takes its time."""
        read, take, verify = direct.read, reading.sink.take, self._verify
        results: list[Any] = [None] * len(reading.keys)
        if reading.targets is not None:
            results = list(map(direct.copy_to, reading.keys, reading.targets))
        for index, key in enumerate(reading.keys):
            if results[index] is None:
                results[index] = read(key, index, take, verify)
        return results if direct.connected() else [ASK] * len(results)

    @staticmethod
    def rest(reading: Reading, results: Sequence[Any], misses: bool) -> tuple[list[int], Reading]:
        """What is left to be read through the daemon: the places in `results`, and how. `misses`: also those
        that are not here."""
        if ASK not in results and not (misses and None in results):
            return [], reading
        left = [n for n, result in enumerate(results) if result is ASK or (misses and result is None)]
        sink = reading.sink
        sizes = None if sink.sizes is None else [sink.sizes[n] for n in left]
        rest = Sink(take=lambda index, view, meta: sink.take(left[index], view, meta), sizes=sizes)
        return left, Reading([reading.keys[n] for n in left], rest)

    def pin(self, key: Key, sources: Sequence[str], locate: bool) -> Operation[list[PinnedBlock | None]]:
        """Pin one value, for a view."""
        return operations.pin(self.namespace, [as_key(key)], self._options(sources, locate))

    def pin_gpu(self, key: Key) -> Operation[PinnedBlock | None]:
        """Pin one value in GPU memory; None when it is not there."""
        options = ReadOptions([], False, 0, False, tier="gpu")
        (block,) = yield from operations.pin(self.namespace, [as_key(key)], options)
        if block is not None and block.region < GPU_REGION:
            yield operations.Post(Kind.UNPIN, Unpin(pins=[block.pin]))
            return None
        return block

    def open_view(self, key: Key, block: PinnedBlock, mapping: Mapping) -> memoryview | None:
        """The bytes of a pinned block, read-only; None if they are damaged and this is to be checked."""
        view = mapping.view(block.region, block.offset, block.size).toreadonly()
        damaged = self._verify and not intact(as_key(key), block.checksum, view)
        return None if damaged else view

    def trusts(self, found: Found) -> bool:
        """Whether a value that is held directly may be given as it is; otherwise the daemon is to be
        asked."""
        return not self._verify or found.intact()

    def _options(self, sources: Sequence[str], locate: bool) -> ReadOptions:
        return ReadOptions(list(sources), locate, self._deadline_ms, self._verify)

    # --- questions and removal ---------------------------------------------------------------------

    def exists(self, keys: Sequence[bytes]) -> Operation[list[bool]]:
        """Which keys have a value."""
        return operations.exists(self.namespace, keys)

    def prefix_match(self, keys: Sequence[bytes]) -> Operation[int]:
        """How long a prefix of a chain is here."""
        return operations.prefix_match(self.namespace, keys)

    def remove(self, keys: Sequence[Key]) -> Operation[list[bool]]:
        """Remove values."""
        return operations.remove(self.namespace, as_keys(keys))


def as_keys(keys: Sequence[Key]) -> list[bytes]:
    """Each key as bytes; raises `InvalidKey`, or `InvalidRequest` for what is no list of keys."""
    if isinstance(keys, str | bytes):
        raise InvalidRequest(problem="a batch takes a list of keys, not a single key")
    return [as_key(key) for key in keys]


def put_source(
    key: Key, value: Value, parent: Key | None, *, meta: bytes = b"", ttl_s: float = 0.0, hold: str = ""
) -> Source:
    """One value to put, checked as far as a client can."""
    raw, views = as_key(key), as_views(value)
    size = sum(map(len, views))
    if not size:
        raise InvalidRequest(
            problem=f"the value for key {show_key(raw)} is empty; a value has at least one byte"
        )
    if len(meta) > META_BYTES_MAX:
        problem = f"the shape and type of the tensor for key {show_key(raw)} take {len(meta)} bytes"
        raise InvalidRequest(problem=f"{problem}, the limit is {META_BYTES_MAX}")
    above = None if parent is None else as_key(parent)
    if above == raw or hold not in HOLDS or not 0 <= ttl_s <= TTL_S_MAX:
        problem = (
            f"key {show_key(raw)}: parent {show_key(above or b'')}, hold {hold!r}, {ttl_s} s to live; "
            f'a block is not its own parent, a hold is "", "soft" or "hard", and a time to live is 0 (none) '
            f"to {TTL_S_MAX:.0f} s"
        )
        raise InvalidRequest(problem=problem)
    ttl_ms = math.ceil(ttl_s * 1000)
    return Source(PutItem(key=raw, size=size, parent=above, meta=meta, ttl_ms=ttl_ms, hold=hold), views)


def put_sources(
    keys: Sequence[Key],
    values: Sequence[Value],
    parents: Sequence[Key | None] | None,
    ttl_s: float,
    hold: str,
) -> list[Source]:
    """Many values to put."""
    _check_lengths(keys, values, "values")
    if parents is not None:
        _check_lengths(keys, parents, "parents")
    rows = zip(as_keys(keys), values, parents or [None] * len(keys), strict=True)
    return [put_source(key, value, parent, ttl_s=ttl_s, hold=hold) for key, value, parent in rows]


def _check_lengths(keys: Sequence[Key], others: Sequence[object], what: str) -> None:
    if len(keys) != len(others):
        raise InvalidRequest(
            problem=f"{len(keys)} keys were given with {len(others)} {what}; give one for each"
        )
