"""The command ``zeropoint plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import require_one
from . import lazy
from .option_records import given, only, with_records
from .options import Checkpoint, Content, Display, Machine, Quantization
from .output import show, show_json


def _show_schema(wanted: bool) -> None:
    if wanted:
        show_json(lazy.recipe_schema())
        raise typer.Exit


_CONTENT = only(
    *("to", "recipe", "format", "include", "ignore", "strict", "fit", "kv_scales"),
    *("dequantize_first", "dequantize_kept"),
)


@with_records
def plan(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    *,
    content: Annotated[Content, _CONTENT],
    quantization: Annotated[Quantization, only("method", "quality")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the plan to a new file, for quantize --plan.")
    ] = None,
    machine: Annotated[Machine, only("workers", "max_memory")],
    display: Annotated[Display, only("everything", "as_json")],
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
    """Show what quantize would do.

    Each tensor's action and reason, outputs, sizes, memory and engines are shown. Nothing is read but
    headers, and nothing is written but FILE.

    \b
    Examples:
      zeropoint plan MODEL --to w4a16
      zeropoint plan MODEL --to w4a16 --quality good
      zeropoint plan MODEL --to w4a16 --fit
      zeropoint plan MODEL --recipe mixed.yaml --strict
      zeropoint plan MODEL --to mxfp4 --out plan.json
      zeropoint quantize MODEL OUT --plan plan.json
    """  # noqa: D301 (click's mark for a paragraph that keeps its lines)
    require_one(to=content.to, recipe=content.recipe)
    content.require_meaning()
    found = lazy.plan_checkpoint(source, out=out, **given(content, quantization, machine))
    if display.as_json:
        show_json(found.to_dict())
    else:
        show(lazy.plan_report(found, everything=display.everything))
