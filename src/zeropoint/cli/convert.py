"""The command ``zeropoint convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import layers
from .options import (
    AsJson,
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
    IfExists,
    IfExistsName,
    Overwrite,
    Report,
    Restart,
    Sources,
    Spool,
    Target,
    run_each,
)

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


def convert(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Sources,
    out: Target,
    format: Format = None,  # noqa: A002 (the option's name)
    to: To = None,
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Quantize anew what cannot be kept, and report the error."),
    ] = False,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    executor: ExecutorOption = ExecutorName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    report: Report = True,
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

    def write(one: str, target: str) -> RunResult:
        return layers.convert_checkpoint(
            one, target, format, to=to, allow_requantize=allow_requantize, ignore=ignore or (), force=force,
            workers=workers, max_memory=max_memory, overwrite=overwrite, restart=restart,
            break_lock=break_lock, if_exists=if_exists.value, executor=executor.value, address=address,
            spool=spool, report=report, progress=True,
        )  # fmt: skip

    run_each(source, out, write, everything=everything, order=sort, as_json=as_json)
