"""A progress bar over batches, on a terminal only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def counted(batches: Iterable[T], verb: str, *, shown: bool) -> Iterator[T]:
    """Yield ``batches``, under a bar on stderr that ``verb`` describes where stderr is a terminal.

    >>> list(counted([1, 2], "Calibrating", shown=True))
    [1, 2]
    """
    if not (shown and sys.stderr.isatty()):
        yield from batches
        return
    # Here, because it takes 75 ms, which programs without a terminal need not pay (rich 14).
    rich, consoles = importlib.import_module("rich.progress"), importlib.import_module("rich.console")
    with rich.Progress(console=consoles.Console(stderr=True), transient=True) as bar:
        total = len(batches) if isinstance(batches, Sized) else None
        yield from bar.track(batches, total=total, description=verb)
