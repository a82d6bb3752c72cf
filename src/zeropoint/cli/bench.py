"""The command ``zeropoint bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..progress import bar
from . import lazy
from .arguments import parse_workers
from .options import AsJson
from .output import show, show_json


def bench(
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only kernels whose name has it, such as int4 or dequantize.")
    ] = "",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Of each kernel; the best one counts.")] = 7,
    workers: Annotated[
        int | None, typer.Option(metavar="N", parser=parse_workers, help="Threads; default: every core.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the bandwidths, an SVG picture.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a plot that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time each kernel on 4096 x 4096 values next to a copy.

    The copy is of the bytes that the kernel reads and writes. Calls write into memory that is there already.
    1.00 of a copy is as fast as memory allows.

    \b
    Examples:
      zeropoint bench
      zeropoint bench --only int4 --workers 1
      zeropoint bench --plot kernels.svg --json
    """  # noqa: D301
    with bar("timing", str) as move:
        found = lazy.kernel_speeds(
            only, rounds=rounds, threads=workers, plot=plot, overwrite=overwrite, progress=move
        )
    if as_json:
        show_json(found.to_dict())
    else:
        show(lazy.speed_table(found))
