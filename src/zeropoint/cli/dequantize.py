"""The command ``zeropoint dequantize``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from . import layers
from .arguments import parse_float_dtype
from .options import AsJson, Checkpoint, Everything, Memory, Workers
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


def dequantize(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
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
    unlock: BreakLock = False,
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
    start = time.perf_counter()
    selection = layers.Selection(dequantize=layers.DequantizePolicy.EVERY, floats=dtype)
    limits = layers.Limits.default(workers, max_memory)
    plan = layers.make_plan(layers.open_source(source), layers.KEEP, selection=selection, limits=limits)
    way = Way(
        overwrite=overwrite, restart=restart, break_lock=unlock, spool=spool,
        executor=executor_of(executor, address),
    )  # fmt: skip
    show_run(write(plan, out, way, "dequantizing"), start, everything=everything, as_json=as_json)
