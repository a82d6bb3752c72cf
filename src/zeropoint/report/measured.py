"""Results of searches and evaluations as nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import size_of
from ..search.search_result import SearchResult
from ..shown import Picture
from .charts import Spot, scatter
from .evaluations import below_floor, estimate_text, head_of, last_part, usual_statistics
from .nodes import Cell, DataTable, FactList, Figure, Node, Part, Sentence, number_cell, row

if TYPE_CHECKING:  # it loads models
    from ..eval import Estimate, Evaluation, ModelQuality

_LAYERS = 4000


def search_picture(result: SearchResult) -> Picture:
    """Return the picture of a search: losses over bits."""
    values = max(1, result.choices.values)

    def bits(nbytes: int) -> float:
        return 8 * nbytes / values

    spots = [Spot(bits(point.nbytes), point.loss, point.name, 7) for point in result.uniform]
    spots.append(Spot(bits(result.allocation.size), result.allocation.loss, "mixture", 1))
    line = [(bits(point.nbytes), point.loss) for point in result.curve]
    return scatter(spots, axes=("bits of each weight", "loss"), label="loss over bits", line=line)


def search_nodes(result: SearchResult) -> Iterator[Node]:
    """Yield the nodes of a search: choices, costs, and other sizes."""
    allocation = result.allocation
    best = "no choice within the budget loses less"
    if not allocation.optimal:
        best = f"each within the budget loses at least {allocation.bound:.6g}"
    yield FactList(
        (
            ("budget", str(result.budget)),
            ("bits of each weight", f"{result.bits:.3f}"),
            ("of all files", size_of(result.plan.output_bytes)),
            ("loss", f"{allocation.loss:.6g}"),
        ),
        large=True,
    )
    yield Sentence(f"Importance of layers: {result.importance}. Of all choices: {best}.")
    yield from map(Sentence, result.notes)
    what = "The least loss at each size, candidates for all layers, and what was chosen."
    yield Part("Loss over bits", (Sentence(what, quiet=True), Figure(search_picture(result))))
    counts, values = Counter(choice.candidate for choice in result.chosen), max(1, result.choices.values)
    uniform = {point.name: point for point in result.uniform}
    rows = []
    for name in result.choices.candidates:
        point = uniform.get(name)
        size, loss = (None, None) if point is None else (8 * point.nbytes / values, point.loss)
        rows.append(
            row(
                name,
                counts[name],
                number_cell(size, "does not fit all" if size is None else f"{size:.3f}"),
                number_cell(loss, "" if loss is None else f"{loss:.6g}"),
            )
        )
    heads = ("candidate", "layers", "bits", "loss for all layers")
    yield Part("Candidates", (DataTable(heads, tuple(rows)),))
    cells = tuple(
        row(
            choice.layer.name,
            choice.candidate,
            number_cell(choice.nbytes, size_of(choice.nbytes)),
            number_cell(choice.bits, f"{choice.bits:.3f}"),
            number_cell(choice.relative, f"{choice.relative:.4f}"),
            number_cell(choice.loss, f"{choice.loss:.4g}"),
        )
        for choice in sorted(result.chosen, key=lambda choice: -choice.loss)[:_LAYERS]
    )
    of_layers = ("layers that run as one", "scheme", "size", "bits", "relative error", "loss")
    yield Part("What each layer got", (DataTable(of_layers, cells, sortable=True),), long=True)
    yield Part("The recipe", (FactList((("recipe", result.recipe.text),)),), folded=True, long=True)


def evaluation_nodes(found: Evaluation) -> Iterator[Node]:
    """Yield statistics of models, as far from the reference as they are."""
    yield FactList(
        (
            ("reference", f"{last_part(found.reference)} ({size_of(found.reference_bytes)})"),
            *(("data", line) for line in found.data),
        )
    )
    yield from map(Sentence, (*found.notes, *below_floor(found)))
    yield from (Sentence(f"{head_of(model)}: {note}") for model in found.models for note in model.notes)
    names = list(found.models[0].statistics) if found.models else []
    usual = usual_statistics(found)
    for title, keys, folded in (
        ("Measured", [key for key in names if key in usual], False),
        ("All statistics", [key for key in names if key not in usual], True),
    ):
        rows = [row(key, *(_estimate(key, model.statistics[key]) for model in found.models)) for key in keys]
        if not folded:
            sizes = (number_cell(model.nbytes, size_of(model.nbytes)) for model in found.models)
            rows.insert(0, row("size of weights", *sizes))
        if rows:
            grid = DataTable(("", *(head_of(model) for model in found.models)), tuple(rows))
            yield Part(title, (grid,), folded=folded, long=folded)
    picture = evaluation_picture(found)
    if picture is not None:
        yield Part(picture.label.capitalize(), (Figure(picture),), long=True)


def evaluation_picture(found: Evaluation) -> Picture | None:
    """Return models' divergence over their sizes, or None below two."""
    name, axis = ("Mean cosine", "1 - mean cosine") if found.encoder else ("Mean KLD", "mean KL divergence")

    def distance(model: ModelQuality) -> float:
        value = model.statistics[name].value
        return 1 - value if found.encoder else value

    spots = [
        Spot(model.nbytes / (1 << 20), distance(model), head_of(model), n)
        for n, model in enumerate(model for model in found.models if not model.is_noise_floor)
        if name in model.statistics
    ]
    if len(spots) < 2:
        return None
    return scatter(spots, axes=("size of weights, MiB", axis), label="divergence over size")


def _estimate(key: str, found: Estimate) -> Cell:
    return number_cell(found.value if math.isfinite(found.value) else None, estimate_text(key, found))
