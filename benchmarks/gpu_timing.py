"""What the benchmarks on a GPU share: times by its clock, and comparisons of bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Calls = list[Callable[[], object]]
REPLAYS = 9


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors, on any devices, have the same bytes."""
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8).cpu() for x in (a, b)))


def _timed(run: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def captured(calls: Calls) -> Callable[[], None]:
    """Return the replay of a CUDA graph of all calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def replayed(calls: Calls, *, graph: bool = True) -> float:
    """Return the median seconds of a call, of all of them in turns, in a CUDA graph or without one."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    run = captured(calls) if graph else lambda: [call() for call in calls]
    run()
    return statistics.median(_timed(run) for _ in range(REPLAYS)) / len(calls)


def in_turns(calls: Calls, seconds: float, *, least: int, most: int) -> float:
    """Return the median seconds of a call; the calls take turns, for ``seconds`` or ``least`` calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        times.append(_timed(calls[len(times) % len(calls)]))
    return statistics.median(times)
