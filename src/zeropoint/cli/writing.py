"""Where and how ``quantize`` writes: a directory or a URL, by threads or on a Ray cluster."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import layers
from .arguments import parse_output
from .options import SortOrder
from .output import note, progress, show, show_json

if TYPE_CHECKING:
    from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
    from ..checkpoint.run.executor import Executor
    from ..checkpoint.run.loop import RunResult


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How an output is written; each part is an option of the command."""

    overwrite: bool
    restart: bool
    break_lock: bool
    spool: Path | None
    executor: Executor


def executor_of(name: ExecutorName, address: str | None) -> Executor:
    """Return the executor of this name.

    Raises typer.BadParameter for an address of the local executor.
    """
    if name is ExecutorName.RAY:
        return layers.RayExecutor(address=address)
    if address is not None:
        raise typer.BadParameter(f"--address {address} is that of a Ray cluster; pass --executor ray too")
    return layers.local


def write(plan: CheckpointPlan, out: str, way: Way, verb: str) -> RunResult:
    """Carry out a plan, with its progress under ``verb``.

    Raises typer.BadParameter for options that mean nothing for this kind of output.
    """
    target = layers.place(out)
    if isinstance(target, layers.RemotePath):
        if way.overwrite or way.break_lock:
            option = "--overwrite" if way.overwrite else "--break-lock"
            raise typer.BadParameter(
                f"objects behind a URL are neither overwritten nor locked; leave {option} out"
            )
    elif way.spool is not None:
        raise typer.BadParameter("--spool is for an output behind a URL; leave it out")
    absent = isinstance(target, Path) and not target.parent.exists()
    if isinstance(target, Path) and way.break_lock:
        layers.break_lock(target)
    with progress(verb) as on_progress:
        result = layers.run(
            plan, target, overwrite=way.overwrite, spool=way.spool, restart=way.restart,
            executor=way.executor, on_progress=on_progress,
        )  # fmt: skip
    if absent:  # most likely meant, but a mistake in a path would look the same
        note(f"the directory {str(target.parent)!r} did not exist and was created")
    return result


def show_run(
    result: RunResult, start: float, *, everything: bool, as_json: bool, order: SortOrder = SortOrder.FILE
) -> None:
    """Show the report of a run that began at ``start``, of the clock ``time.perf_counter``."""
    seconds = time.perf_counter() - start
    if as_json:
        show_json({**result.to_dict(), "seconds": seconds})
    else:
        show(layers.run_report(result, seconds=seconds, everything=everything, order=layers.Order(order)))
