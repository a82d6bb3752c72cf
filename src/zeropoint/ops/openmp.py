"""The threads of torch's own OpenMP runtime, lent to kernels of ours.

After each operator of torch its threads wait for the next one in a loop, for milliseconds. Threads of ours
would have to share the processors with them: kernels after an operator took twice as long. So the team that
waits does the work. ``GOMP_parallel`` is the entry that compilers call for ``#pragma omp parallel``; GNU's,
LLVM's and Intel's runtimes export it on Linux. Compiled code calls it, so that no thread waits for Python.
Elsewhere there is no team, nor on processors other than x86-64, whose mode of computing with subnormals a
kernel would have to set in another way.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from pathlib import Path

import torch

_HOME = os.getpid()


@functools.lru_cache(maxsize=1)
def openmp_team() -> int:
    """Return the address of torch's ``GOMP_parallel``, or 0."""
    if os.getpid() != _HOME or platform.machine() != "x86_64":
        return 0  # a forked child inherits the runtime, but none of its threads
    try:
        # A symbol is looked for in what the library depends on, so that it is the runtime that torch uses.
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(parallel, ctypes.c_void_p).value or 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=openmp_team.cache_clear)
