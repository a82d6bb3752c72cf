"""The command ``zeropoint statistics``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from . import layers
from .options import (
    AsJson,
    Calibration,
    Checkpoint,
    Device,
    Length,
    Memory,
    Samples,
    StatisticsFiles,
    Workers,
)
from .output import show, show_json


def statistics(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file: .safetensors, .gguf or .dat.")],
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    statistics: StatisticsFiles = None,
    gram: Annotated[
        bool, typer.Option("--gram", help="Gram matrices, too, which gptq and descent take.")
    ] = False,
    workers: Workers = None,
    max_memory: Memory = None,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file of statistics that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a model on data and write statistics of the inputs of its layers, from which it is quantized.

    Mean squares are those of an importance matrix; Gram matrices take features squared times 4 bytes each.
    Files of several runs are added. An importance matrix of llama.cpp, .gguf or .dat, is made of such files.

    \b
    Examples:
      zeropoint statistics MODEL gram.safetensors --calibration TEXT.txt --gram
      zeropoint statistics MODEL both.safetensors --statistics a.safetensors --statistics b.safetensors
      zeropoint statistics MODEL imatrix.gguf --statistics gram.safetensors
      zeropoint quantize MODEL OUT --to w4a16 --method gptq --statistics gram.safetensors
    """  # noqa: D301
    result = layers.gather_statistics(
        source, file, calibration, samples=samples, length=length, statistics=statistics or (), gram=gram,
        workers=workers, max_memory=max_memory, device=device, overwrite=overwrite, progress=True,
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    else:
        show(Text("\n".join(result.lines)))
