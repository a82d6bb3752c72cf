"""The options that several commands share."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..codecs.names import NAMES
from . import layers
from .arguments import (
    parse_device,
    parse_format,
    parse_memory,
    parse_method,
    parse_path,
    parse_recipe,
    parse_scheme,
    parse_workers,
    require_recipe,
    require_scheme,
)

if TYPE_CHECKING:
    from ..checkpoint.choose.recipe import RecipeText

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
    typer.Option(metavar="SIZE", parser=parse_memory, help="Most memory of the process; default: 2G."),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", parser=parse_device,
        help="Where weights are quantized and models run on data: cpu (the default), cuda, or cuda:N.",
    ),
]  # fmt: skip
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
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", parser=parse_format,
        help=f"The layout of the files: {', '.join(NAMES)}. Default: the only layout with the scheme, or "
        "the first.",
    ),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", parser=parse_method,
        help="How weights are quantized: nearest (the default), adaround, descent, ggml, gptq, hqq, mse, "
        "mse_weighted or signround, in place of the method of a recipe. With --calibration, shift+gptq and "
        "shift+descent come closest for their time; shift+signround then trains the codes of each block. "
        "Steps stand before a method: awq, equalize, magr, rotate, shift and smooth, such as "
        "awq+mse_weighted and rotate+mse; bias stands behind it, such as gptq+bias.",
    ),
]  # fmt: skip


class QualityName(enum.StrEnum):
    """How close outputs are to come; its values are those of ``recipes.quality.Quality``."""

    FAST = "fast"
    GOOD = "good"
    BEST = "best"


Quality = Annotated[
    QualityName | None,
    typer.Option(
        "--quality",
        help="The method for each scheme, in place of --method: fast needs no data; good, and best, which "
        "takes three times as long, come closer with --calibration.",
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|random|self", parser=parse_path,
        help="Text, token ids in .safetensors, random tokens, or those that the model generates: shows gptq, "
        "mse_weighted, ggml and a budget what inputs are like, and gives static inputs their scales.",
    ),
]  # fmt: skip
Samples = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1,
        help="Windows of --calibration; default: up to 128 of a file, 8 random ones, 32 of the model's own.",
    ),
]  # fmt: skip
Length = Annotated[
    int | None,
    typer.Option(metavar="L", min=1, help="Tokens of a window; default: 512, or what the model takes."),
]
Imatrix = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", parser=parse_path,
        help="Importance matrix of llama.cpp, .dat or GGUF, in place of --calibration.",
    ),
]  # fmt: skip
StatisticsFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--statistics", metavar="FILE", parser=parse_path,
        help="File of `zeropoint statistics`, in place of --calibration. Repeatable: files are added.",
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


def require_meaning(to: str | None, recipe: RecipeText | None, format: str | None) -> None:  # noqa: A002 (the option's name)
    """Raise typer.BadParameter for a scheme or recipe that has no meaning in files of a format."""
    codec = layers.codec_for(format, to)
    if to is not None:
        require_scheme(to, codec)
    if recipe is not None:
        require_recipe(recipe, codec)
