"""The command ``zeropoint convert``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from . import layers
from .options import (
    AsJson,
    Checkpoint,
    Everything,
    Force,
    Format,
    Ignore,
    Memory,
    Sort,
    SortOrder,
    To,
    Workers,
)
from .writing import (
    Address,
    BreakLock,
    ExecutorName,
    ExecutorOption,
    Overwrite,
    Restart,
    Spool,
    Target,
    Way,
    executor_of,
    show_run,
    write,
)


def convert(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    out: Target,
    format: Format = None,  # noqa: A002 (the option's name)
    to: To = None,
    requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Quantize anew what cannot be kept, and report the error."),
    ] = False,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    unlock: BreakLock = False,
    executor: ExecutorOption = ExecutorName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    force: Force = False,
    everything: Everything = False,
    sort: Sort = SortOrder.FILE,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write a quantized checkpoint in another file layout, without quantizing it again.

    Each value stays what it was: what was written is decoded and compared, and a layer that the layout
    cannot hold is refused with the reason. --to names another scheme, such as nvfp4a16 for MXFP4, or
    bfloat16, float16 or float32 for floats. OUT is all or nothing: if the command is interrupted, run it
    again to resume.

    \b
    Examples:
      zeropoint convert Llama-AWQ OUT --format FORMAT
      zeropoint convert SRC-MXFP4 OUT --format FORMAT --to nvfp4a16
      zeropoint convert SRC OUT --format FORMAT --to q4_1 --allow-requantize
      zeropoint convert MODEL.gguf OUT --to bfloat16
    """  # noqa: D301
    start = time.perf_counter()
    if format is None and to not in layers.FLOATS:
        raise typer.BadParameter("--format names the layout to write; give one, or --to bfloat16 for floats")
    plan = layers.conversion_plan(
        layers.open_source(source), to, layers.DEFAULT if format is None else format, requantize=requantize,
        ignore=tuple(ignore or ()), limits=layers.Limits.default(workers, max_memory),
    )  # fmt: skip
    if plan.weights and not force:
        layers.require_loadable(plan)
    way = Way(
        overwrite=overwrite, restart=restart, break_lock=unlock, spool=spool,
        executor=executor_of(executor, address),
    )  # fmt: skip
    show_run(write(plan, out, way, "converting"), start, everything=everything, order=sort, as_json=as_json)
