"""The command ``zeropoint kv-scales``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from . import layers
from .arguments import parse_path
from .options import AsJson, Checkpoint, Device, Everything, Length, Memory, Samples, Workers
from .writing import BreakLock, IfExists, IfExistsName, Overwrite, Restart, Target, parent_noted, show_run


def kv_scales(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    out: Target,
    calibration: Annotated[
        str,
        typer.Option(
            metavar="FILE|self",
            parser=parse_path,
            help="Text, token ids in .safetensors, or tokens that the model generates, to run the model on.",
        ),
    ],
    samples: Samples = None,
    length: Length = None,
    workers: Workers = None,
    max_memory: Memory = None,
    device: Device = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    break_lock: BreakLock = False,
    if_exists: IfExists = IfExistsName.RESUME,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Copy a quantized checkpoint and add scales for a float8 cache of keys and values, learned from data.

    The model runs on the data, a block in memory at a time. Each attention layer gets k_scale and v_scale:
    the largest magnitude of its keys, after rotary embeddings, and of its values, over 448. All other tensors
    keep their bytes. Nothing is written if some layer gets no scale. OUT is all or nothing: if the command is
    interrupted, run it again to resume.

    \b
    Examples:
      zeropoint kv-scales Llama-3.2-1B-W4A16 OUT --calibration TEXT.txt
      zeropoint kv-scales SRC OUT --calibration ids.safetensors --max-memory 8G
    """  # noqa: D301
    start = time.perf_counter()
    with parent_noted(out):
        result = layers.add_kv_scales(
            source, out, calibration, samples=samples, length=length, workers=workers,
            max_memory=max_memory, device=device, overwrite=overwrite, restart=restart,
            break_lock=break_lock, if_exists=if_exists.value, progress=True,
        )  # fmt: skip
    show_run(result, start, everything=everything, as_json=as_json)
