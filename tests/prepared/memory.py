"""How much memory a call takes, as torch's allocator and Python's see it."""

import gc
import tracemalloc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def tensor_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of all tensors that ``run`` takes from torch's allocator of host memory, freed or not.

    The profiler hears of each request, also of those inside an operator; views and memory of numpy are none.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = record.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def python_bytes(run: Callable[[], object]) -> int:
    """Return by how many bytes Python's objects and numpy's arrays grow at most during ``run``.

    The least of three calls: other threads of this process, as those of the test runner, can only add.
    """
    return min(_python_bytes(run) for _ in range(3))


def _python_bytes(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - before


def held_bytes(run: Callable[[], object]) -> int:
    """Return the bytes of tensors, objects and arrays that ``run`` leaves behind."""
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            gc.collect()
            first, _ = tracemalloc.get_traced_memory()
            run()
            gc.collect()
            last, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    events = record.profiler.kineto_results.events()
    return last - first + sum(event.nbytes() for event in events if event.name() == "[memory]")
