"""Tables of a search: what each layer got, and what that costs."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from ..search.search_result import SearchResult, summary
from .table_layout import Plain, plain
from .tables import folded, lines, once, times


def search_report(result: SearchResult, *, everything: bool = False) -> RenderableType:
    """Return the report of a search: layers, candidates, notes, summary.

    everything: a line for each layer instead of one for each pattern of names.
    """
    return Group(
        layer_table(result, everything=everything),
        Text(),
        scheme_table(result),
        Text(),
        *lines(once(result.notes, everything), "note: "),
        Text("\n".join(summary(result))),
    )


def layer_table(result: SearchResult, *, everything: bool = False) -> Plain:
    """Return the table of layers: scheme, bits, error, share of loss."""
    table = plain("layers", "n", "scheme", "bits", "rel.err", "of loss", numbers=(1, 3, 4, 5), whole=(2,))
    total = result.allocation.loss or 1.0
    groups = folded(result.chosen, lambda c: c.layer.name, lambda c: c.candidate, everything)
    for label, found in groups:
        values = sum(choice.layer.values for choice in found)
        bits = 8 * sum(choice.nbytes for choice in found) / max(1, values)
        error = math.sqrt(math.fsum(choice.relative**2 for choice in found) / len(found))
        share = math.fsum(choice.loss for choice in found) / total
        table.add_row(label, times(found), found[0].candidate, f"{bits:.3f}", f"{error:.4f}", f"{share:.1%}")
    return table


def scheme_table(result: SearchResult) -> Plain:
    """Return the table of candidates: layers, bits, loss for all layers."""
    table = plain("candidate", "layers", "bits", "loss for all layers", numbers=(1, 2, 3))
    counts = Counter(choice.candidate for choice in result.chosen)
    uniform = {point.name: point for point in result.uniform}
    values = max(1, result.choices.values)
    for text in result.choices.candidates:
        point = uniform.get(text)
        if point is None:
            table.add_row(text, f"{counts[text]:,}", "", "does not fit all")
        else:
            table.add_row(text, f"{counts[text]:,}", f"{8 * point.nbytes / values:.3f}", f"{point.loss:.6g}")
    size, loss = result.allocation.size, result.allocation.loss
    table.add_section()
    table.add_row("the mixture", f"{len(result.chosen):,}", f"{8 * size / values:.3f}", f"{loss:.6g}")
    return table
