"""An engine in this process, and its answers as values."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from mooncaked.clock import SystemClock
from mooncaked.engines.reference.instance import Parts, build
from mooncaked.engines.reference.kv_store import BlockClient
from mooncaked.engines.reference.model_files import LoadedModel, load_model
from mooncaked.engines.reference.options import Options
from mooncaked.engines.reference.sequence import Finish, GenerationRequest, Output, Sequence
from mooncaked.errors import MooncakeError

WAIT_S = 60.0


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(path, dtype=getattr(torch, dtype), device="cpu")


def options(**changes: Any) -> Options:
    """Small blocks and chunks, so that short prompts have several."""
    base = Options(
        model=Path("tiny"),
        model_name="tiny",
        instance_id="test",
        block_tokens=4,
        chunk_tokens=8,
        kv_memory=4 << 20,
        batch_max=12,
        threads=2,
    )
    return msgspec.structs.replace(base, **changes)


@dataclass
class Answer:
    """What one request gave, as it comes in."""

    news: queue.SimpleQueue[Output] = field(default_factory=queue.SimpleQueue)
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: MooncakeError | None = None
    sequence: Sequence | None = None

    def next(self) -> Output:
        """The next piece of news."""
        output = self.news.get(timeout=WAIT_S)
        if output.token is not None:
            self.tokens.append(output.token)
        self.finish, self.error = output.finish, output.error
        return output

    def wait(self) -> Answer:
        """Until the end."""
        while self.finish is None and self.error is None:
            self.next()
        return self


class Running:
    """An engine that steps. Close it."""

    def __init__(self, model: LoadedModel, client: BlockClient | None = None, **changes: Any) -> None:
        self.options = options(**changes)
        self.parts: Parts = build(self.options, model, client, SystemClock())
        self.engine = self.parts.engine
        self.engine.start()

    def submit(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Answer:
        answer = Answer()
        request = GenerationRequest(request_id="r", prompt=prompt, max_tokens=max_tokens, **fields)
        answer.sequence = self.engine.submit(request, answer.news.put)
        return answer

    def run(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Answer:
        return self.submit(prompt, max_tokens, **fields).wait()

    def settle(self) -> None:
        """Wait until the blocks of all requests that have ended are stored."""
        assert self.engine._idle.wait(WAIT_S)

    def on_step_thread(self, action: Callable[[], Any]) -> Any:
        """The result of `action`, run between two steps."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.engine._inbox.put(lambda: done.put(action()))
        return done.get(timeout=WAIT_S)

    def check_idle(self) -> None:
        """Nothing is left over from requests that have ended."""
        assert self.engine.drain(WAIT_S)
        self.on_step_thread(self.parts.scheduler.check_integrity)
        assert not self.parts.scheduler.running
        assert not self.parts.scheduler.waiting

    def close(self) -> None:
        if self.engine.alive:
            self.engine.close()
        if self.parts.store is not None:
            self.parts.store.close()
        assert not [t for t in threading.enumerate() if t.name == "steps" and t is self.engine._thread]
