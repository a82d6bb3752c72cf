"""Options of several commands, in records by their help groups."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..codecs.names import NAMES
from ..method_names import BEFORE, OF_CHECKPOINTS
from . import lazy
from .arguments import (
    parse_budget,
    parse_candidates,
    parse_device,
    parse_format,
    parse_memory,
    parse_method,
    parse_path,
    parse_plan,
    parse_recipe,
    parse_scheme,
    parse_statistic,
    parse_workers,
    path_option,
    require_recipe,
    require_scheme,
)
from .option_records import OptionRecord

READ = "Checkpoint directory, .safetensors, .gguf or .onnx file, or the s3:// or gs:// URL of any of these."

Checkpoint = Annotated[str, typer.Argument(metavar="SRC", parser=parse_path, help=READ)]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document instead of a report.")]

# What a parser returns is of a layer below, which typer must not ask for before the command runs.
Parsed = Any


class SortOrder(enum.StrEnum):
    """Order of weights in a report; values as in ``report.tables.Order``."""

    FILE = "file"
    ERROR = "error"


class QualityName(enum.StrEnum):
    """Closeness of outputs; values as in ``recipes.quality.Quality``."""

    FAST = "fast"
    GOOD = "good"
    BEST = "best"


class ImportanceName(enum.Enum):
    """Importance of layers."""

    EQUAL = "equal"
    LINEARITY = "linearity"
    DIVERGENCE = "divergence"


class IfExistsName(enum.StrEnum):
    """Treatment of an existing output; values as in ``checkpoint.call_options``."""

    RESUME = "resume"
    SKIP = "skip"
    ERROR = "error"


class ExecutorName(enum.Enum):
    """Executor of the work."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, kw_only=True)
class Content(OptionRecord):
    """What to write: the schemes, the format, and the kept layers."""

    to: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME", parser=parse_scheme, help="Preset or scheme, such as w4a16 or int4:g64."
        ),
    ] = None
    recipe: Annotated[
        Parsed,
        typer.Option(
            metavar="FILE",
            parser=parse_recipe,
            help="Rules in YAML, or a family such as llama, in place of --to.",
        ),
    ] = None
    plan: Annotated[
        Parsed,
        typer.Option(metavar="FILE", parser=parse_plan, help="A plan of `zeropoint plan`, in place of --to."),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            parser=parse_format,
            help=f"The layout of the files: {', '.join(NAMES)}. Default: the only layout with the scheme, or "
            "the first.",
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Quantize these too: a glob, or re:REGEX. Repeatable."),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Keep these as they are: a glob, or re:REGEX. Repeatable."),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Fail if a linear weight stays unquantized without an --ignore for it."
        ),
    ] = False
    fit: Annotated[
        bool, typer.Option("--fit", help="Give weights that the group does not divide a smaller group.")
    ] = False
    kv_scales: Annotated[
        bool,
        typer.Option(
            "--kv-scales", help="Write scales for a float8 cache of keys and values, too, from --calibration."
        ),
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Write it even if no engine is known to load the result.")
    ] = False
    dequantize_first: Annotated[
        bool, typer.Option("--dequantize-first", help="Dequantize SRC first, then quantize it.")
    ] = False
    dequantize_kept: Annotated[
        bool,
        typer.Option("--dequantize-kept", help="Write quantized layers of SRC that are kept as floats, too."),
    ] = False

    def require_meaning(self) -> None:
        """Raise typer.BadParameter for a scheme or recipe foreign to the format."""
        codec = lazy.codec_for(self.format, self.to)
        if self.to is not None:
            require_scheme(self.to, codec)
        if self.recipe is not None:
            require_recipe(self.recipe, codec)


@dataclass(frozen=True, kw_only=True)
class Quantization(OptionRecord):
    """How weights are quantized: the method, and its data."""

    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=parse_method,
            help=f"How weights are quantized: {', '.join(OF_CHECKPOINTS)} (default: nearest, or the "
            "method of a recipe). With --calibration, shift+gptq and shift+descent come closest for their "
            "time; shift+signround then trains the codes of each block. Steps stand before a method: "
            f"{', '.join(BEFORE)}, such as awq+mse_weighted and rotate+mse; bias stands behind it, such as "
            "gptq+bias.",
        ),
    ] = None
    quality: Annotated[
        QualityName | None,
        typer.Option(
            "--quality",
            help="The method for each scheme, in place of --method: fast needs no data; good, and best, "
            "which takes three times as long, come closer with --calibration.",
        ),
    ] = None
    calibration: Annotated[
        str | None,
        path_option(
            "What the model runs on, so that methods such as gptq learn from the inputs of layers, and "
            "static inputs get scales: a text, token ids or inputs such as pixel_values in .safetensors, "
            "random tokens, or tokens that the model generates itself.",
            metavar="FILE|random|self",
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Windows of --calibration; default: up to 128 of a file, 8 random ones, 32 of the "
            "model's own.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(metavar="L", min=1, help="Tokens of a window; default: 512, or what the model takes."),
    ] = None
    input_range: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=parse_statistic,
            help="How static inputs get their range from --calibration: minmax (the default), mse, entropy, "
            "percentile:99.9, or headroom, which leaves NVFP4 inputs room above the largest value.",
        ),
    ] = None
    imatrix: Annotated[
        str | None, path_option("Importance matrix of llama.cpp, .dat or GGUF, in place of --calibration.")
    ] = None
    statistics: Annotated[
        list[str] | None,
        path_option(
            "File of `zeropoint statistics`, in place of --calibration. Repeatable: files are added."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LayerBudget(OptionRecord):
    """A scheme for each layer: the budget, and the search within it."""

    budget: Annotated[
        Parsed,
        typer.Option(
            "--budget",
            metavar="SIZE",
            parser=parse_budget,
            help="Bits for each weight, such as 4.5bpw, or bytes of all files, such as 3.2G.",
        ),
    ] = None
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            parser=parse_candidates,
            help="With --budget: presets, schemes and keep, joined by commas; default: the usual ones.",
        ),
    ] = None
    state: Annotated[
        str | None, path_option("With --budget: file for the measurements; default: OUT.search.")
    ] = None
    importance: Annotated[
        ImportanceName,
        typer.Option(
            "--importance",
            help="With --budget: how much an error in a layer counts: the same in all (equal), or as much as "
            "noise in the layer (linearity) or its candidates (divergence) move the logits.",
        ),
    ] = ImportanceName.EQUAL
    text: Annotated[
        str | None,
        path_option(
            "With --budget: text, or token ids in .safetensors, for the model; default: random tokens."
        ),
    ] = None
    refine: Annotated[
        int,
        typer.Option(
            "--refine",
            metavar="N",
            min=0,
            help="With --budget: generations of an evolutionary search by measured divergence.",
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Existing(OptionRecord):
    """What exists already: an output, and the lock of another run."""

    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a directory that is not empty.")
    ] = False
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an interrupted run in OUT and start over.")
    ] = False
    break_lock: Annotated[
        bool, typer.Option("--break-lock", help="Remove the lock of a run that you know has died.")
    ] = False
    if_exists: Annotated[
        IfExistsName,
        typer.Option(
            "--if-exists",
            help="Where OUT holds something: resume finishes an interrupted run of this command, and "
            "compares a finished one; skip leaves a finished one as it is; error stops.",
        ),
    ] = IfExistsName.RESUME


@dataclass(frozen=True, kw_only=True)
class Machine(OptionRecord):
    """The machine: what does the work, in how much memory."""

    workers: Annotated[
        int | None, typer.Option(metavar="N", parser=parse_workers, help="Threads; default: every core.")
    ] = None
    max_memory: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=parse_memory, help="Most memory of the process; default: 2G."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            parser=parse_device,
            help="Where weights are quantized and models run on data: cpu (the default), cuda, or cuda:N.",
        ),
    ] = None
    executor: Annotated[
        ExecutorName, typer.Option("--executor", help="What does the work: this machine, or a Ray cluster.")
    ] = ExecutorName.LOCAL
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The Ray cluster; without it, the one that Ray finds or starts."
        ),
    ] = None
    spool: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Scratch directory for uploads (holds at most two files)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Display(OptionRecord):
    """What is shown: a report, a JSON document, a page."""

    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write a page about the result into OUT.")
    ] = True
    everything: Annotated[bool, typer.Option("--all", help="A line for each tensor, layers not folded.")] = (
        False
    )
    sort: Annotated[
        SortOrder,
        typer.Option("--sort", help="Order of weights: as in the files, or the largest error first."),
    ] = SortOrder.FILE
    as_json: AsJson = False
