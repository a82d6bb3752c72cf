"""Tables of how far models are from their reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import size_of
from .table_layout import plain
from .tables import lines
from .wording import name

if TYPE_CHECKING:  # it loads models
    from ..eval import Estimate, Evaluation, ModelQuality

_OF_LANGUAGE = (
    "Mean PPL(Q)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "99.9% KLD", "RMS Δp", "Same top p",
    "Bits per byte", "Median divergence length", "Cloze accuracy", "Cloze McNemar p",
)  # fmt: skip
_OF_ENCODERS = ("Mean cosine", "1.0% cosine", "Spearman of similarities", "Top-10 neighbor overlap")
_SHARES = ("Δp", "Same ", "Cor(", "Flip rate", "Cloze accuracy", "overlap")
"""Marks in names of shares, which tables show in percent, as llama.cpp does."""
_YARD = {True: "Mean cosine", False: "Mean KLD"}


def evaluation_report(found: Evaluation, *, seconds: float, everything: bool = False) -> RenderableType:
    """Return the table of an evaluation: statistics by model, with notes.

    everything: all statistics, also percentiles. Models no further from the reference than the noise floor
    are named in a note.
    """
    shown = list(found.models[0].statistics) if found.models else []
    if not everything:
        shown = [key for key in shown if key in usual_statistics(found)]
    table = plain("", *(head_of(model) for model in found.models), numbers=range(1, len(found.models) + 1))
    table.add_row("size of weights", *(_size(model) for model in found.models))
    for key in shown:
        table.add_row(key, *(estimate_text(key, model.statistics[key]) for model in found.models))
    notes = [f"{head_of(model)}: {note}" for model in found.models for note in model.notes]
    parts = [f"reference: {name(found.reference)} ({size_of(found.reference_bytes)})", *found.data]
    return Group(
        table,
        Text(),
        *lines([*notes, *found.notes, *below_floor(found)], "note: "),
        Text("\n".join(parts) + f"\nevaluated in {seconds:.1f} s"),
    )


def usual_statistics(found: Evaluation) -> tuple[str, ...]:
    """Return the statistics that are shown unless all are asked for."""
    return _OF_ENCODERS if found.encoder else _OF_LANGUAGE


def head_of(model: ModelQuality) -> str:
    """Return a model's name, without folders."""
    return "noise floor" if model.is_noise_floor else last_part(model.name)


def last_part(path: str) -> str:
    """Return the name of a model without its folders.

    >>> last_part("models/tiny-w4a16"), last_part("tiny/")
    ('tiny-w4a16', 'tiny/')
    """
    return name(path.rpartition("/")[2] or path)


def _size(model: ModelQuality) -> str:
    return "" if model.is_noise_floor else size_of(model.nbytes)


def estimate_text(key: str, estimate: Estimate) -> str:
    """Return a number to two digits of its error, shares in percent."""
    factor, unit = (100, " %") if any(word in key for word in _SHARES) else (1, "")
    value, error = estimate.value * factor, (estimate.error or 0) * factor
    if not error:
        return f"{value:.4g}{unit}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}{unit}"


def below_floor(found: Evaluation) -> list[str]:
    """Return a sentence for each model within the noise floor."""
    floor, key = found.noise_floor, _YARD[found.encoder]
    if floor is None:
        return []
    sign = -1 if found.encoder else 1
    return [
        f"{head_of(model)} is no further from the reference than this is from itself in bfloat16: its "
        "differences say nothing"
        for model in found.models
        if not model.is_noise_floor
        and sign * model.statistics[key].value <= sign * floor.statistics[key].value
    ]
