"""Output of commands: a report or document on stdout, notes on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import lazy

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNWRAPPED = 1 << 16
"""Columns of output that is not a terminal: names are not cut, so that logs can be searched."""


class ReaderGoneError(Exception):
    """Raised when nobody reads stdout; no OSError, which typer catches."""


def show(report: RenderableType) -> None:
    """Write a report to stdout, unwrapped plain text outside a terminal."""
    console = lazy.Console(highlight=False)
    with _stdout():
        if console.is_terminal:
            console.print(report)
            return
        console = lazy.Console(highlight=False, width=_UNWRAPPED)
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
