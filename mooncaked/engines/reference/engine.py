"""The step thread: takes requests in, runs one step after the other, and reports what came out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

from mooncaked.clock import Clock
from mooncaked.engines.reference.counters import EngineCounters
from mooncaked.engines.reference.kv_store import BlockRun, KvStore
from mooncaked.engines.reference.model import DECODE_ROWS, Llama
from mooncaked.engines.reference.sampling import choose
from mooncaked.engines.reference.scheduler import Chunk, Scheduler
from mooncaked.engines.reference.sequence import (
    Finish,
    GenerationRequest,
    Output,
    Sequence,
    State,
    Timing,
)
from mooncaked.errors import ContextLengthExceeded, Draining, MooncakeError, Overloaded
from mooncaked.keys import chain_keys, chain_root, tail_key

log = logging.getLogger(__name__)

REQUESTS_MAX = 256  # waiting and running

Message = Callable[[], None]  # what others want done on the step thread


class Engine:
    """Runs requests on one model. All methods but `run` may be called from any thread."""

    def __init__(
        self,
        model: Llama,
        scheduler: Scheduler,
        store: KvStore | None,
        *,
        namespace: str,
        block_tokens: int,
        context_tokens: int,
        eos: frozenset[int],
        name: str,
        counters: EngineCounters,
        clock: Clock,
        threads: int = 0,
    ) -> None:
        """`context_tokens`: no request may need KV for more. `threads`: of torch; 0 leaves it alone."""
        self._model, self._scheduler, self._store = model, scheduler, store
        self._namespace, self._block_tokens, self._eos = namespace, block_tokens, eos
        self._name, self._counters, self._clock, self._threads = name, counters, clock, threads
        self.context_tokens = context_tokens
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._open: set[Sequence] = set()
        self._lock = threading.Lock()  # guards _open and _draining
        self._draining = False
        self._idle = threading.Event()
        self._idle.set()
        self._stop = False
        self._thread = threading.Thread(target=self.run, name="steps", daemon=True)

    # --- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step, on a thread of its own."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the step thread runs. If not, it has met a bug and nothing is served any more."""
        return self._thread.is_alive()

    @property
    def open_requests(self) -> int:
        """Waiting and running ones."""
        return len(self._open)

    def submit(self, request: GenerationRequest, sink: Callable[[Output], None]) -> Sequence:
        """Take a request in; `sink` gets all that becomes of it, an Output with `finish` or `error` last.

        Raises `ContextLengthExceeded`, `Overloaded` or `Draining`. A first token that came with the request
        is reported before this returns, and before its KV is there."""
        needed = len(request.prompt) + request.max_tokens
        if needed > self.context_tokens:
            raise ContextLengthExceeded(tokens=needed, model=self._name, limit=self.context_tokens)
        sequence = Sequence(request=request, sink=sink, arrived_s=self._clock.monotonic())
        with self._lock:
            if self._draining:
                raise Draining(what=f"engine {self._name}")
            if len(self._open) >= REQUESTS_MAX:
                raise Overloaded(what=f"engine {self._name}", limit=REQUESTS_MAX)
            self._open.add(sequence)
            self._idle.clear()
        if request.first_token is not None:
            sequence.first_token_s = sequence.last_token_s = sequence.arrived_s
            self._emit(sequence, request.first_token)
        self._inbox.put(lambda: self._take_in(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants the rest of `sequence`: free what it holds, as soon as nothing uses it any more."""
        self._inbox.put(lambda: self._cancel(sequence))

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new in, and wait until all requests have ended; whether they have."""
        with self._lock:
            self._draining = True
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """Stop stepping. Requests that have not ended get a `Draining` error."""
        with self._lock:
            self._draining = True
        self._inbox.put(self._request_stop)
        self._thread.join()

    # --- the loop ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until closed."""
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while not self._stop:
                    self._read_inbox()
                    self._step()
        finally:
            with self._lock:
                self._draining = True
                left = list(self._open)
            for sequence in left:
                self._end(sequence, error=self._farewell())

    def _farewell(self) -> MooncakeError:
        """Why requests end with the step thread."""
        if self._stop:
            return Draining(what=f"engine {self._name}")
        return MooncakeError(detail="the engine's step thread has ended; its error is in the log")

    def _request_stop(self) -> None:
        self._stop = True

    def _read_inbox(self) -> None:
        """Do what others have asked; wait for something when there is nothing to compute."""
        self._admit()
        step = self._scheduler.next_step()
        wait = step.chunk is None and not step.decode
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            message()

    def _step(self) -> None:
        self._admit()
        step = self._scheduler.next_step()
        if step.chunk is not None:
            self._guard([step.chunk.sequence], partial(self._prefill, step.chunk))
        for start in range(0, len(step.decode), DECODE_ROWS):
            group = step.decode[start : start + DECODE_ROWS]
            self._guard(group, partial(self._decode, group))

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            self._guard([sequence], partial(self._admitted, sequence))

    def _guard(self, sequences: list[Sequence], compute: Callable[[], None]) -> None:
        """Compute; what goes wrong ends the sequences concerned and nothing else."""
        try:
            compute()
        except Exception as error:  # out of memory, say: one request's bad luck must not end the others
            log.exception("step failed requests=%s", [s.request.request_id for s in sequences])
            for sequence in sequences:
                self._end(sequence, error=MooncakeError(detail=f"the step failed ({type(error).__name__})"))

    # --- a sequence's way --------------------------------------------------------------------------

    def _take_in(self, sequence: Sequence) -> None:
        if sequence.cancelled or sequence.reason:
            self._end(sequence)
        else:
            self._scheduler.add(sequence)

    def _admitted(self, sequence: Sequence) -> None:
        """It has blocks: load what the store has of its prompt, or go on without."""
        sequence.admitted_s = self._clock.monotonic()
        run = self._load_run(sequence) if self._store is not None else None
        if self._store is None or run is None:
            self._loaded(sequence, 0)
            return
        sequence.busy += 1
        self._store.start_load(
            run, lambda blocks: self._inbox.put(lambda: self._load_ended(sequence, run, blocks))
        )

    def _load_run(self, sequence: Sequence) -> BlockRun | None:
        """The blocks worth loading. The last chunk is computed again unless the first token is there."""
        request, unit = sequence.request, self._block_tokens
        sequence.keys = chain_keys(self._namespace, request.prompt, unit)
        if request.first_token is None:
            usable = (sequence.prompt_tokens - 1) // self._model.chunk_tokens * self._model.chunk_tokens
            keys, tokens = sequence.keys[: usable // unit], [unit] * (usable // unit)
        else:
            keys, tokens = list(sequence.keys), [unit] * len(sequence.keys)
            if rest := request.prompt[len(keys) * unit :]:
                keys.append(self._tail_key(sequence, rest))
                tokens.append(len(rest))
        if not keys:
            return None
        return BlockRun(keys=keys, blocks=sequence.table[: len(keys)], tokens=tokens, sources=request.sources)

    def _tail_key(self, sequence: Sequence, rest: list[int]) -> bytes:
        return tail_key(sequence.keys[-1] if sequence.keys else chain_root(self._namespace), rest)

    def _load_ended(self, sequence: Sequence, run: BlockRun, blocks: int) -> None:
        sequence.busy -= 1
        if sequence.state is State.FINISHED:
            self._end(sequence)
            return
        sequence.loaded_blocks = blocks
        self._loaded(sequence, sum(run.tokens[:blocks]))

    def _loaded(self, sequence: Sequence, tokens: int) -> None:
        self._scheduler.loaded(sequence, tokens)
        sequence.loaded_s = self._clock.monotonic()
        self._counters.cached_tokens.inc(sequence.cached_tokens)

    def _prefill(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        prompt, size = sequence.request.prompt, self._model.chunk_tokens
        wanted = chunk.last and sequence.request.first_token is None
        logits = self._model.prefill(
            prompt[chunk.number * size : chunk.end], chunk.number, sequence.table, last=wanted
        )
        self._counters.computed_tokens.inc(chunk.end - sequence.computed)
        sequence.computed = chunk.end
        self._save(sequence, chunk)
        if chunk.last:
            sequence.state = State.SAVING if sequence.request.handover else State.DECODE
            if logits is not None:
                self._generated(sequence, choose(logits, sequence.request.sampling, 0))

    def _save(self, sequence: Sequence, chunk: Chunk) -> None:
        """Store the full blocks that `chunk` has completed, and at a handover the partly filled last one."""
        if self._store is None:
            return
        unit, size = self._block_tokens, self._model.chunk_tokens
        upto = chunk.end // unit
        first = min(max(chunk.number * size // unit, sequence.loaded_blocks), upto)
        keys, tokens = sequence.keys[first:upto], [unit] * (upto - first)
        rest = sequence.request.prompt[upto * unit : chunk.end]
        if rest and sequence.request.handover:
            keys.append(self._tail_key(sequence, rest))
            tokens.append(len(rest))
        if not keys:
            return
        run = BlockRun(
            keys=keys,
            blocks=sequence.table[first : first + len(keys)],
            tokens=tokens,
            parent=sequence.keys[first - 1] if first else None,
        )
        sequence.busy += 1
        self._store.start_save(run, lambda _: self._inbox.put(lambda: self._save_ended(sequence)))

    def _save_ended(self, sequence: Sequence) -> None:
        sequence.busy -= 1
        if sequence.state in (State.SAVING, State.FINISHED):
            self._end(sequence)

    def _decode(self, group: list[Sequence]) -> None:
        logits = self._model.decode(
            [s.output[-1] for s in group], [s.next_position for s in group], [s.table for s in group]
        )
        for row, sequence in zip(logits, group, strict=True):
            self._generated(sequence, choose(row, sequence.request.sampling, len(sequence.output)))

    def _generated(self, sequence: Sequence, token: int) -> None:
        now_s = self._clock.monotonic()
        if sequence.output:
            self._counters.tbt.observe(now_s - sequence.last_token_s)
        else:
            sequence.first_token_s = now_s
            self._counters.ttft.observe(now_s - sequence.arrived_s)
        sequence.last_token_s = now_s
        self._counters.generated_tokens.inc()
        self._emit(sequence, token)
        if sequence.reason:
            self._end(sequence)

    def _emit(self, sequence: Sequence, token: int) -> None:
        """Report a token, and note whether it is the last one."""
        request = sequence.request
        sequence.output.append(token)
        if token in self._eos and not request.ignore_eos:
            sequence.reason = "stop"
        elif request.handover or len(sequence.output) >= request.max_tokens:
            sequence.reason = "length"
        sequence.sink(Output(token=token, cached_tokens=sequence.cached_tokens))

    # --- the end -----------------------------------------------------------------------------------

    def _cancel(self, sequence: Sequence) -> None:
        if sequence in self._open:
            sequence.cancelled = True
            self._end(sequence)

    def _end(self, sequence: Sequence, error: MooncakeError | None = None) -> None:
        """Report the end and free the blocks, now or when the store has let go of them.

        A handover is at its end only when its blocks are stored; all others are reported at once."""
        if sequence not in self._open:
            return
        handover = sequence.request.handover and error is None and not sequence.cancelled
        if sequence.state is not State.FINISHED and not (handover and sequence.busy):
            sequence.state = State.FINISHED
            if error is not None:
                sequence.sink(Output(error=error))
            else:
                sequence.sink(Output(finish=self._finish(sequence)))
            self._counters.requests.labels("failed" if error else sequence.reason or "cancelled").inc()
        if not sequence.busy:
            self._scheduler.release(sequence)
            with self._lock:
                self._open.discard(sequence)
                if not self._open:
                    self._idle.set()

    def _finish(self, sequence: Sequence) -> Finish:
        now_s = self._clock.monotonic()
        admitted_s = sequence.admitted_s or now_s
        loaded_s = sequence.loaded_s or admitted_s
        first_s = sequence.first_token_s or now_s
        return Finish(
            reason="cancelled" if sequence.cancelled else sequence.reason,
            cached_tokens=sequence.cached_tokens,
            timing=Timing(
                queue_ms=(admitted_s - sequence.arrived_s) * 1000,
                load_ms=(loaded_s - admitted_s) * 1000,
                prefill_ms=max(0.0, first_s - loaded_s) * 1000,
                store_ms=(now_s - first_s) * 1000 if sequence.request.handover else 0.0,
            ),
        )
