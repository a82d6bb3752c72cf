"""The command ``zeropoint search``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import layers
from .arguments import parse_budget, parse_candidates, parse_path
from .options import (
    AsJson,
    Calibration,
    Checkpoint,
    DequantizeFirst,
    Device,
    Everything,
    Format,
    Ignore,
    Imatrix,
    Include,
    Length,
    Memory,
    Method,
    Samples,
    StatisticsFiles,
    Workers,
)
from .output import note, show, show_json


class ImportanceName(enum.Enum):
    """How much layers matter."""

    EQUAL = "equal"
    LINEARITY = "linearity"
    DIVERGENCE = "divergence"


BudgetOption = Annotated[
    Any,
    typer.Option(
        "--budget", metavar="SIZE", parser=parse_budget,
        help="Bits for each weight, such as 4.5bpw, or bytes of all files, such as 3.2G.",
    ),
]  # fmt: skip
Candidates = Annotated[
    str | None,
    typer.Option(
        metavar="NAMES", parser=parse_candidates,
        help="With --budget: presets, schemes and keep, joined by commas; default: the usual ones.",
    ),
]  # fmt: skip
State = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", parser=parse_path,
        help="With --budget: file for the measurements; default: OUT.search.",
    ),
]  # fmt: skip
ImportanceOption = Annotated[
    ImportanceName,
    typer.Option(
        "--importance",
        help="With --budget: layers matter equally, as noise in each moves the logits, or as candidates do.",
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="FILE", parser=parse_path,
        help="With --budget: text, or token ids in .safetensors, for the model; default: random tokens.",
    ),
]  # fmt: skip
RefineOption = Annotated[
    int,
    typer.Option(
        "--refine", metavar="N", min=0,
        help="With --budget: generations of an evolution by measured divergence.",
    ),
]  # fmt: skip


def search(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    budget: BudgetOption,
    candidates: Candidates = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe to a new file.")
    ] = None,
    state: State = None,
    format: Format = None,  # noqa: A002 (the option's name)
    method: Method = None,
    importance: ImportanceOption = ImportanceName.EQUAL,
    text: TextOption = None,
    calibration: Calibration = None,
    samples: Samples = None,
    length: Length = None,
    imatrix: Imatrix = None,
    statistics: StatisticsFiles = None,
    refine: RefineOption = 0,
    include: Include = None,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a recipe and a plot that are there.")
    ] = False,
    dequantize_first: DequantizeFirst = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss over bits, an SVG picture.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write a page next to the recipe, RECIPE.html.")
    ] = True,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:
    """Choose a scheme for each layer, so that the least is lost within a budget, and write a recipe.

    One pass over the weights measures each layer under every candidate; the choice that follows is the best
    one, with proof. --importance linearity measures how much each layer matters, by noise in one at a time
    and the KL divergence of the logits, and --importance divergence tries every candidate in each layer: the
    model runs, all of it in memory. Layers that engines run as one get one scheme. What was measured is kept
    in a file, from which another budget is decided without reading weights, and an interrupted search
    resumes.

    \b
    Examples:
      zeropoint search MODEL --budget 4.5bpw -o recipe.yaml
      zeropoint search MODEL --budget 3.2G --candidates mxfp4,nvfp4a16,w4a16,fp8_dynamic -o recipe.yaml
      zeropoint search MODEL --budget 4.5bpw --method mse_weighted --calibration random -o recipe.yaml
      zeropoint search MODEL --budget 4.8bpw --format FORMAT --method ggml -o recipe.yaml --plot curve.svg
      zeropoint search MODEL --budget 4.5bpw --importance linearity --text wiki.txt --refine 20 -o recipe.yaml
      zeropoint search MODEL --budget 4.5bpw --importance divergence --text wiki.txt -o recipe.yaml
      zeropoint quantize MODEL OUT --recipe recipe.yaml
    """  # noqa: D301
    result = layers.search_checkpoint(
        source, budget, candidates, out=out, state=state, format=format, method=method,
        importance=importance.value, text=text, calibration=calibration, samples=samples,
        length=length, imatrix=imatrix, statistics=statistics or (), refine=refine,
        include=include or (), ignore=ignore or (), dequantize_first=dequantize_first, workers=workers,
        max_memory=max_memory, device=device, overwrite=overwrite, plot=plot, report=report, progress=True,
    )  # fmt: skip
    if as_json:
        show_json(result.to_dict())
    else:
        show(layers.search_report(result, everything=everything))
    if out is None and not as_json:
        note("no recipe was written; add -o FILE")
