"""The command ``zeropoint rotate``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from . import layers
from .arguments import parse_float_dtype
from .options import AsJson, Checkpoint, Everything, Memory, Workers
from .writing import (
    BreakLock,
    IfExists,
    IfExistsName,
    Overwrite,
    Restart,
    Spool,
    Target,
    parent_noted,
    show_run,
)


def rotate(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    out: Target,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the random signs.")] = 0,
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Numbers of the residual stream that are mixed; default: as many as can be."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: that which each tensor has.",
        ),
    ] = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    spool: Spool = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write a checkpoint of floats as the same model in a rotated space, to quantize it from there.

    The residual stream and the values of heads are rotated by block Hadamard matrices with random signs,
    which are folded into the weights, as are those of norms: engines load an ordinary model, whose logits
    are the same but for rounding. A head that is tied to the embedding is written apart. OUT is all or
    nothing: if the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint rotate Llama-3.2-1B Llama-rotated
      zeropoint rotate SRC OUT --seed 7 --block 256 --dtype float32
    """  # noqa: D301
    start = time.perf_counter()
    with parent_noted(out):
        result = layers.rotate_checkpoint(
            source, out, seed=seed, block=block, dtype=dtype, workers=workers, max_memory=max_memory,
            overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists.value,
            spool=spool, progress=True,
        )  # fmt: skip
    show_run(result, start, everything=everything, as_json=as_json)
