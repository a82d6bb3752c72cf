"""The command ``zeropoint rotate``."""

from __future__ import annotations

from typing import Annotated

import typer

from . import lazy
from .arguments import parse_float_dtype
from .option_records import given, only, with_records
from .options import Checkpoint, Display, Existing, Machine
from .writing import Target, run_one


@with_records
def rotate(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    out: Target,
    *,
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
            metavar="DTYPE",
            parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: that which each tensor has.",
        ),
    ] = None,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "spool")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Write a float checkpoint as the same model in a rotated space.

    The result is then quantized. The residual stream and the values of heads are rotated by block
    Hadamard matrices with random signs, which are folded into the weights, as norms' weights are: engines
    load an ordinary model, whose logits are the same but for rounding. A head that is tied to the embedding
    is written apart. OUT is all or nothing: if the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint rotate Llama-3.2-1B Llama-rotated
      zeropoint rotate SRC OUT --seed 7 --block 256 --dtype float32
    """  # noqa: D301
    run_one(
        out,
        lambda: lazy.rotate_checkpoint(
            source, out, seed=seed, block=block, dtype=dtype, **given(existing, machine), progress=True
        ),
        display,
    )
