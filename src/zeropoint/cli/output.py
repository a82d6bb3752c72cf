"""Where the command line writes: one report or JSON document on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import size_of
from . import layers

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNWRAPPED = 1 << 16
"""Columns of output that is not a terminal: names are not cut, so that logs can be searched."""
_LINE_SECONDS = 60.0
"""How often a run without a terminal says how far it is; one that takes less says nothing."""
_WIDE, _BAR = 100, 20
"""Columns of a terminal from which on progress is shown in full, and those of the bar."""


class ReaderGoneError(Exception):
    """Raised when nobody reads stdout any more; no OSError, which typer would turn into a failure."""


def show(report: RenderableType) -> None:
    """Write a report to stdout; what is no terminal gets plain text, lines as long as they are."""
    console = layers.Console(highlight=False)
    with _stdout():
        if console.is_terminal:
            console.print(report)
            return
        console = layers.Console(highlight=False, width=_UNWRAPPED)
        with console.capture() as capture:
            console.print(report)
        print("\n".join(line.rstrip() for line in capture.get().splitlines()), flush=True)


def show_json(document: dict[str, Any]) -> None:
    """Write one JSON document to stdout."""
    with _stdout():
        print(json.dumps(document, indent=2, allow_nan=False), flush=True)


@contextlib.contextmanager
def _stdout() -> Iterator[None]:
    """Say what is wrong when the block cannot write to stdout."""
    try:
        yield
    except BrokenPipeError as error:
        # What is still in the buffer cannot be written, and trying again at exit would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReaderGoneError from error
    except OSError as error:
        raise OSError(f"the report cannot be written to stdout: {error.strerror}") from error


def note(sentence: str) -> None:
    """Write a note about the call itself to stderr."""
    print("note:", sentence, file=sys.stderr)


@contextlib.contextmanager
def progress(verb: str, amount: Callable[[int], str] = size_of) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on stderr while the block runs, a line now and then in a pipe; give what moves it.

    amount: how a number of what is counted is written.
    """
    console = layers.Console(stderr=True)
    if not console.is_terminal:
        yield lines(verb, time.monotonic, amount=amount)
        return
    columns = (
        layers.SpinnerColumn(),
        layers.TextColumn("{task.description}"),
        layers.BarColumn(bar_width=_BAR if console.width >= _WIDE else _BAR // 2),
        layers.TextColumn("{task.fields[done]}"),
        layers.TimeElapsedColumn(),
    )
    with layers.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(verb, total=None, done="")
        start = time.monotonic()

        def move(done: int, total: int, name: str) -> None:  # noqa: ARG001 (the signature is Progress's)
            seconds = time.monotonic() - start
            if console.width >= _WIDE:
                status = _done(done, total, seconds, amount)
            else:
                status = f"{done / max(1, total):.0%}, {_left(done, total, seconds)}"
            # A finished task stands still, but what was written must still reach the disk.
            bar.update(task, completed=min(done, total - 0.5), total=total, done=status)

        yield move


def lines(
    verb: str,
    clock: Callable[[], float],
    *,
    write: Callable[[str], object] | None = None,
    amount: Callable[[int], str] = size_of,
) -> Callable[[int, int, str], None]:
    """Return what writes a line of progress, once a minute."""
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
        return f"{amount(total)}, {_left(done, total, seconds)}"
    rate = f"{size_of(int(done / max(seconds, 1e-3)))}/s, " if amount is size_of else ""
    return f"{amount(done)} of {amount(total)} ({done / total:.0%}), {rate}{_left(done, total, seconds)}"


def _left(done: int, total: int, seconds: float) -> str:
    """Return how long a run will still take."""
    if done >= total:
        return "finishing"
    return f"about {seconds * (total - done) / max(1, done):.0f} s left"
