"""Where the command line writes: one report or JSON document on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..checkpoint.workers import Progress as OnProgress


class ReaderGoneError(Exception):
    """Raised when nobody reads stdout any more; no OSError, which typer would turn into a failure."""


def show(report: RenderableType) -> None:
    """Write a report to stdout; a pipe gets plain text without spaces at the ends of lines."""
    console = Console(highlight=False)
    with _stdout():
        if console.is_terminal:
            console.print(report)
            return
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


def fail(message: str) -> None:
    """Write one line to stderr, whatever the message holds."""
    print("error:", " ".join(message.split()), file=sys.stderr)


@contextlib.contextmanager
def progress(verb: str) -> Iterator[OnProgress | None]:
    """Show a bar on stderr while the block runs, and give the callback that moves it; None in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    done = DownloadColumn(binary_units=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        done,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total, _name: bar.update(task, completed=done, total=total)
