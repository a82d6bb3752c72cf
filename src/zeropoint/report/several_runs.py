"""A table of several runs of one command, a line each."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoint.run.advice import error_warnings, misfit_warnings
from ..checkpoint.run.loop import RunResult
from ..codecs.engines import Loads
from ..errors import count, size_of
from .table_layout import plain
from .tables import doubts
from .wording import decibels


def runs_report(results: Mapping[str, RunResult | str], *, seconds: float) -> RenderableType:
    """Return the table of several runs: sizes, bits, errors, failures.

    Warnings follow. results: source to its result, or what its error says. seconds: of all.
    """
    table = plain("checkpoint", "from", "to", "bits", "rel.err", "SQNR dB", numbers=(1, 2, 3, 4, 5))
    written = {source: found for source, found in results.items() if not isinstance(found, str)}
    for source, found in results.items():
        if isinstance(found, str):
            table.add_row(source, "failed")
            continue
        plan, error = found.plan, found.error
        bits = f"{plan.bits_per_value:.3f}" if plan.quantized_values else ""
        errors = (f"{error.relative:.4f}", decibels(error.sqnr_db)) if found.outcomes else ("", "")
        table.add_row(source, size_of(plan.source_bytes), size_of(plan.output_bytes), bits, *errors)
    failed = [f"{source}: {said}" for source, said in results.items() if isinstance(said, str)]
    warned = [
        f"{source}: warning: {said}"
        for source, found in written.items()
        for said in (*misfit_warnings(found.plan), *error_warnings(found))
    ]
    warned += [
        f"{source}: note: {said}"
        for source, found in written.items()
        for said in doubts(found.plan, among=(Loads.NO,))
    ]
    before = sum(found.plan.source_bytes for found in written.values())
    after = sum(found.plan.output_bytes for found in written.values())
    sizes = f"{size_of(before)} -> {size_of(after)}"
    last = f"{count(len(written), 'checkpoint')}, {sizes} in {seconds:.1f} s"
    return Group(table, Text(), *map(Text, (*failed, *warned, last)))
