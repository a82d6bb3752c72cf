"""What a second thread can add on this machine: `python benchmarks/scaling.py [--threads 2]`.

Processors that a system lists may be two threads of one core. Those share its arithmetic units: a loop that
keeps them busy, on numbers in the first cache, then runs hardly faster on two threads than on one, while a
copy that waits for memory does. Kernels with more arithmetic than a copy cannot follow it there.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from numba import njit

ROUNDS = 15
NUMBERS, PASSES = 2048, 40_000
"""8 KiB of float32 for each thread, and how often a round goes over them: some milliseconds."""
COPIED = 1 << 25
"""Bytes of a copy: more than caches hold."""


@njit(nogil=True)
def _arithmetic(numbers: np.ndarray, passes: int) -> None:
    for _ in range(passes):
        for i in range(len(numbers)):
            x = numbers[i]
            y = (x * np.float32(0.75) + np.float32(1.0)) * x - np.float32(0.5)
            numbers[i] = (y * np.float32(0.25) + x) * np.float32(0.5)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def scaling(threads: int) -> dict[str, float]:
    """Return how many times as fast as one ``threads`` are at arithmetic and at a copy: medians of rounds."""
    own = [np.full(NUMBERS, 0.5, np.float32) for _ in range(threads)]
    source, target = torch.ones(COPIED, dtype=torch.uint8), torch.zeros(COPIED, dtype=torch.uint8)
    before = torch.get_num_threads()

    def together() -> None:
        crew = [threading.Thread(target=_arithmetic, args=(numbers, PASSES)) for numbers in own]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()

    def copied(count: int) -> float:
        torch.set_num_threads(count)
        return _seconds(lambda: target.copy_(source))

    _arithmetic(own[0], 1)
    copied(threads)
    arithmetic, copies = [], []
    try:
        for _ in range(ROUNDS):
            alone = _seconds(lambda: _arithmetic(own[0], PASSES))
            arithmetic.append(threads * alone / _seconds(together))
            copies.append(copied(1) / copied(threads))
    finally:
        torch.set_num_threads(before)
    return {"arithmetic": statistics.median(arithmetic), "copy": statistics.median(copies)}


def told(threads: int, factors: dict[str, float]) -> str:
    """Return the factors as a sentence."""
    return (
        f"{threads} threads do arithmetic {factors['arithmetic']:.2f} times and copies "
        f"{factors['copy']:.2f} times as fast as one"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    print(told(threads, scaling(threads)))


if __name__ == "__main__":
    main()
