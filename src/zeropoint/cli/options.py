"""The options that several commands share, and the plan that those of them ask for."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import layers
from .arguments import (
    checked_recipe,
    parse_format,
    parse_method,
    parse_path,
    parse_recipe,
    parse_scheme,
    parse_size,
    parse_workers,
    scheme_recipe,
)
from .output import note

if TYPE_CHECKING:
    from ..checkpoint.choose.selection import DequantizePolicy, Selection
    from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
    from ..checkpoint.plan.limits import Limits
    from ..codecs.protocol import Codec
    from .arguments import Asked

READ = "Checkpoint directory, .safetensors, .gguf or .onnx file, or the s3:// or gs:// URL of any of these."

Checkpoint = Annotated[str, typer.Argument(metavar="SRC", parser=parse_path, help=READ)]

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of a report.")]
Everything = Annotated[bool, typer.Option("--all", help="A line for each tensor, layers not folded.")]


class SortOrder(enum.StrEnum):
    """In which order a report lists weights; its values are those of ``report.tables.Order``."""

    FILE = "file"
    ERROR = "error"


Sort = Annotated[
    SortOrder, typer.Option("--sort", help="Order of weights: as in the files, or the largest error first.")
]
Workers = Annotated[
    int | None, typer.Option(metavar="N", parser=parse_workers, help="Threads; default: every core.")
]
Memory = Annotated[
    int | None,
    typer.Option(metavar="SIZE", parser=parse_size, help="Most memory of the process; default: 2G."),
]
To = Annotated[
    str | None,
    typer.Option(metavar="SCHEME", parser=parse_scheme, help="Preset or scheme, such as w4a16 or int4:g64."),
]
# What a parser returns is of a layer below, which typer must not ask for before the command runs.
Recipe = Annotated[
    Any,
    typer.Option(
        metavar="FILE",
        parser=parse_recipe,
        help="Rules in YAML, or a family such as llama, in place of --to.",
    ),
]
Format = Annotated[
    Any,
    typer.Option(
        "--format", metavar="FORMAT", parser=parse_format,
        help="The layout of the files, for the engines that read it; a wrong name lists them.",
    ),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", parser=parse_method,
        help="How weights are quantized: nearest (the default), ggml, hqq, mse or mse_weighted, in place "
        "of the method of a recipe.",
    ),
]  # fmt: skip
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|random", parser=parse_path,
        help="Text, token ids in .safetensors, or random tokens: shows mse_weighted, ggml and a budget which "
        "inputs are large, and gives static inputs their scales.",
    ),
]  # fmt: skip
Imatrix = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", parser=parse_path,
        help="Importance matrix of llama.cpp, .dat or GGUF, in place of --calibration.",
    ),
]  # fmt: skip
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

Force = Annotated[
    bool, typer.Option("--force", help="Write it even if no engine is known to load the result.")
]

DequantizeFirst = Annotated[
    bool, typer.Option("--dequantize-first", help="Dequantize SRC first, then quantize it.")
]
DequantizeKept = Annotated[
    bool, typer.Option("--dequantize-kept", help="Write layers that are not requantized as floats, too.")
]


def dequantized(*, first: bool, kept: bool) -> DequantizePolicy:
    """Return what becomes of layers that are quantized already."""
    if kept:
        return layers.DequantizePolicy.EVERY
    return layers.DequantizePolicy.FIRST if first else layers.DequantizePolicy.NONE


def selected(
    include: list[str] | None, ignore: list[str] | None, *, strict: bool, first: bool, kept: bool
) -> Selection:
    """Return what the options say of which tensors are quantized."""
    return layers.Selection(
        include=tuple(include or ()), ignore=tuple(ignore or ()), strict=strict,
        dequantize=dequantized(first=first, kept=kept),
    )  # fmt: skip


def planned(
    source: str, asked: Asked, selection: Selection, limits: Limits, codec: Codec | None,
    method: str | None = None,
) -> CheckpointPlan:  # fmt: skip
    """Return the plan for the checkpoint at ``source``, written by ``codec`` or the one that is usual.

    Raises typer.BadParameter for a scheme or recipe that has no meaning there, and where a plan file, which
    has a selection and a format of its own, is given another one.
    """
    if method is not None and not isinstance(asked, str | layers.RecipeText):
        raise typer.BadParameter(f"--method {method} goes with --to or --recipe; a plan has its own")
    if isinstance(asked, str | layers.RecipeText):
        codec = layers.DEFAULT if codec is None else codec
        if isinstance(asked, str):
            recipe = scheme_recipe(asked, codec)
            recipe = recipe if method is None else recipe.by(method)
        else:
            recipe = checked_recipe(asked if method is None else asked.by(method), codec)
        found = layers.open_source(source)
        return layers.make_plan(found, recipe, selection=selection, limits=limits, codec=codec)
    if selection != layers.Selection() or codec is not None:
        raise typer.BadParameter(
            "a plan has its own --format, --include, --ignore, --strict and --dequantize-...; leave them out"
        )
    return asked.remake(layers.open_source(source), limits=limits)


def important(plan: CheckpointPlan, path: str) -> CheckpointPlan:
    """Return ``plan`` with importance from a file of llama.cpp; a note says which weights have none."""
    made, missing = layers.with_importance(plan, path)
    if missing:
        found = f"{len(missing)} of {len(plan.weights)} weights have no importance in {path!r}"
        note(f"{found}, {missing[0]} the first")
    return made
