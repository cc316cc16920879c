"""What has been promised: the reservations of running requests, and the load they add up to per instance.

A decision reserves in the same step, so decisions that follow see it. A reservation ends when its gateway
says so; one whose gateway died ends when it expires."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from mooncaked.conductor.messages import Decision
from mooncaked.errors import IntegrityError


@dataclass(slots=True)
class Reservation:
    """One running request. First it is in prefill, and has its place in the decode batch reserved already."""

    decision: Decision
    kv_tokens: int  # at the decode instance: prompt and expected answer
    started_ms: float
    expires_ms: float
    decoding_since_ms: float | None = None  # None while in prefill


def _starts_ms(entry: Reservation) -> float:
    since = entry.decoding_since_ms
    return since if since is not None else entry.started_ms + entry.decision.ttft_ms


def _ends_ms(entry: Reservation) -> float:
    return _starts_ms(entry) + entry.decision.tbt_ms * entry.decision.expected_tokens


@dataclass(slots=True)
class Load:
    """The sum of the reservations on one instance. The same object for as long as the instance exists."""

    prefill: dict[str, Reservation] = field(default_factory=dict)  # in the order of arrival
    prefill_ms: float = 0.0  # predicted, of all in `prefill`
    prefill_tokens: int = 0  # to compute
    free_at_ms: float = 0.0  # when all in `prefill` will be done, if each takes as long as predicted
    behind_ms: float = 0.0  # predicted, of all in `prefill` but the first: at least this is still to come
    decode: dict[str, Reservation] = field(default_factory=dict)  # running, and coming once prefilled
    kv_tokens: int = 0  # of all in `decode`

    def queue_ms(self, now_ms: float) -> float:
        """Predicted milliseconds until everything that is queued has been prefilled."""
        left = self.free_at_ms - now_ms
        return left if left > self.behind_ms else self.behind_ms


def _work_ms(entry: Reservation) -> float:
    terms = entry.decision.prefill_terms
    return terms.load_ms + terms.transfer_ms + terms.prefill_ms


class Ledger:
    """All reservations of one conductor."""

    def __init__(self) -> None:
        self._reservations: dict[str, Reservation] = {}  # in the order of arrival, so of expiry
        self._loads: dict[str, Load] = {}  # by instance
        self.pulls: dict[str, int] = {}  # node -> pulls that it is serving as far as is known here

    def __len__(self) -> int:
        return len(self._reservations)

    def get(self, request_id: str) -> Reservation | None:
        """The reservation of a request, if it has one."""
        return self._reservations.get(request_id)

    def load(self, instance_id: str) -> Load:
        """The load of an instance; to be read only. The same object from now on, until `retain` drops it."""
        if (load := self._loads.get(instance_id)) is None:
            load = self._loads[instance_id] = Load()
        return load

    def retain(self, instances: Collection[str]) -> None:
        """Drop the loads of instances that exist no longer and have nothing reserved."""
        for name, load in list(self._loads.items()):
            if name not in instances and not load.prefill and not load.decode:
                del self._loads[name]

    def reserve(self, decision: Decision, now_ms: float, ttl_ms: float, *, prefilled: bool = False) -> None:
        """Count a decision in. An earlier one for the same request is replaced. `prefilled`: decode only."""
        self.release(decision.request_id, now_ms)
        kv_tokens = decision.prompt_tokens + decision.expected_tokens
        entry = Reservation(decision, kv_tokens, now_ms, now_ms + ttl_ms)
        self._reservations[decision.request_id] = entry
        decode = self.load(decision.decode)
        decode.decode[decision.request_id] = entry
        decode.kv_tokens += kv_tokens
        if prefilled:
            entry.decoding_since_ms = now_ms
        else:
            self._enter_prefill(entry, now_ms)

    def to_decode(self, request_id: str, now_ms: float) -> None:
        """The prefill of a request is done. Twice, or for an unknown request, changes nothing."""
        entry = self._reservations.get(request_id)
        if entry is not None and entry.decoding_since_ms is None:
            self._leave_prefill(entry, now_ms)
            entry.decoding_since_ms = now_ms

    def release(self, request_id: str, now_ms: float) -> Reservation | None:
        """The request ended, however. Returns what was reserved; None if nothing was."""
        entry = self._reservations.pop(request_id, None)
        if entry is None:
            return None
        if entry.decoding_since_ms is None:
            self._leave_prefill(entry, now_ms)
        load = self.load(entry.decision.decode)
        del load.decode[request_id]
        load.kv_tokens -= entry.kv_tokens
        return entry

    def expire(self, now_ms: float) -> list[str]:
        """Release everything whose time is over; returns the request ids."""
        over = []
        for request_id, entry in self._reservations.items():
            if entry.expires_ms > now_ms:
                break
            over.append(request_id)
        for request_id in over:
            self.release(request_id, now_ms)
        return over

    def decode_at(self, instance_id: str, when_ms: float, skip: str = "") -> tuple[int, int]:
        """(requests, KV tokens) that will be decoding on an instance at `when_ms`: what has been prefilled by
        then has come, what has decoded for its expected time has gone. Request `skip` is left out."""
        batch = kv_tokens = 0
        for request_id, entry in self.load(instance_id).decode.items():
            if request_id != skip and _starts_ms(entry) <= when_ms < _ends_ms(entry):
                batch += 1
                kv_tokens += entry.kv_tokens
        return batch, kv_tokens

    def room_wait_ms(self, instance_id: str, need: int, capacity: float, when_ms: float, skip: str) -> float:
        """From `when_ms`, how long until `need` KV tokens are free at a decode instance that has `capacity`,
        as the answers running there are predicted to end. Request `skip` is left out."""
        load = self.load(instance_id)
        over = load.kv_tokens + need - capacity
        if over <= 0:
            return 0.0
        wait_ms = 0.0
        entries = [e for key, e in load.decode.items() if key != skip]
        over = sum(e.kv_tokens for e in entries) + need - capacity
        for ends_ms, tokens in sorted((_ends_ms(e), e.kv_tokens) for e in entries):
            if over <= 0:
                break
            over -= tokens
            wait_ms = ends_ms - when_ms
        return max(0.0, wait_ms)

    def _enter_prefill(self, entry: Reservation, now_ms: float) -> None:
        decision, terms, work_ms = entry.decision, entry.decision.prefill_terms, _work_ms(entry)
        load = self.load(decision.prefill)
        load.behind_ms += work_ms if load.prefill else 0.0
        load.free_at_ms = max(load.free_at_ms, now_ms) + work_ms
        load.prefill[decision.request_id] = entry
        load.prefill_ms += work_ms
        load.prefill_tokens += decision.prompt_tokens - terms.reused_tokens
        if terms.pull_from:
            self.pulls[terms.pull_from] = self.pulls.get(terms.pull_from, 0) + 1

    def _leave_prefill(self, entry: Reservation, now_ms: float) -> None:
        decision, terms, work_ms = entry.decision, entry.decision.prefill_terms, _work_ms(entry)
        load = self.load(decision.prefill)
        was_first = next(iter(load.prefill)) == decision.request_id
        del load.prefill[decision.request_id]
        if load.prefill:
            load.prefill_ms -= work_ms
            first = next(iter(load.prefill.values()))
            load.behind_ms = max(0.0, load.prefill_ms - _work_ms(first))
            load.free_at_ms = now_ms + load.prefill_ms if was_first else load.free_at_ms - work_ms
        else:  # set anew, so that no dust of many additions and subtractions stays
            load.prefill_ms = load.behind_ms = load.free_at_ms = 0.0
        load.prefill_tokens -= decision.prompt_tokens - terms.reused_tokens
        if terms.pull_from:
            self.pulls[terms.pull_from] -= 1
            if not self.pulls[terms.pull_from]:
                del self.pulls[terms.pull_from]

    def check_integrity(self) -> None:
        """Add everything up again; raises `IntegrityError` where a sum is wrong."""
        loads = self._loads.values()
        prefill, decode = sum(len(load.prefill) for load in loads), sum(len(load.decode) for load in loads)
        waiting = [e for e in self._reservations.values() if e.decoding_since_ms is None]
        if decode != len(self._reservations) or prefill != len(waiting):
            raise _broken(f"{len(waiting)} of {decode} wait for prefill, {len(self._reservations)} reserved")
        for name, load in self._loads.items():
            tokens = sum(entry.kv_tokens for entry in load.decode.values())
            if tokens != load.kv_tokens:
                raise _broken(f"{name}: {load.kv_tokens} KV tokens counted, {tokens} reserved")
        pulls = sum(1 for entry in waiting if entry.decision.prefill_terms.pull_from)
        if pulls != sum(self.pulls.values()):
            raise _broken(f"{self.pulls} pulls counted, {pulls} reserved")


def _broken(detail: str) -> IntegrityError:
    return IntegrityError(what="the ledger", detail=detail)
