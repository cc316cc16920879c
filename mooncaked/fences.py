"""Barriers between processes: `membarrier`, with which one side pays for the ordering that both need.

A reader says in shared memory what it looks at, and then checks that it is still there. A writer takes it
away, and then looks whether somebody has said so. One of the two must see the other's store; but a processor
may carry out a load before an earlier store is visible to others, so each side needs a barrier between its
own. The reader does this for every value, the writer seldom: so the writer alone calls `barrier`, which makes
every thread of every registered process that runs at that moment go through a full barrier. (One that does
not run went through one when it was taken off its processor.)
"""

from __future__ import annotations

import ctypes
import platform

_CALL = {"x86_64": 324}.get(platform.machine())
_QUERY, _GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 0, 1 << 1, 1 << 2

_libc = ctypes.PyDLL(None)  # keeps the interpreter lock: the call takes a few microseconds
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int)


def _membarrier(command: int) -> int:
    return -1 if _CALL is None else int(_libc.syscall(_CALL, command, 0, 0))


def can_fence() -> bool:
    """Whether this machine's kernel has what `barrier` and `register` need, and lets this process use it."""
    supported = _membarrier(_QUERY)
    both = _GLOBAL_EXPEDITED | _REGISTER_GLOBAL_EXPEDITED
    return supported >= 0 and supported & both == both and barrier()


def register() -> bool:
    """Let barriers of other processes reach this one; whether it worked. May be called again."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED) == 0


def barrier() -> bool:
    """Every thread of every registered process goes through a full barrier; whether it worked."""
    return _membarrier(_GLOBAL_EXPEDITED) == 0
