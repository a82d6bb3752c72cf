"""The command ``zeropoint dequantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import lazy
from .arguments import parse_float_dtype
from .option_records import given, only, with_records
from .options import Display, Existing, Machine
from .writing import Sources, Target, run_each

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


@with_records
def dequantize(
    source: Sources,
    out: Target,
    *,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: what config.json names, or bfloat16.",
        ),
    ] = None,
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "executor", "address", "spool")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Write a quantized checkpoint as floats.

    Fp8 blocks, GGUF, and anything that zeropoint writes are read. The configuration loses what it says of
    quantization and keeps all else, byte for byte. OUT is all or nothing: if the command is interrupted, run
    it again to resume.

    \b
    Examples:
      zeropoint dequantize DeepSeek-V3 DeepSeek-V3-bf16
      zeropoint dequantize SRC OUT --dtype float32 --max-memory 1G
    """  # noqa: D301

    def write(one: str, target: str) -> RunResult:
        return lazy.dequantize_checkpoint(one, target, dtype=dtype, **given(existing, machine), progress=True)

    run_each(source, out, write, display)
