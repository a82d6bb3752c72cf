"""The command ``zeropoint report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import lazy
from .arguments import parse_path
from .options import READ, AsJson
from .output import show, show_json


def report(
    path: Annotated[str, typer.Argument(metavar="RUN", parser=parse_path, help=READ)],
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="OTHER", parser=parse_path, help="Checkpoints to show next to it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="The page; default: RUN.html next to RUN."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about a checkpoint.

    It has sizes, errors, the worst layers and why, codes, and every layer. The page is one file that needs no
    network. Errors are those that quantize wrote into the manifest; some rows of each layer are decoded for
    the histograms of codes. Several checkpoints stand side by side.

    \b
    Examples:
      zeropoint report MODEL-w4a16
      zeropoint report MODEL-w4a16 MODEL-mxfp4 model-Q4_K_M.gguf -o report.html
      zeropoint report MODEL-w4a16 --json
    """  # noqa: D301
    page = out if out is not None or as_json else lazy.page_of(path)
    found = lazy.report_checkpoint(path, others=others or (), out=page, overwrite=overwrite)
    if as_json:
        show_json(found.to_dict())
    else:
        show(found.on_screen())
