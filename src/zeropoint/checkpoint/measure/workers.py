"""Worker threads over ordered tasks; the first failing task's error is raised.

Tasks are handed out in order and each one handed out runs to its end, so of several failing tasks the
earliest is always among those that ran. What a task finds out it keeps in itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from ...errors import CheckpointError
from ...ops.devices import CPU, pinned
from ...ops.threads import thread_limit
from .tiles import Scratch

_POLL_SECONDS = 0.2
"""Longest sleep of the caller's thread, so that Ctrl-C is felt on every platform."""
_AHEAD = 1024
"""Tasks that may begin before the caller has taken in the first of them, so that results do not pile up."""


class Stopped(Exception):  # noqa: N818 (not an error: it ends a task that waits for one that failed)
    """Raised inside a task that cannot finish because the run is over."""


class Task:
    """A piece of work: override :meth:`run`. ``name`` and ``nbytes`` are for progress."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes

    def run(self, scratch: Scratch) -> None:
        """Do the work with a thread's own memory."""
        raise NotImplementedError


T = TypeVar("T", bound=Task)


def done_tasks(
    tasks: Iterable[T],
    *,
    workers: int,
    buffer_bytes: int,
    stop: threading.Event | None = None,
    device: torch.device = CPU,
) -> Generator[T, None, None]:
    """Run ``tasks`` on ``workers`` threads; yield each when it is done.

    buffer_bytes: memory of each thread. tasks: each is taken when a thread is free for it, so a
    generator's need not exist at once. stop: is set when no task will be begun any more, for tasks that wait
    for others. device: of the threads' :class:`.tiles.Scratch`. Raises the error of the first task, in their
    order, that failed, after all threads have ended. Closing the generator, or an exception in the caller's
    thread (Ctrl-C), also ends all threads before it continues.
    """
    crew = _Crew(tasks, buffer_bytes, stop or threading.Event(), device)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(workers, thread_name_prefix="zeropoint") as pool:
        try:
            threads = _started(pool, crew, workers)
            yield from _follow(crew.events, workers, crew.taken)
        finally:
            crew.stop.set()
            torch.set_num_threads(before)
    errors = {crew.at[slot]: thread.exception() for slot, thread in enumerate(threads)}
    failed = sorted(index for index, e in errors.items() if e is not None and not isinstance(e, Stopped))
    first = errors[failed[0]] if failed else None
    if isinstance(first, RuntimeError) and "allocate memory" in str(first):
        raise MemoryError(str(first)) from first  # how torch says it
    if first is not None:
        raise first


def _started(pool: ThreadPoolExecutor, crew: _Crew[T], workers: int) -> list[Future[None]]:
    try:
        return [pool.submit(crew.work, slot) for slot in range(workers)]
    except RuntimeError as error:
        raise CheckpointError(
            f"{workers} threads cannot be started: {error}; use fewer workers, or raise `ulimit -u`"
        ) from error


class _Crew(Generic[T]):
    """Shared state of the threads of a run: tasks, events, stop signal."""

    def __init__(
        self, tasks: Iterable[T], buffer_bytes: int, stop: threading.Event, device: torch.device
    ) -> None:
        self.stop = stop
        self.events: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.at: dict[int, int] = {}
        self._todo = iter(enumerate(tasks))
        self._guard = threading.Lock()
        self._ahead = threading.Semaphore(_AHEAD)
        self._buffer_bytes, self._device = buffer_bytes, device

    def taken(self) -> None:
        """Let another task begin, after the caller used a result."""
        self._ahead.release()

    def work(self, slot: int) -> None:
        """Run tasks until none is left or one fails; record their numbers."""
        # torch's own threads would compete with ours, and its sums depend on their number.
        torch.set_num_threads(1)
        self.at[slot] = -1 - slot
        finished = False
        try:
            scratch = Scratch(bytearray(self._buffer_bytes), self._device)
            with pinned(scratch.buffer, self._device), thread_limit(1), torch.inference_mode():
                while not self.stop.is_set():
                    if not self._ahead.acquire(timeout=_POLL_SECONDS):
                        continue
                    with self._guard:
                        index, task = next(self._todo, (None, None))
                    if index is None or task is None:
                        break
                    self.at[slot] = index
                    task.run(scratch)
                    self.events.put(task)
            finished = True
        finally:
            if not finished:
                self.stop.set()
            self.events.put(None)


def _follow(events: queue.SimpleQueue[T | None], running: int, taken: Callable[[], None]) -> Iterator[T]:
    """Yield finished tasks until all threads end, and call ``taken`` after each."""
    while running:
        try:
            event = events.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if event is None:
            running -= 1
        else:
            yield event
            taken()
