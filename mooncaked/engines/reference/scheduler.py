"""What runs in the next step. Pure: sequences in, decisions out; the engine executes them.

A sequence gets all the KV blocks that it can ever need before it starts, so nothing that runs has to be
thrown out again; those that do not fit wait, first come first served. Each step computes one chunk of the
oldest unfinished prompt and one token for every sequence that generates: so the time between tokens stays
bounded by one chunk, however long a prompt is.
"""

from __future__ import annotations

from collections import deque

import msgspec

from mooncaked.engines.reference.kv_cache import BlockAllocator
from mooncaked.engines.reference.sequence import Sequence, State, kv_tokens
from mooncaked.errors import IntegrityError


class Chunk(msgspec.Struct, frozen=True):
    """One chunk of one prompt to compute."""

    sequence: Sequence
    number: int  # of the chunk in its prompt
    end: int  # prompt tokens that are computed after it

    @property
    def last(self) -> bool:
        """Whether the prompt is complete with it."""
        return self.end == self.sequence.prompt_tokens


class Step(msgspec.Struct, frozen=True):
    """One pass of the engine; either part may be empty."""

    chunk: Chunk | None
    decode: list[Sequence]


class Scheduler:
    """Waiting and running sequences, and who gets KV blocks."""

    def __init__(
        self, allocator: BlockAllocator, *, block_tokens: int, chunk_tokens: int, running_max: int
    ) -> None:
        self._allocator = allocator
        self._block_tokens = block_tokens
        self._chunk_tokens = chunk_tokens
        self._running_max = running_max
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # hold blocks; oldest first

    def blocks_needed(self, sequence: Sequence) -> int:
        """KV blocks for the whole life of `sequence`."""
        return -(-kv_tokens(sequence.request) // self._block_tokens)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence in the queue. The caller has checked that it fits into the cache at all."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Give blocks to waiting sequences as far as there are any; those that now run, as LOADING."""
        admitted = []
        while self.waiting and len(self.running) < self._running_max:
            table = self._allocator.allocate(self.blocks_needed(self.waiting[0]))
            if table is None:
                break
            sequence = self.waiting.popleft()
            sequence.table, sequence.state = table, State.LOADING
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def loaded(self, sequence: Sequence, tokens: int) -> None:
        """The first `tokens` tokens of the prompt have their KV from the store: decide what is left to do.

        Computing goes on at a chunk border. The last token must be computed for its logits, unless the first
        token of the answer is there already."""
        prompt = sequence.prompt_tokens
        if sequence.request.first_token is not None and tokens == prompt:
            sequence.computed, sequence.state = prompt, State.DECODE
        else:
            usable = min(tokens, prompt - 1)
            sequence.computed = usable - usable % self._chunk_tokens
            sequence.state = State.PREFILL
        sequence.cached_tokens = sequence.computed

    def next_step(self) -> Step:
        """What to run now."""
        chunk = next((self._chunk(s) for s in self.running if s.state is State.PREFILL), None)
        return Step(chunk, [s for s in self.running if s.state is State.DECODE])

    def _chunk(self, sequence: Sequence) -> Chunk:
        number = sequence.computed // self._chunk_tokens
        return Chunk(sequence, number, min(sequence.prompt_tokens, (number + 1) * self._chunk_tokens))

    def release(self, sequence: Sequence) -> None:
        """`sequence` has ended, maybe before it began, and nothing uses its blocks any more."""
        sequence.state = State.FINISHED
        if sequence in self.running:
            self.running.remove(sequence)
            self._allocator.free(sequence.table)
            sequence.table = []
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` when blocks are lost, or shared by two sequences."""
        self._allocator.check_integrity()
        held = [block for sequence in self.running for block in sequence.table]
        used = self._allocator.total - self._allocator.free_blocks
        if len(set(held)) != len(held) or len(held) != used:
            detail = f"{len(held)} blocks held by {len(self.running)} sequences, {used} in use"
            raise IntegrityError(what="the engine's scheduler", detail=detail)
