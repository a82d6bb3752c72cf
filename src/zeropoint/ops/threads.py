"""Threads of operators: counts, and the team of torch's own OpenMP runtime.

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
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path

import torch

_HOME = os.getpid()
_LIMIT: ContextVar[int | None] = ContextVar("zeropoint_threads", default=None)
_POOLS: dict[int, ThreadPoolExecutor] = {}
_AS_IT_IS = nullcontext()
# From bits: reading it as decimals would already flush it in a thread that does.
_SUBNORMAL: float = struct.unpack("<d", (1).to_bytes(8, "little"))[0]
WORTH_A_THREAD = 1 << 17
"""Elements that a thread must have: fewer take less time than a thread that sleeps needs to wake up."""


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


@contextmanager
def thread_limit(count: int) -> Iterator[None]:
    """Use at most ``count`` threads for each operator inside the block."""
    token = _LIMIT.set(count)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def thread_count() -> int:
    """Return how many threads an operator may use here."""
    limit = _LIMIT.get()
    return torch.get_num_threads() if limit is None else max(1, limit)


def is_limited() -> bool:
    """Whether this worker shares the machine and memory with others."""
    return _LIMIT.get() is not None


def _flushes() -> bool:
    """Whether this thread flushes subnormal numbers to zero."""
    return _SUBNORMAL * 1.0 == 0.0


def gradual_underflow() -> AbstractContextManager[None]:
    """Compute with subnormal numbers inside the context, in any thread mode.

    torch.set_flush_denormal, or a library built with fast-math, sets the mode of a thread; scales and
    quotients below 2 ** -126 would then become zero, and other bytes be written.
    """
    return _unflushed() if _flushes() else _AS_IT_IS


@contextmanager
def _unflushed() -> Iterator[None]:
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


def parts_for(rows: int, elements: int) -> int:
    """Return the number of thread-worthy parts of rows."""
    return min(thread_count(), rows, max(1, elements // WORTH_A_THREAD))


def share(kernel: Callable[..., int], args: tuple[object, ...], rows: int, elements: int) -> int:
    """Call ``kernel(*args, first, last, parts, team)`` over rows; return the largest result.

    Several threads share the rows when it pays, which changes no result: rows are independent. The kernel
    has the team compute that many parts of the rows. Where there is none, threads of Python
    call it, each for a part of the rows.
    """
    parts = parts_for(rows, elements) if elements >= 2 * WORTH_A_THREAD else min(rows, 1)
    team = openmp_team() if parts > 1 else 0
    if parts > 1 and not team:
        return _share_in_pool(kernel, args, rows, parts)
    if not _flushes():
        return kernel(*args, 0, rows, parts, team)
    with _unflushed():
        return kernel(*args, 0, rows, parts, team)


def _share_in_pool(kernel: Callable[..., int], args: tuple[object, ...], rows: int, parts: int) -> int:
    """Share rows among Python threads; raise an error after all end."""

    def run(n: int) -> int:
        with gradual_underflow():
            return kernel(*args, rows * n // parts, rows * (n + 1) // parts, 1, 0)

    pool = _POOLS.get(parts) or _POOLS.setdefault(
        parts, ThreadPoolExecutor(parts, thread_name_prefix="zeropoint")
    )
    runs = [pool.submit(run, n) for n in range(parts)]
    wait(runs)
    return max(done.result() for done in runs)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOLS.clear)  # the child has none of their threads
