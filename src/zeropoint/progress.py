"""Progress on stderr: a bar where possible, else lines by minute.

What works tells how far it is by a function (:data:`Progress`); what that does, the caller chooses.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from .errors import size_of

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and the name of what was done last."""
Bar = Callable[[str, Callable[[int], str]], contextlib.AbstractContextManager[Progress]]
"""Shows how far a part of a job is: takes its verb, and how a number of what it counts is written."""
_LINE_SECONDS = 60.0
"""How often a run without a terminal says how far it is; one that takes less says nothing."""
_WIDE, _BAR = 100, 20
"""Least columns of a terminal for full progress, and columns of the bar."""


def bars(given: bool | Progress) -> Bar:
    """Return the requested progress display: bars, a caller's function, or nothing.

    >>> with bars(print)("quantizing", size_of) as move:
    ...     move(1, 2, "a.weight")
    1 2 a.weight
    """
    if given is True:
        return bar
    if not callable(given):
        return silent
    return lambda *_: contextlib.nullcontext(given)


@contextlib.contextmanager
def silent(verb: str, amount: Callable[[int], str]) -> Iterator[Progress]:  # noqa: ARG001 (as a bar)
    """Show nothing."""
    yield lambda *_: None


@contextlib.contextmanager
def bar(verb: str, amount: Callable[[int], str] = size_of) -> Iterator[Progress]:
    """Show a bar on stderr in the context, lines in pipes.

    amount: how a number of what is counted is written.
    """
    console = _console()
    if not (console.is_terminal or console.is_jupyter):
        yield lines(verb, time.monotonic, amount=amount)
        return
    rich = importlib.import_module("rich.progress")
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
        rich.BarColumn(bar_width=_BAR if console.width >= _WIDE else _BAR // 2),
        rich.TextColumn("{task.fields[done]}"),
        rich.TimeElapsedColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(verb, total=None, done="")
        start = time.monotonic()

        def move(done: int, total: int, name: str) -> None:  # noqa: ARG001 (the signature is Progress's)
            seconds = time.monotonic() - start
            if console.width >= _WIDE:
                status = _done(done, total, seconds, amount)
            else:
                status = f"{done / max(1, total):.0%}{_left(done, total, seconds, amount)}"
            # A finished task stands still, but what was written must still reach the disk.
            shown.update(task, completed=min(done, total - 0.5), total=total, done=status)

        yield move


def _console() -> Any:
    # Here, because it takes 75 ms, which programs without progress need not pay (rich 14).
    return importlib.import_module("rich.console").Console(stderr=True)


def lines(
    verb: str,
    clock: Callable[[], float],
    *,
    write: Callable[[str], object] | None = None,
    amount: Callable[[int], str] = size_of,
) -> Progress:
    """Return a writer of progress lines, one a minute."""
    start = clock()
    due = start + _LINE_SECONDS

    def move(done: int, total: int, name: str) -> None:  # noqa: ARG001 (the signature is Progress's)
        nonlocal due
        now = clock()
        if now >= due:
            due = now + _LINE_SECONDS
            (write or sys.stderr.write)(f"{verb}: {_done(done, total, now - start, amount)}\n")

    return move


def _done(done: int, total: int, seconds: float, amount: Callable[[int], str]) -> str:
    """Return how far a run is, in the same units throughout."""
    if done >= total:
        return f"{amount(total)}{_left(done, total, seconds, amount)}"
    rate = f", {size_of(int(done / max(seconds, 1e-3)))}/s" if amount is size_of else ""
    share = f"{amount(done)} of {amount(total)} ({done / total:.0%})"
    return f"{share}{rate}{_left(done, total, seconds, amount)}"


def _left(done: int, total: int, seconds: float, amount: Callable[[int], str]) -> str:
    """Return the remaining time of a byte run, as text."""
    if done >= total:
        return ", finishing"
    return f", about {seconds * (total - done) / max(1, done):.0f} s left" if amount is size_of else ""


def counted(batches: Iterable[T], verb: str, *, shown: bool) -> Iterator[T]:
    """Yield ``batches``, under a bar on terminals and in notebooks.

    >>> list(counted([1, 2], "Calibrating", shown=True))
    [1, 2]
    """
    console = _console() if shown else None
    if console is None or not (console.is_terminal or console.is_jupyter):
        yield from batches
        return
    rich = importlib.import_module("rich.progress")
    with rich.Progress(console=console, transient=True) as shown_bar:
        total = len(batches) if isinstance(batches, Sized) else None
        yield from shown_bar.track(batches, total=total, description=verb)
