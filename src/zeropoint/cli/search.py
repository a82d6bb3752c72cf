"""The command ``zeropoint search``."""

from __future__ import annotations

import enum
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from . import layers
from .arguments import parse_budget, parse_candidates, parse_path
from .options import (
    AsJson,
    Calibration,
    Checkpoint,
    DequantizeFirst,
    Everything,
    Format,
    Ignore,
    Imatrix,
    Include,
    Memory,
    Method,
    Workers,
    selected,
)
from .output import note, progress, show, show_json

if TYPE_CHECKING:
    from ..checkpoint.read.source import Source
    from ..search.searching import Asked, SearchResult


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
        help="Of a budget: presets, schemes and keep, joined by commas; by default, of weights alone.",
    ),
]  # fmt: skip
State = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", parser=parse_path,
        help="Of a budget: keeps what was measured; by default the output's name with .search behind it.",
    ),
]  # fmt: skip
ImportanceOption = Annotated[
    ImportanceName,
    typer.Option(
        "--importance",
        help="Of a budget: layers matter equally, as noise in each moves the logits, or as candidates do.",
    ),
]
TextOption = Annotated[
    str | None,
    typer.Option(
        "--text", metavar="FILE", parser=parse_path,
        help="Of a budget: text, or token ids in .safetensors, that the model runs on; or random tokens.",
    ),
]  # fmt: skip
RefineOption = Annotated[
    int,
    typer.Option(
        "--refine", metavar="N", min=0,
        help="Of a budget: generations of an evolution by measured divergence.",
    ),
]  # fmt: skip


class ModelRuns(NamedTuple):
    """What a search runs the model for, if for anything, and on what; imatrix: in place of calibration."""

    importance: ImportanceName = ImportanceName.EQUAL
    text: str | None = None
    refine: int = 0
    calibration: str | None = None
    imatrix: str | None = None


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
    imatrix: Imatrix = None,
    refine: RefineOption = 0,
    include: Include = None,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a recipe and a plot that are there.")
    ] = False,
    dequantize_first: DequantizeFirst = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss over bits, an SVG picture.")
    ] = None,
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
    opened = layers.open_source(source)
    drawn = None if plot is None else layers.OwnFile(plot, layers.SVG, opened.places)
    written = None if out is None else layers.OwnFile(out, layers.RECIPE, opened.places)
    # The recipe comes last: where it is there already, so is all else.
    last = plot if out is None else out
    if last is not None and os.path.lexists(last) and not overwrite:
        raise typer.BadParameter(f"{str(last)!r} exists; add --overwrite to replace it, or name a new file")
    for file in filter(None, (drawn, written)):
        file.require_free(overwrite=True)
    selection = selected(include, ignore, strict=False, first=dequantize_first, kept=False)
    limits = layers.Limits.default(workers, max_memory)
    asked = layers.asked(
        budget, candidates, layers.DEFAULT if format is None else format, method=method, selection=selection,
        limits=limits,
    )  # fmt: skip
    runs = ModelRuns(importance, text, refine, calibration, imatrix)
    result = under_budget(opened, asked, state_of(state, out), runs)
    if drawn is not None:
        drawn.write([layers.curve_svg(result).encode("utf-8")], overwrite=overwrite)
    if written is not None:
        written.write([f"{result.recipe.text}\n".encode()], overwrite=overwrite)
    if as_json:
        show_json(result.to_dict())
    else:
        show(layers.search_report(result, everything=everything))
    if out is None and not as_json:
        note("no recipe was written; add -o FILE")


def under_budget(source: Source, asked: Asked, state: Path | None, runs: ModelRuns) -> SearchResult:
    """Return the best choice within a budget; raises typer.BadParameter for a text that nothing runs on."""
    limits, (importance, text, refine, calibration, imatrix) = asked.limits or layers.Limits.default(), runs
    if importance is ImportanceName.EQUAL and not refine and text is not None:
        raise typer.BadParameter(
            "--text is what the model runs on; add --importance linearity or divergence, or --refine N"
        )
    asked = replace(asked, inputs=layers.inputs_by(imatrix, calibration, limits, progress=True))
    return layers.search(
        source, asked, state=state,
        weigh=layers.weigh_by(importance.value, text, limits),
        improve=layers.by_evolution(text, limits, refine) if refine else None, bar=progress,
    )  # fmt: skip


def state_of(given: str | None, out: Path | None) -> Path | None:
    """Return where what was measured is kept: next to the output, unless another place is given."""
    if given is not None:
        return Path(given)
    return None if out is None else out.with_name(f"{out.name}.search")
