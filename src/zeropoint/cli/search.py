"""The command ``zeropoint search``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from . import layers
from .arguments import parse_budget, parse_candidates, parse_path
from .options import (
    AsJson,
    Checkpoint,
    DequantizeFirst,
    Everything,
    Format,
    Ignore,
    Include,
    Memory,
    Method,
    Workers,
    selected,
)
from .output import note, progress, show, show_json


def search(  # noqa: PLR0913 (typer makes an option of each parameter)
    source: Checkpoint,
    budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE", parser=parse_budget,
            help="Bits for each weight, such as 4.5bpw, or bytes of all files, such as 3.2G.",
        ),
    ],
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", parser=parse_candidates,
            help="Presets and schemes, joined by commas, and keep; by default those of weights alone.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the recipe to a new file.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", parser=parse_path,
            help="Keeps the errors of layers; by default the recipe's name with .search behind it.",
        ),
    ] = None,
    format: Format = None,  # noqa: A002 (the option's name)
    method: Method = None,
    include: Include = None,
    ignore: Ignore = None,
    workers: Workers = None,
    max_memory: Memory = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe in FILE.")] = False,
    dequantize_first: DequantizeFirst = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss over bits, an SVG picture.")
    ] = None,
    everything: Everything = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Choose a scheme for each layer, so that the least is lost within a budget, and write a recipe.

    One pass over the weights measures each layer under every candidate; the choice that follows is the best
    one, with proof. Layers that engines run as one get one scheme. What was measured is kept in a file, from
    which another budget is decided without reading weights, and an interrupted search resumes.

    \b
    Examples:
      zeropoint search MODEL --budget 4.5bpw -o recipe.yaml
      zeropoint search MODEL --budget 3.2G --candidates mxfp4,nvfp4a16,w4a16,fp8_dynamic -o recipe.yaml
      zeropoint search MODEL --budget 4.8bpw --format FORMAT --method ggml -o recipe.yaml --plot curve.svg
      zeropoint quantize MODEL OUT --recipe recipe.yaml
    """  # noqa: D301
    if out is not None and out.exists() and not overwrite:
        raise typer.BadParameter(f"{str(out)!r} exists; add --overwrite to replace it, or name a new file")
    codec = layers.DEFAULT if format is None else format
    asked = layers.asked(
        budget, candidates, codec, method=method,
        selection=selected(include, ignore, strict=False, first=dequantize_first, kept=False),
        limits=layers.Limits.default(workers, max_memory),
    )  # fmt: skip
    kept = Path(state) if state is not None else None if out is None else out.with_name(out.name + ".search")
    with progress("measuring") as on_progress:
        result = layers.search(layers.open_source(source), asked, state=kept, on_progress=on_progress)
    if out is not None:
        replace_file(out, result.recipe.text + "\n")
    if plot is not None:
        replace_file(plot, layers.curve_svg(result))
    if as_json:
        show_json(layers.search_document(result))
    else:
        show(layers.search_report(result, everything=everything))
    if out is None and not as_json:
        note("no recipe was written; add -o FILE")


def replace_file(path: Path, text: str) -> None:
    """Write a file whole: it has its old content or the new one, whatever happens."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
