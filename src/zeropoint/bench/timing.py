"""Fair timing on a busy machine: interleaved rounds next to a copy.

Absolute times move with the neighbors; a ratio holds when both of its sides were measured in the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SLOW_SECONDS = 0.2
"""A function that takes longer runs in the first rounds only: its best is as good, and time is saved."""
SLOW_ROUNDS = 3


def in_turns(
    work: dict[str, Callable[[], object]], rounds: int, *, slow_seconds: float = SLOW_SECONDS
) -> dict[str, list[float]]:
    """Return the seconds of every call, with functions interleaved round by round.

    One untimed round comes first (page faults, compilation). Nobody runs twice in a row, so that nobody finds
    its own data in the cache; the order moves, so that nobody always follows the same neighbor.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    slow = {name for name, call in work.items() if _seconds(call) > slow_seconds}
    names = list(work)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name not in slow or turn < SLOW_ROUNDS:
                seconds[name].append(_seconds(work[name]))
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    result = call()
    end = time.perf_counter()
    del result  # freeing belongs to nobody's time
    return end - begin


class Copies:
    """Plain copies of up to ``largest`` bytes, between two buffers in memory."""

    def __init__(self, largest: int) -> None:
        self._source = torch.ones(largest, dtype=torch.uint8)
        self._target = torch.zeros(largest, dtype=torch.uint8)

    def of(self, nbytes: int) -> Callable[[], object]:
        """Return a call that moves ``nbytes`` bytes, half read, half written."""
        source, target = self._source[: nbytes // 2], self._target[: nbytes // 2]
        return lambda: target.copy_(source)

    def into_new_memory(self, nbytes: int) -> Callable[[], object]:
        """Return the same copy into a new tensor, as for allocating operators."""
        source = self._source[: nbytes // 2]
        return source.clone
