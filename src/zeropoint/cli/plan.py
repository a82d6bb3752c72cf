"""The command ``zeropoint plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import require_one
from . import layers
from .options import (
    AsJson,
    Checkpoint,
    DequantizeFirst,
    DequantizeKept,
    Everything,
    Fit,
    Format,
    Ignore,
    Include,
    Memory,
    Method,
    Quality,
    Recipe,
    Strict,
    To,
    Workers,
    require_meaning,
)
from .output import show, show_json


def _show_schema(wanted: bool) -> None:
    if wanted:
        show_json(layers.recipe_schema())
        raise typer.Exit


def plan(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    to: To = None,
    recipe: Recipe = None,
    format: Format = None,  # noqa: A002 (the option's name)
    method: Method = None,
    quality: Quality = None,
    include: Include = None,
    ignore: Ignore = None,
    strict: Strict = False,
    fit: Fit = False,
    dequantize_first: DequantizeFirst = False,
    dequantize_kept: DequantizeKept = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to a new file, for quantize --plan.")
    ] = None,
    workers: Workers = None,
    max_memory: Memory = None,
    everything: Everything = False,
    as_json: AsJson = False,
    schema: Annotated[  # noqa: ARG001 (its callback is all that it does)
        bool,
        typer.Option(
            "--schema",
            is_eager=True,
            callback=_show_schema,
            help="Write the JSON Schema of recipes and exit.",
        ),
    ] = False,
) -> None:
    """Show what quantize would do: each tensor's action and reason, outputs, sizes, memory, engines.

    Nothing is read but headers, and nothing is written but FILE.

    \b
    Examples:
      zeropoint plan MODEL --to w4a16
      zeropoint plan MODEL --to w4a16 --quality good
      zeropoint plan MODEL --to w4a16 --fit
      zeropoint plan MODEL --recipe mixed.yaml --strict
      zeropoint plan MODEL --to mxfp4 --out plan.json
      zeropoint quantize MODEL OUT --plan plan.json
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    require_one(to=to, recipe=recipe)
    require_meaning(to, recipe, format)
    made = layers.plan_checkpoint(
        source, to, recipe=recipe, format=format, method=method,
        quality=None if quality is None else quality.value, include=include or (), ignore=ignore or (),
        strict=strict, fit=fit, dequantize_first=dequantize_first, dequantize_kept=dequantize_kept, out=out,
        workers=workers, max_memory=max_memory,
    )  # fmt: skip
    if as_json:
        show_json(made.to_dict())
    else:
        show(layers.plan_report(made, everything=everything))
