"""The command ``zeropoint convert``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .option_records import given, only, with_records
from .options import Content, Display, Existing, Machine
from .writing import Sources, Target, run_each

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


@with_records
def convert(  # noqa: PLR0913 (arguments, and records of options)
    source: Sources,
    out: Target,
    *,
    content: Annotated[Content, only("to", "format", "ignore", "force")],
    allow_requantize: Annotated[
        bool,
        typer.Option("--allow-requantize", help="Quantize anew what cannot be kept, and report the error."),
    ] = False,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "executor", "address", "spool")],
    display: Display,
) -> None:
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
        return lazy.convert_checkpoint(
            one,
            target,
            **given(content),
            allow_requantize=allow_requantize,
            **given(existing, machine),
            report=display.report,
            progress=True,
        )

    run_each(source, out, write, display)
