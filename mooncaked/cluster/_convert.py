"""Between this project's values (kv.py, watch.py) and etcd's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncaked.cluster._etcd3 import kv, rpc
from mooncaked.cluster.kv import Compare, Delete, Event, Get, KeyValue, Op, Put, TxnResult
from mooncaked.cluster.watch import WatchResponse

PAGE_KEYS = 1000


def text(raw: bytes) -> str:
    """A key as text; bytes that are no UTF-8 survive the round trip."""
    return raw.decode("utf-8", "surrogateescape")


def raw(key: str) -> bytes:
    """A key as bytes."""
    return key.encode("utf-8", "surrogateescape")


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key greater than every key that starts with `prefix`; etcd's b"\\0" means "to the end"."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def key_value(message: Any) -> KeyValue:
    """From etcd's KeyValue."""
    key, value = text(message.key), bytes(message.value)
    return KeyValue(key, value, message.create_revision, message.mod_revision, message.lease)


def range_request(prefix: str, start: bytes, revision: int) -> Any:
    """One page of a prefix, from the key `start` on, as of `revision` (0: now)."""
    end = prefix_end(raw(prefix))
    return rpc.RangeRequest(key=start or b"\0", range_end=end, limit=PAGE_KEYS, revision=revision)


def get_request(key: str) -> Any:
    """One key."""
    return rpc.RangeRequest(key=raw(key))


def _compare(compare: Compare) -> Any:
    message = rpc.Compare(key=raw(compare.key), result=rpc.Compare.EQUAL)
    if compare.create_revision is not None:
        message.target, message.create_revision = rpc.Compare.CREATE, compare.create_revision
    elif compare.mod_revision is not None:
        message.target, message.mod_revision = rpc.Compare.MOD, compare.mod_revision
    else:
        message.target, message.value = rpc.Compare.VALUE, compare.value or b""
    return message


def _op(op: Op) -> Any:
    match op:
        case Put():
            put = rpc.PutRequest(key=raw(op.key), value=op.value, lease=op.lease)
            return rpc.RequestOp(request_put=put)
        case Delete():
            return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=raw(op.key)))
        case Get():
            return rpc.RequestOp(request_range=get_request(op.key))


def txn_request(compares: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Any:
    """A whole transaction."""
    return rpc.TxnRequest(
        compare=[_compare(c) for c in compares],
        success=[_op(op) for op in then],
        failure=[_op(op) for op in otherwise],
    )


def txn_result(message: Any) -> TxnResult:
    """From etcd's TxnResponse."""
    ranges = [r.response_range for r in message.responses if r.HasField("response_range")]
    got = [key_value(r.kvs[0]) if r.kvs else None for r in ranges]
    return TxnResult(message.succeeded, message.header.revision, got)


def watch_request(prefix: str, start_revision: int) -> Any:
    """Open a watch; progress notices keep its revision fresh while nothing happens under the prefix."""
    start, end = raw(prefix) or b"\0", prefix_end(raw(prefix))
    create = rpc.WatchCreateRequest(
        key=start, range_end=end, start_revision=start_revision, progress_notify=True
    )
    return rpc.WatchRequest(create_request=create)


def _event(message: Any) -> Event:
    value = key_value(message.kv) if message.type == kv.Event.PUT else None
    return Event(text(message.kv.key), value, message.kv.mod_revision)


def watch_response(message: Any) -> WatchResponse:
    """From etcd's WatchResponse."""
    return WatchResponse(
        revision=message.header.revision,
        cluster_id=message.header.cluster_id,
        created=message.created,
        canceled=message.canceled,
        compact_revision=message.compact_revision,
        reason=message.cancel_reason,
        events=[_event(event) for event in message.events],
    )
