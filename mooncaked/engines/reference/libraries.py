"""Environment variables that the math libraries read when they are loaded or first used.

Intel MKL, which torch uses on Intel processors, may sum a dot product in another order when the number of
threads or rows, or the alignment of memory, is another. Its strict mode fixes the order. It costs up to a
quarter of the decode speed and makes engines with different `--threads` compute the same bits.

OpenMP's threads wait for each other by spinning, for milliseconds. Where engines or others share the cores,
that takes the core from the very thread that is waited for: with every core wanted twice, an engine then
runs ten times slower. So they spin for microseconds, then sleep; alone on its cores it loses some 5 percent.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

_SHORT_SPIN = "2000"  # iterations, some microseconds


def ask_for_reproducible_kernels(environment: MutableMapping[str, str], processor: str) -> None:
    """Set the variable that MKL reads at its first use, unless the user has set it.

    `processor` is the text of /proc/cpuinfo. Only on Intel's own processors: elsewhere this mode falls back
    to the slowest kernels, and there fixed shapes and equal `--threads` must do."""
    if "GenuineIntel" in processor:
        environment.setdefault("MKL_CBWR", "AUTO,STRICT")


def ask_for_threads_that_yield(environment: MutableMapping[str, str]) -> None:
    """Set the variables that OpenMP reads when it is loaded, unless the user has set them."""
    if "OMP_WAIT_POLICY" not in environment:
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        environment.setdefault("GOMP_SPINCOUNT", _SHORT_SPIN)  # GNU's own goes before the other


def read_processor() -> str:
    """/proc/cpuinfo, or nothing where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def prepare() -> None:
    """Set this process up. Must run before torch is imported."""
    ask_for_reproducible_kernels(os.environ, read_processor())
    ask_for_threads_that_yield(os.environ)
