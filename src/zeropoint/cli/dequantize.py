"""The command ``zeropoint dequantize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import layers
from .arguments import parse_float_dtype
from .options import AsJson, Everything, Memory, Workers
from .writing import (
    Address,
    BreakLock,
    ExecutorName,
    ExecutorOption,
    IfExists,
    IfExistsName,
    Overwrite,
    Restart,
    Sources,
    Spool,
    Target,
    run_each,
)

if TYPE_CHECKING:
    from ..checkpoint.run.loop import RunResult


def dequantize(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Sources,
    out: Target,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", parser=parse_float_dtype,
            help="bfloat16, float16 or float32; default: what config.json names, or bfloat16.",
        ),
    ] = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    executor: ExecutorOption = ExecutorName.LOCAL,
    address: Address = None,
    spool: Spool = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write a quantized checkpoint as floats: fp8 blocks, GGUF, or anything that zeropoint writes.

    The configuration loses what it says of quantization and keeps all else, byte for byte. OUT is all or
    nothing: if the command is interrupted, run it again to resume.

    \b
    Examples:
      zeropoint dequantize DeepSeek-V3 DeepSeek-V3-bf16
      zeropoint dequantize SRC OUT --dtype float32 --max-memory 1G
    """  # noqa: D301

    def write(one: str, target: str) -> RunResult:
        return layers.dequantize_checkpoint(
            one, target, dtype=dtype, workers=workers, max_memory=max_memory, overwrite=overwrite,
            restart=restart, break_lock=break_lock, if_exists=if_exists.value, executor=executor.value,
            address=address, spool=spool,
            progress=True,
        )  # fmt: skip

    run_each(source, out, write, everything=everything, as_json=as_json)
