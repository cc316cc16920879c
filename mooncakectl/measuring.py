"""Measurements that need what this program must not load, in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from mooncaked.errors import MooncakeError, from_message


def measure(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The report that `python -m MODULE --json ARGUMENTS` prints. Raises what that could not do."""
    done = subprocess.run([sys.executable, "-m", module, "--json", *arguments], stdout=subprocess.PIPE)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError as error:
        raise MooncakeError(detail=f"the measuring process ended with {done.returncode}") from error
    if "error" in report:
        raise from_message(report["error"]["code"], report["error"]["message"], "the measuring process")
    return report
