"""Named places at which a test lets a durable step go wrong: crash there, or see an error of the disk.

In production nothing is armed and a failpoint costs one look at an empty dict. They are armed by `arm`, or by
`MOONCAKE_FAILPOINTS=name=action,name=action@3` in the environment (not `MOONCAKED_`, whose names are keys of
the configuration) of a process that calls `arm_from_environment`. An action is `crash` (SIGKILL to itself, so
that nothing is tidied up), `exit`, or the lower-case name of an errno: `enospc`, `eio`, `erofs`. With `@n` it
acts from the n-th time on.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping

VARIABLE = "MOONCAKE_FAILPOINTS"

NAMES = frozenset(  # every one that there is, so that a test can crash at each
    {
        "journal.flush.before_write",
        "journal.flush.after_write",
        "journal.commit.before_header",
        "journal.commit.after_header",
        "journal.compact.before_summary",
        "journal.compact.after_summary",
        "journal.compact.before_truncate",
        "journal.compact.before_switch",
        "journal.compact.after_switch",
        "ssd.manifest.before_write",
        "ssd.manifest.before_sync",
        "ssd.manifest.before_rename",
        "ssd.manifest.before_directory_sync",
        "ssd.segment.before_allocate",
        "ssd.segment.before_directory_sync",
        "ssd.segment.before_open",
        "ssd.commit.before_write",
        "ssd.commit.between_writes",
        "ssd.commit.before_sync",
        "ssd.commit.before_publish",
        "ssd.seal.before_write",
        "ssd.seal.before_sync",
        "ssd.seal.after_sync",
        "ssd.reclaim.before_carry",
        "ssd.reclaim.before_drop",
        "ssd.reclaim.before_mark",
        "ssd.reclaim.before_sync",
        "ssd.reclaim.after_sync",
        "ssd.shrink.before_unlink",
    }
)

_armed: dict[str, Callable[[], None]] = {}


def failpoint(name: str) -> None:
    """Do nothing, unless a test armed `name`."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


def arm(name: str, action: Callable[[], None] | str) -> None:
    """Let `failpoint(name)` call `action`, or do what its name says; raises `ValueError` for
    names that are none."""
    if name not in NAMES:
        raise ValueError(f"{name!r} is no failpoint")
    _armed[name] = _named(action) if isinstance(action, str) else action


def disarm() -> None:
    """Make every failpoint do nothing again."""
    _armed.clear()


def arm_from_environment(environment: Mapping[str, str]) -> None:
    """Arm what `MOONCAKE_FAILPOINTS` in `environment` asks for; raises `ValueError` for nonsense."""
    for pair in filter(None, environment.get(VARIABLE, "").split(",")):
        name, _, action = pair.partition("=")
        arm(name.strip(), action.strip())


def _named(text: str) -> Callable[[], None]:
    what, _, count = text.partition("@")
    number = getattr(errno, what.upper(), None)
    if what not in ("crash", "exit") and not isinstance(number, int):
        raise ValueError(f"{what!r} is no action of a failpoint")
    left = int(count or 1)

    def act() -> None:
        nonlocal left
        left -= 1
        if left > 0:
            return
        if what == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            os._exit(1)
        raise OSError(number, os.strerror(number or 0))

    return act
