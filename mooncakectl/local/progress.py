"""Progress on the terminal while something long runs.

Standard library only: set-up uses it before any package is there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

REMINDER_S = 15.0  # without a terminal, a step that takes long says so this often
_REDRAW_S = 0.2


def seconds(value: float) -> str:
    """A duration as people read it, e.g. `0.4 s` or `2 min 05 s`."""
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {int(value % 60):02d} s"


class Progress:
    """Prints one line for every step: in place with a running timer on a terminal, plainly anywhere else."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._now = now
        self._started = now()
        self._live = self._stream.isatty()

    def total_s(self) -> float:
        """Seconds since this object was made."""
        return self._now() - self._started

    def note(self, text: str) -> None:
        """Print a line of its own."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show `text` while the body runs, then how long it took, or that it failed."""
        began, done = self._now(), threading.Event()
        ticker = threading.Thread(target=self._tick, args=(text, began, done), daemon=True)
        ticker.start()
        outcome = "failed after"
        try:
            yield
            outcome = "done in"
        finally:
            done.set()
            ticker.join()
            clear = "\r\x1b[K" if self._live else ""
            self.note(f"{clear}  {text}: {outcome} {seconds(self._now() - began)}")

    def _tick(self, text: str, began: float, done: threading.Event) -> None:
        if not self._live:
            self.note(f"  {text} ...")
        while not done.wait(_REDRAW_S if self._live else REMINDER_S):
            passed = seconds(self._now() - began)
            if self._live:
                self._stream.write(f"\r\x1b[K  {text} ... {passed}")
                self._stream.flush()
            else:
                self.note(f"  {text} ... {passed}")
