"""The command ``zeropoint kv-scales``."""

from __future__ import annotations

from typing import Annotated

import typer

from . import lazy
from .arguments import parse_path
from .option_records import given, only, with_records
from .options import Checkpoint, Display, Existing, Machine, Quantization
from .writing import Target, run_one


@with_records
def kv_scales(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    out: Target,
    *,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|self",
            parser=parse_path,
            help="Text, token ids in .safetensors, or tokens that the model generates, to run the model on.",
        ),
    ],
    windows: Annotated[Quantization, only("samples", "length")],
    existing: Existing,
    machine: Annotated[Machine, only("workers", "max_memory", "device")],
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Add scales for a float8 cache of keys and values.

    The quantized checkpoint is copied, and the scales are learned from data. The model runs on the data, a
    block in memory at a time. Each attention layer gets k_scale and v_scale: the largest magnitude of its
    keys, after rotary embeddings, and of its values, over 448. All other tensors keep their bytes. Nothing is
    written if some layer gets no scale. OUT is all or nothing: if the command is interrupted, run it again to
    resume.

    \b
    Examples:
      zeropoint kv-scales Llama-3.2-1B-W4A16 OUT --calibration TEXT.txt
      zeropoint kv-scales SRC OUT --calibration ids.safetensors --max-memory 8G
    """  # noqa: D301
    run_one(
        out,
        lambda: lazy.add_kv_scales(
            source, out, calibration, **given(windows, existing, machine), progress=True
        ),
        display,
    )
