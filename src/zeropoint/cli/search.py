"""The command ``zeropoint search``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from . import lazy
from .option_records import OptionRecord, given, only, with_records
from .options import Checkpoint, Content, Display, LayerBudget, Machine, Quantization
from .output import note, show, show_json

_QUANTIZATION = only("method", "calibration", "samples", "length", "imatrix", "statistics")


@dataclass(frozen=True, kw_only=True)
class SearchFiles(OptionRecord):
    """The files of a search: the recipe, a plot, and a page."""

    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe to a new file.")
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a recipe and a plot that are there.")
    ] = False
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss over bits, an SVG picture.")
    ] = None
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write a page next to the recipe, RECIPE.html.")
    ] = True


@with_records
def search(  # noqa: PLR0913 (arguments, and records of options)
    source: Checkpoint,
    *,
    budget: Annotated[
        LayerBudget, only("candidates", "state", "importance", "text", "refine", required=("budget",))
    ],
    content: Annotated[Content, only("format", "include", "ignore", "fit", "dequantize_first")],
    quantization: Annotated[Quantization, _QUANTIZATION],
    machine: Annotated[Machine, only("workers", "max_memory", "device")],
    files: SearchFiles,
    display: Annotated[Display, only("everything", "as_json")],
) -> None:
    """Choose a scheme for each layer within a budget.

    The least is lost, and the choice becomes a recipe. One pass over the weights measures each layer under
    every candidate; the choice that follows is the best one, with proof. --importance linearity measures how
    much each layer matters, by noise in one at a time and the KL divergence of the logits, and --importance
    divergence tries every candidate in each layer: the model runs, all of it in memory. Layers that engines
    run as one get one scheme. What was measured is kept in a file, from which another budget is decided
    without reading weights, and an interrupted search resumes.

    \b
    Examples:
      zeropoint search MODEL --budget 4.5bpw -o recipe.yaml
      zeropoint search MODEL --budget 3.2G --candidates mxfp4,nvfp4a16,w4a16,fp8_dynamic -o recipe.yaml
      zeropoint search MODEL --budget 4.5bpw --method mse_weighted --calibration random -o recipe.yaml
      zeropoint search MODEL --budget 4.8bpw --format FORMAT --method ggml -o recipe.yaml --plot curve.svg
      zeropoint search MODEL --budget 4.5bpw --importance linearity --text wiki.txt --refine 20 -o recipe.yaml
      zeropoint search MODEL --budget 4.5bpw --importance divergence --text wiki.txt -o recipe.yaml
      zeropoint search MODEL --budget 4.5bpw --fit -o recipe.yaml
      zeropoint quantize MODEL OUT --recipe recipe.yaml
    """  # noqa: D301
    result = lazy.search_checkpoint(
        source, **given(budget, content, quantization, machine, files), progress=True
    )
    if display.as_json:
        show_json(result.to_dict())
    else:
        show(lazy.search_report(result, everything=display.everything))
    if files.out is None and not display.as_json:
        note("no recipe was written; add -o FILE")
