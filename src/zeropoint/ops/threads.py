"""How many threads an operator may use: torch's setting, or less inside a worker that shares the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch

_LIMIT: ContextVar[int | None] = ContextVar("zeropoint_threads", default=None)
_POOLS: dict[int, ThreadPoolExecutor] = {}
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


def over_rows(rows: int, elements: int, work: Callable[[int, int], int | None]) -> int:
    """Call ``work(first, last)`` for disjoint runs of rows and return the largest result.

    Several threads share the runs when it pays, which changes no result: rows are independent.
    """
    threads = min(thread_count(), rows, max(1, elements // WORTH_A_THREAD))
    if threads <= 1:
        return work(0, rows) or 0
    cuts = [rows * n // threads for n in range(threads + 1)]
    pool = _POOLS.setdefault(threads, ThreadPoolExecutor(threads, thread_name_prefix="zeropoint"))
    tasks = [pool.submit(work, a, b) for a, b in pairwise(cuts[1:])]
    results = [work(0, cuts[1]), *(task.result() for task in tasks)]
    return max(result or 0 for result in results)
