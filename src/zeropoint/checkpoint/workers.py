"""Worker threads over an ordered list of tasks, of whose failures the first in that order is raised.

Tasks are handed out in order and each one handed out runs to its end, so of several failing tasks the
earliest is always among those that ran.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ..ops.threads import thread_limit

Progress = Callable[[int, int, str], None]
"""Called in the caller's thread with (bytes done, bytes in all, name of the tensor)."""

_POLL_SECONDS = 0.2
"""How long the caller's thread sleeps at most, so that Ctrl-C is felt on every platform."""


class Stopped(Exception):  # noqa: N818 (not an error: it ends a task that waits for one that failed)
    """Raised inside a task that cannot finish because the run is over."""


class Task:
    """A piece of work: override :meth:`run`. ``name`` and ``nbytes`` are for progress."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes

    def run(self, buffer: bytearray, stop: threading.Event) -> None:
        """Do the work with a thread's own buffer."""
        raise NotImplementedError


def run_tasks(
    tasks: Sequence[Task], *, workers: int, buffer_bytes: int, on_progress: Progress | None = None
) -> None:
    """Run ``tasks`` on ``workers`` threads, each with a buffer of ``buffer_bytes``.

    Raises the error of the first task, in their order, that failed, after all threads have ended. An
    exception in the caller's thread (Ctrl-C, or one of ``on_progress``) also ends all threads before it goes
    on.
    """
    total = sum(task.nbytes for task in tasks)
    todo = iter(enumerate(tasks))
    guard, stop = threading.Lock(), threading.Event()
    events: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
    failures: dict[int, BaseException] = {}

    def work() -> None:
        # torch's own threads would compete with ours, and its sums depend on their number.
        torch.set_num_threads(1)
        buffer = bytearray(buffer_bytes)
        with thread_limit(1), torch.inference_mode():
            while not stop.is_set():
                with guard:
                    index, task = next(todo, (-1, None))
                if task is None:
                    break
                try:
                    task.run(buffer, stop)
                except Stopped:
                    pass
                except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                    failures[index] = error
                    stop.set()
                events.put((task.nbytes, task.name))
        events.put(None)

    before = torch.get_num_threads()
    threads = [threading.Thread(target=work, name=f"zeropoint-{n}", daemon=True) for n in range(workers)]
    try:
        for thread in threads:
            thread.start()
        _follow(events, len(threads), total, on_progress)
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        torch.set_num_threads(before)
    if failures:
        raise failures[min(failures)]


def _follow(
    events: queue.SimpleQueue[tuple[int, str] | None], running: int, total: int, on_progress: Progress | None
) -> None:
    done = 0
    while running:
        try:
            event = events.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if event is None:
            running -= 1
            continue
        done += event[0]
        if on_progress is not None:
            on_progress(done, total, event[1])
