"""The command ``zeropoint distill``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from . import lazy
from .arguments import parse_path, path_option
from .option_records import OptionRecord, given, only, with_records
from .options import Checkpoint, Display, Existing, Machine, Quantization
from .writing import Target, run_one


@dataclass(frozen=True, kw_only=True)
class Training(OptionRecord):
    """Training of scales: the data, the steps, and the order of windows."""

    calibration: Annotated[
        str,
        path_option(
            "What both models run on: a text, token ids or inputs such as pixel_values in .safetensors, "
            "random tokens, or tokens that the float model generates.",
            metavar="FILE|self|random",
        ),
    ]
    steps: Annotated[
        int, typer.Option(metavar="N", help="Training steps of each block, on two windows each.")
    ] = 40
    learning_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Size of the first step, relative to each scale.")
    ] = 0.01
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the order of windows.")] = 0


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

    Both models run on the data, a block in memory at a time, and training brings the outputs of each
    quantized block closer to the float block's. Only values of scales change: engines load OUT as they load
    QUANTIZED. Each block keeps the scales with the least error on held-out windows, which may be those it
    had. OUT is all or nothing: if the command is interrupted, run it again to resume.

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
