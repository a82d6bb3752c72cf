"""The command ``zeropoint distill``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from . import lazy
from .arguments import parse_path
from .option_records import OptionRecord, given, only, with_records
from .options import Checkpoint, Display, Existing, Machine, Quantization
from .writing import Target, run_one


@dataclass(frozen=True, kw_only=True)
class Training(OptionRecord):
    """Training of scales: the data, the steps, and the order of windows."""

    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|self|random",
            parser=parse_path,
            help="Text, token ids in .safetensors, or tokens without data, to run both models on.",
        ),
    ]
    steps: Annotated[int, typer.Option(metavar="N", help="Of each block, on two windows each.")] = 40
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", help="The size of the first step, as a share of each scale.")
    ] = 0.01
    seed: Annotated[int, typer.Option(metavar="N", help="Of the order of windows.")] = 0


@with_records
def distill(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    quantized: Annotated[
        str,
        typer.Argument(metavar="QUANTIZED", parser=parse_path, help="The checkpoint that was made from SRC."),
    ],
    out: Target,
    *,
    training: Training,
    windows: Annotated[Quantization, only("samples", "length")],
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "device", "spool")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Train the scales of a quantized checkpoint against its float model.

    The outputs of its blocks come closer. Both models run on the data, a block in memory at a time. Codes
    stay, and so do all names, dtypes and shapes: engines load OUT as they load QUANTIZED. Of the scales of
    each block those with the least error of its output on held-out windows are kept, the ones of QUANTIZED
    among them. OUT is all or nothing: if the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint distill Llama-3.2-1B Llama-3.2-1B-W4A16 OUT --calibration TEXT.txt
      zeropoint distill SRC QUANTIZED OUT --calibration ids.safetensors --steps 100 --max-memory 8G
    """  # noqa: D301
    run_one(
        out,
        lambda: lazy.distill_checkpoint(
            source, quantized, out, **given(training, windows, existing, machine), progress=True
        ),
        display,
    )
