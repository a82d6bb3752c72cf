"""The threads of torch's own OpenMP runtime, lent to work of ours.

After each operator of torch its threads wait for the next one in a loop, for milliseconds. Threads of ours
would have to share the processors with them: kernels after an operator took twice as long. So the team that
waits does the work. ``GOMP_parallel`` is the entry that compilers call for ``#pragma omp parallel``; GNU's,
LLVM's and Intel's runtimes export it on Linux. Elsewhere there is no team.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch

Team = Callable[[int, Callable[[], None]], None]
"""Runs a function on so many threads at most, the calling one among them, and returns when all have ended."""

_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RUNNING: dict[int, Callable[[], None]] = {}
_NUMBERS = itertools.count(1)
_HOME = os.getpid()


@functools.lru_cache(maxsize=1)
def openmp_team() -> Team | None:
    """Return torch's team, or None where torch has none that can be called."""
    if os.getpid() != _HOME:
        return None  # a forked child inherits the runtime, but none of its threads
    try:
        # A symbol is looked for in what the library depends on, so that it is the runtime that torch uses.
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [_MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def run(threads: int, member: Callable[[], None]) -> None:
        number = next(_NUMBERS)
        _RUNNING[number] = member
        try:
            parallel(_CALL, number, threads, 0)
        finally:
            del _RUNNING[number]

    return run


def _run(number: int) -> None:
    _RUNNING[number]()


_CALL = _MEMBER(_run)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=openmp_team.cache_clear)
