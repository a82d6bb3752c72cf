"""The command ``zeropoint statistics``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from . import lazy
from .option_records import given, only, with_records
from .options import AsJson, Checkpoint, Machine, Quantization
from .output import show, show_json


@with_records
def statistics(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file: .safetensors, .gguf or .dat.")],
    *,
    data: Annotated[Quantization, only("calibration", "samples", "length", "statistics")],
    gram: Annotated[
        bool, typer.Option("--gram", help="Write Gram matrices, too, which gptq and descent need.")
    ] = False,
    machine: Annotated[Machine, only("workers", "max_memory", "device", "executor", "address")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing file of statistics.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write statistics of the inputs of layers to a file.

    The model runs on the data once; commands with --statistics then quantize without data. The file has the
    mean square of each input, as llama.cpp's importance matrices do, and with --gram the Gram matrix of each
    layer: its features squared, times 4 bytes. Several files are added. A FILE that ends in .gguf or .dat
    becomes an importance matrix of llama.cpp.

    \b
    Examples:
      zeropoint statistics MODEL gram.safetensors --calibration TEXT.txt --gram
      zeropoint statistics MODEL both.safetensors --statistics a.safetensors --statistics b.safetensors
      zeropoint statistics MODEL gram.safetensors --calibration TEXT.txt --executor ray --address HEAD:6379
      zeropoint statistics MODEL imatrix.gguf --statistics gram.safetensors
      zeropoint quantize MODEL OUT --to w4a16 --method gptq --statistics gram.safetensors
    """  # noqa: D301
    result = lazy.gather_statistics(
        source, file, **given(data), gram=gram, **given(machine), overwrite=overwrite, progress=True
    )
    if as_json:
        show_json(result.to_dict())
    else:
        show(Text("\n".join(result.lines)))
