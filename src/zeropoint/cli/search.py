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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing recipe and plot.")] = (
        False
    )
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot loss over bits, as SVG.")] = None
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

    One pass over the weights measures the error of each layer under every candidate. The choice of least
    loss within the budget, proven to be the best, is written as a recipe. --importance linearity weights
    errors by the KL divergence that noise in a layer causes, --importance divergence by the divergence of
    each candidate: for both the model runs, all of it in memory. Layers that engines fuse get the same
    scheme. Measurements are kept in a file: another budget needs no second pass, and an interrupted search
    resumes.

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
