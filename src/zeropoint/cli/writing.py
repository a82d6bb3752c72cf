"""Where and how commands write: a directory or a URL, by threads or on a Ray cluster."""

from __future__ import annotations

import contextlib
import enum
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import layers
from .arguments import parse_output
from .options import SortOrder
from .output import note, show, show_json

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


SkipFinished = Annotated[
    bool,
    typer.Option("--skip-finished", help="Leave OUT as it is where its manifest says that this run is done."),
]


Report = Annotated[bool, typer.Option("--report/--no-report", help="Write a page about the result into OUT.")]


class ExecutorName(enum.Enum):
    """What does the work."""

    LOCAL = "local"
    RAY = "ray"


Target = Annotated[
    str,
    typer.Argument(metavar="OUT", parser=parse_output, help="Directory, or s3:// or gs:// URL, to write."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a directory that is not empty.")]
Restart = Annotated[bool, typer.Option("--restart", help="Discard an interrupted run in OUT and start over.")]
BreakLock = Annotated[
    bool, typer.Option("--break-lock", help="Remove the lock of a run that you know has died.")
]
ExecutorOption = Annotated[
    ExecutorName, typer.Option("--executor", help="What does the work: this machine, or a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The Ray cluster; without it, the one that Ray finds or starts."),
]
Spool = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Scratch directory for uploads (holds at most two files)."),
]


@contextlib.contextmanager
def parent_noted(out: str) -> Iterator[None]:
    """Write a note when the block made the directory of an output: a mistake would look the same."""
    target = layers.place(out)
    absent = isinstance(target, Path) and not target.parent.exists()
    yield
    if absent and isinstance(target, Path):
        note(f"the directory {str(target.parent)!r} did not exist and was created")


def show_run(
    result: RunResult, start: float, *, everything: bool, as_json: bool, order: SortOrder = SortOrder.FILE
) -> None:
    """Show the report of a run that began at ``start``, of the clock ``time.perf_counter``."""
    seconds = time.perf_counter() - start
    if as_json:
        show_json({**result.to_dict(), "seconds": seconds})
    else:
        show(layers.run_report(result, seconds=seconds, everything=everything, order=layers.Order(order)))
        if result.page is not None and sys.stdout.isatty():
            note(f"{result.page} has the report")
