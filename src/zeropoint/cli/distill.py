"""The command ``zeropoint distill``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from . import layers
from .arguments import parse_path
from .options import AsJson, Checkpoint, Device, Everything, Length, Memory, Samples, Workers
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


def distill(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    quantized: Annotated[
        str,
        typer.Argument(metavar="QUANTIZED", parser=parse_path, help="The checkpoint that was made from SRC."),
    ],
    out: Target,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|self|random",
            parser=parse_path,
            help="Text, token ids in .safetensors, or tokens without data, to run both models on.",
        ),
    ],
    steps: Annotated[int, typer.Option(metavar="N", help="Of each block, on two windows each.")] = 40,
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", help="The size of the first step, as a share of each scale.")
    ] = 0.01,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of windows.")] = 0,
    samples: Samples = None,
    length: Length = None,
    workers: Workers = None,
    max_memory: Memory = None,
    device: Device = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    spool: Spool = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Train the scales of a quantized checkpoint, so that its blocks come closer to those of the float model.

    Both models run on the data, a block in memory at a time. Codes stay, and so do all names, dtypes and
    shapes: engines load OUT as they load QUANTIZED. Of the scales of each block those with the least error of
    its output on held-out windows are kept, the ones of QUANTIZED among them. OUT is all or nothing: if the
    command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint distill Llama-3.2-1B Llama-3.2-1B-W4A16 OUT --calibration TEXT.txt
      zeropoint distill SRC QUANTIZED OUT --calibration ids.safetensors --steps 100 --max-memory 8G
    """  # noqa: D301
    start = time.perf_counter()
    with parent_noted(out):
        result = layers.distill_checkpoint(
            source, quantized, out, calibration, steps=steps, learning_rate=learning_rate, seed=seed,
            samples=samples, length=length, workers=workers, max_memory=max_memory, device=device,
            overwrite=overwrite, restart=restart, break_lock=break_lock, if_exists=if_exists.value,
            spool=spool, progress=True,
        )  # fmt: skip
    show_run(result, start, everything=everything, as_json=as_json)
