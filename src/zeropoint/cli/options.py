"""The options that several commands share, and the plan that those of them ask for."""

from __future__ import annotations

from typing import Annotated

import typer

from ..checkpoint.limits import Limits
from ..checkpoint.plan import Plan, make_plan
from ..checkpoint.recipe import RecipeText
from ..checkpoint.selection import Dequantize, Selection
from ..checkpoint.source import open_source
from .values import Asked, parse_recipe, parse_scheme, parse_size, parse_workers

READ = "Checkpoint directory, .safetensors file, or the s3:// or gs:// URL of either."

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of a report.")]
Everything = Annotated[bool, typer.Option("--all", help="A line for each tensor, layers not folded.")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", parser=parse_workers, help="Threads; default: every core.")
]
Memory = Annotated[
    int | None,
    typer.Option(metavar="SIZE", parser=parse_size, help="Most memory of the process; default: 2G."),
]
To = Annotated[
    RecipeText | None,
    typer.Option(metavar="SCHEME", parser=parse_scheme, help="Preset or scheme, such as w4a16 or int4:g64."),
]
Recipe = Annotated[
    RecipeText | None,
    typer.Option(metavar="FILE", parser=parse_recipe, help="Rules in YAML, in place of --to."),
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Quantize these too: a glob, or re:REGEX. Repeatable."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Keep these as they are: a glob, or re:REGEX. Repeatable."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Fail if a linear weight stays unquantized without an --ignore for it."),
]

DequantizeFirst = Annotated[
    bool, typer.Option("--dequantize-first", help="Dequantize SRC first, then quantize it.")
]
DequantizeKept = Annotated[
    bool, typer.Option("--dequantize-kept", help="Write layers that are not requantized as floats, too.")
]


def dequantized(*, first: bool, kept: bool) -> Dequantize:
    """Return what becomes of layers that are quantized already."""
    if kept:
        return Dequantize.EVERY
    return Dequantize.FIRST if first else Dequantize.NONE


def planned(source: str, asked: Asked, selection: Selection, limits: Limits) -> Plan:
    """Return the plan for the checkpoint at ``source``.

    Raises typer.BadParameter where a plan file, which has a selection of its own, is given another one.
    """
    if isinstance(asked, RecipeText):
        return make_plan(open_source(source), asked, selection=selection, limits=limits)
    if selection != Selection():
        raise typer.BadParameter(
            "a plan has its own --include, --ignore, --strict and --dequantize-...; leave them out"
        )
    return asked.remake(open_source(source), limits=limits)
