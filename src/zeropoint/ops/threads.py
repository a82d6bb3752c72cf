"""How many threads an operator may use: torch's setting, or less inside a worker that shares the machine."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import pairwise

import torch

from .openmp import openmp_team

_LIMIT: ContextVar[int | None] = ContextVar("zeropoint_threads", default=None)
_POOLS: dict[int, ThreadPoolExecutor] = {}
_AS_IT_IS = nullcontext()
# From bits: reading it as decimals would already flush it in a thread that does.
_SUBNORMAL: float = struct.unpack("<d", (1).to_bytes(8, "little"))[0]
WORTH_A_THREAD = 1 << 17
"""Elements below which handing work to another thread costs more than it saves (about 50 microseconds)."""


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


def _flushes() -> bool:
    """Whether this thread flushes subnormal numbers to zero."""
    return _SUBNORMAL * 1.0 == 0.0


def gradual_underflow() -> AbstractContextManager[None]:
    """Compute with subnormal numbers inside the block, whatever mode the thread is in.

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


def over_rows(rows: int, elements: int, work: Callable[[int, int], int | None]) -> int:
    """Call ``work(first, last)`` for disjoint runs of rows and return the largest result.

    Several threads share the runs when it pays, which changes no result: rows are independent. What a run
    raises is raised when all that began have ended.
    """

    def run(first: int, last: int) -> int:
        with gradual_underflow():
            return work(first, last) or 0

    threads = thread_count()
    parts = min(threads, rows, max(1, elements // WORTH_A_THREAD))
    if parts <= 1:
        return run(0, rows)
    todo = deque(pairwise(rows * n // parts for n in range(parts + 1)))
    results, errors = list[int](), _Errors()

    def member() -> None:
        with errors:
            while (part := _next_of(todo)) is not None:
                results.append(run(*part))

    team = openmp_team() or _pool_team
    team(threads, member)
    if errors:
        raise errors[0]
    return max(results)


class _Errors(list[BaseException]):
    """Keeps what its block raises, on whatever thread, for the caller to raise."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is not None:
            self.append(error)
        return True


def _next_of(todo: deque[tuple[int, int]]) -> tuple[int, int] | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


def _pool_team(threads: int, member: Callable[[], None]) -> None:
    """Run ``member`` on threads of Python, the calling one among them."""
    pool = _POOLS.get(threads) or _POOLS.setdefault(
        threads, ThreadPoolExecutor(threads, thread_name_prefix="zeropoint")
    )
    others = [pool.submit(member) for _ in range(threads - 1)]
    member()
    for other in others:
        other.result()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOLS.clear)  # the child has none of their threads
