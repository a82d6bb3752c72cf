"""Tables about checkpoints: decisions, errors, content, and proofs.

The tensors of a model's layers differ by a number in their names; they share a line unless all are asked for.
"""

from __future__ import annotations

import enum
import re
from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoint.measure.equality import Equality
from ..checkpoint.measure.tensor_error import TensorError, worst
from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.decisions import TensorDecision
from ..checkpoint.plan.learned_data import offered_quality
from ..checkpoint.plan.selection import Why
from ..checkpoint.plan.verdicts import verdicts
from ..checkpoint.run.advice import error_warnings, expert_tokens, keeping_cost, misfit_warnings
from ..checkpoint.run.loop import Outcome, RunResult
from ..checkpoint.verify.compare import Compared, Comparison
from ..checkpoint.verify.inspection import Inspection
from ..checkpoint.verify.proofs import LayerProof
from ..checkpoint.verify.verification import Verification
from ..codecs.engines import DIFFUSERS, Loads
from ..columns import LazySequence
from ..errors import all_of, count, size_of
from ..methods import NEAREST
from .table_layout import Plain, plain
from .wording import decibels, name, pattern, shape, share, short_scheme

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Order(enum.StrEnum):
    """In which order weights are listed."""

    FILE = "file"
    """As in the files."""
    ERROR = "error"
    """The largest relative error first."""


def run_report(
    result: RunResult, *, seconds: float, everything: bool = False, order: Order = Order.FILE
) -> RenderableType:
    """Return the report of a run: decisions, errors, notes, summary.

    everything: a line for each tensor instead of one for each pattern of names. order: of errors.
    """
    plan = result.plan
    sizes, *facts = result.summary
    errors: list[RenderableType] = []
    if result.outcomes:
        errors = [error_table(result.outcomes, everything=everything, order=order), *_kept(result), Text()]
    return Group(
        *lines(misfit_warnings(plan), "warning: "),
        decision_table(plan.decisions, everything=everything),
        Text(),
        *errors,
        *_experts(plan),
        *lines(once(result.notes, everything), "note: "),
        *lines([*offered_quality(plan), *doubts(plan)], "note: "),
        *lines([*_losses(result.outcomes), *error_warnings(result)], "warning: "),
        Text("\n".join((f"{sizes} in {seconds:.1f} s", *facts))),
    )


def decision_table(decisions: Sequence[TensorDecision], *, everything: bool = False) -> Plain:
    """Return the table of decisions, under headlines with reasons."""
    table = plain("tensors", "n", "dtype", "shape", numbers=(1,))
    groups = _grouped(decisions, map(_headline, decisions))
    # Stable: quantized tensors first, and otherwise in the order of the files.
    for headline, group in sorted(groups, key=lambda each: not each[1][0].quantized):
        table.add_row(f"{headline}{_lines_of(group)}", f"{len(group):,}", style="bold")
        for label, same in folded(group, lambda d: d.entry.name, _kind, everything):
            entry = same[0].entry
            table.add_row(f"  {label}", times(same), entry.dtype, shape(entry.shape))
    return table


def error_table(outcomes: Sequence[Outcome], *, everything: bool = False, order: Order = Order.FILE) -> Plain:
    """Return the table of errors, weights of a line joined, and worst."""
    table = plain("weights", "n", "rel.err", "SQNR dB", "largest", "clipped", numbers=(1, 2, 3, 4, 5))
    groups = folded(outcomes, lambda o: o.weight.module, _same, everything)
    rows = [(label, times(group), TensorError.merge(o.error for o in group)) for label, group in groups]
    for label, number, error in _ordered(rows, lambda row: row[2], order):
        table.add_row(label, number, *_error_cells(error))
    if len(outcomes) > 1:
        table.add_section()
        table.add_row("all", times(outcomes), *_error_cells(TensorError.merge(o.error for o in outcomes)))
        _add_worst(table, ((o.weight.module, o.error) for o in outcomes), _error_cells)
    return table


def _ordered(rows: Sequence[T], error: Callable[[T], TensorError], order: Order) -> Sequence[T]:
    if order is Order.FILE:
        return rows
    return sorted(rows, key=lambda row: -error(row).relative)


def _add_worst(
    table: Plain, errors: Iterable[tuple[str, TensorError]], cells: Callable[[TensorError], tuple[str, ...]]
) -> None:
    """Add the items of the largest relative errors to a table."""
    found = worst(errors, lambda item: item[1])
    if found:
        table.add_section()
        table.add_row("the worst", style="bold")
    for label, error in found:
        table.add_row(f"  {name(label)}", "", *cells(error))


def _kept(result: RunResult) -> list[RenderableType]:
    """Return the cost of keeping the worst weights, and its option."""
    found = keeping_cost(result)
    if found is None:
        return []
    return [Text(str(found)), Text(f"  {found.option}", no_wrap=True, overflow="ignore")]


def _experts(plan: CheckpointPlan) -> list[RenderableType]:
    """Return the calibration tokens per expert of each layer, if any."""
    found = expert_tokens(plan.solved)
    if not found:
        return []
    table = plain("tokens per expert", "experts", "fewest", "median", "most", "none", numbers=(1, 2, 3, 4, 5))
    for each in found:
        numbers = (each.experts, each.fewest, each.median, each.most, each.without)
        table.add_row(name(each.layer), *(f"{number:,.12g}" for number in numbers))
    return [table, Text()]


def inspection_report(inspection: Inspection, *, everything: bool = False) -> RenderableType:
    """Return the report of an inspection: tensors, dtypes, schemes, problems."""
    tensors = plain("tensors", "n", "dtype", "shape", numbers=(1,))
    for label, entries in folded(
        inspection.tensors, lambda e: e.name, lambda e: (e.dtype, e.shape), everything
    ):
        tensors.add_row(label, times(entries), entries[0].dtype, shape(entries[0].shape))
    dtypes = plain("dtype", "tensors", "numbers", "size", numbers=(1, 2, 3))
    for d in inspection.dtypes:
        dtypes.add_row(d.dtype, f"{d.tensors:,}", f"{d.values:,}", size_of(d.nbytes))
    parts: list[RenderableType] = [tensors, Text(), dtypes, Text()]
    if inspection.schemes:
        schemes = plain("scheme", "layout", "method", "layers", "numbers", "bits", numbers=(3, 4, 5))
        for s in inspection.schemes:
            schemes.add_row(
                short_scheme(s.scheme),
                s.layout,
                s.method or "unknown",
                f"{s.layers:,}",
                f"{s.values:,}",
                f"{s.bits_per_value:.3f}",
            )
        parts += [schemes, Text()]
    parts += lines(inspection.source.notes, "note: ")
    parts += lines(inspection.problems, "problem: ")
    return Group(*parts, Text("\n".join(inspection.summary)))


def verification_report(
    verification: Verification, *, seconds: float, everything: bool = False, order: Order = Order.FILE
) -> RenderableType:
    """Return the report of a verification: proofs by layer, and problems.

    everything: a line for each layer instead of one for each pattern of names. order: of layers.
    """
    table = plain("layers", "n", "rel.err", "SQNR dB", "largest", numbers=(1, 2, 3, 4))
    groups = folded(verification.layers, lambda p: p.layer.module, _same, everything)
    rows = [(label, group, TensorError.merge(_errors(group))) for label, group in groups]
    for label, group, error in _ordered(rows, lambda row: row[2], order):
        table.add_row(label, times(group), *(_error_cells(error)[:3] if error.values else ()))
    if len(verification.layers) > 1:
        errors = ((proof.layer.module, error) for proof, error in verification.layers.measured)
        _add_worst(table, errors, lambda error: _error_cells(error)[:3])
    facts, verdict = verification.summary
    return Group(
        table,
        Text(),
        *lines(verification.notes, "note: "),
        *lines(map(str, verification.problems), "problem: "),
        Text(f"{facts}\n{verdict}, in {seconds:.1f} s"),
    )


def comparison_report(
    comparison: Comparison, *, seconds: float, everything: bool = False, order: Order = Order.FILE
) -> RenderableType:
    """Return the report of a comparison, tensor by tensor.

    everything: a line for each tensor instead of one for each pattern of names. order: of tensors.
    """
    table = plain("tensors", "n", "rel.err", "SQNR dB", "largest", "unequal", numbers=(1, 2, 3, 4, 5))
    folds = folded(comparison.tensors, lambda c: c.pair.name, lambda c: c.pair.held_by, everything)
    rows = [
        (label, found, TensorError.merge(c.error for c in found), Equality.merge(c.equality for c in found))
        for label, found in folds
    ]
    rows = list(_ordered(rows, lambda row: row[2], order))
    for headline, group in _grouped(rows, (_both(row[1][0]) for row in rows)):
        table.add_row(headline, style="bold")
        for label, found, error, equality in group:
            table.add_row(f"  {label}", times(found), *_apart_cells(error, equality))
    counted = comparison.counted
    if counted.tensors:
        table.add_section()
        cells = _apart_cells(counted.error, comparison.equality)[:-1]
        table.add_row("quantized or changed", f"{counted.tensors:,}", *cells)
        errors = ((c.pair.name, c.error) for c in comparison.tensors.measured)
        _add_worst(table, errors, lambda error: _error_cells(error)[:3])
    facts, verdict = comparison.summary
    return Group(
        table,
        Text(),
        *lines(once(comparison.notes, everything), "note: "),
        *lines(once(map(str, comparison.problems), everything), "problem: "),
        Text(f"{facts}\n{verdict}, in {seconds:.1f} s"),
    )


def _both(found: Compared) -> str:
    a, b = map(short_scheme, found.pair.held_by)
    return f"{a} in both" if a == b else f"{a} and {b}"


def _apart_cells(error: TensorError, equality: Equality) -> tuple[str, ...]:
    return (*_error_cells(error)[:3], share(equality.unequal / max(1, equality.values)))


def _headline(decision: TensorDecision) -> str:
    if decision.layer is None:
        return f"{'rotated' if decision.why is Why.ROTATED else 'kept'}: {decision.reason}"
    method = "" if decision.method == NEAREST else f" by {decision.method}"
    reason = _LINE.sub("", decision.reason)
    return f"quantized to {short_scheme(str(decision.layer))}{method}: {reason}"


_LINE = re.compile(r", line (\d+)$")
"""End of a reason that names a line of a recipe."""


def _lines_of(group: Sequence[TensorDecision]) -> str:
    """Return the recipe lines behind a headline, as its ending."""
    found = (_LINE.search(decision.reason) for decision in group if decision.quantized)
    numbers = list(dict.fromkeys(each[1] for each in found if each is not None))
    if not numbers:
        return ""
    numbers.sort(key=int)
    return f", line {numbers[0]}" if len(numbers) == 1 else f", lines {all_of(numbers)}"


def _kind(decision: TensorDecision) -> tuple[str, tuple[int, ...]]:
    return decision.entry.dtype, decision.entry.shape


def _same(item: object) -> None:  # noqa: ARG001 (everything with one name is of one kind)
    return None


def _grouped(items: Sequence[T], keys: Iterable[K]) -> list[tuple[K, Sequence[T]]]:
    """Return items grouped by key, in order of first items.

    keys: one for each item. A group holds indices, so that items that are created on access take no memory.
    """
    found: dict[K, array[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, array("I")).append(number)
    return [(key, LazySequence(len(numbers), _picked(items, numbers))) for key, numbers in found.items()]


_LINES, _OTHERS = 1000, "(other names: --all lists them)"


def folded(
    items: Sequence[T], label: Callable[[T], str], kind: Callable[[T], object], everything: bool
) -> list[tuple[str, Sequence[T]]]:
    """Return items grouped by names that differ only in numbers.

    Items of a group are of one kind. Of other names, the first thousand have lines: nobody reads more.
    """
    lines = set[tuple[str, object]]()

    def key(item: T) -> tuple[str, object]:
        line = pattern(label(item)), kind(item)
        if line not in lines and len(lines) >= _LINES:
            line = _OTHERS, kind(item)
        lines.add(line)
        return line

    if everything:
        return [
            (name(label(item)), LazySequence(1, _picked(items, array("I", [n]))))
            for n, item in enumerate(items)
        ]
    groups = _grouped(items, map(key, items))
    return [(name(label(group[0]) if len(group) == 1 else text), group) for (text, _), group in groups]


def _picked(items: Sequence[T], numbers: array[int]) -> Callable[[int], T]:
    return lambda n: items[numbers[n]]


def times(group: Sequence[object]) -> str:
    """Return how many items share a line, where there are several."""
    return f"{len(group):,}" if len(group) > 1 else ""


def _error_cells(error: TensorError) -> tuple[str, ...]:
    return (
        f"{error.relative:.4f}", decibels(error.sqnr_db), f"{error.largest:.3g}", share(error.clipped_share)
    )  # fmt: skip


def _errors(group: Iterable[LayerProof]) -> Iterator[TensorError]:
    return (proof.error for proof in group if proof.error is not None)


def doubts(plan: CheckpointPlan, among: Collection[Loads] = frozenset(Loads) - {Loads.YES}) -> list[str]:
    """Return sentences about the usual engines; diffusers for pipeline parts.

    among: the answers of engines that are said.
    """
    found = verdicts(plan) if plan.weights else ()
    parts = [each for each in found if each.engine == DIFFUSERS]
    asked = parts or [each for each in found if each.engine in plan.codec.usual]
    return [f"{each.engine}: {_LOADS[each.loads]}{each.reason}" for each in asked if each.loads in among]


_LOADS = {Loads.NO: "does not load it, since ", Loads.PARTLY: "", Loads.UNCHECKED: ""}


def _losses(outcomes: Iterable[Outcome]) -> list[str]:
    """Return a sentence for each weight with blocks quantized to zero."""
    return [
        f"{name(o.weight.module)}: {count(o.error.lost_blocks, 'block')} came out as zeros alone"
        for o in outcomes
        if o.error.lost_blocks
    ]


def once(sentences: Iterable[str], everything: bool) -> list[str]:
    """Return sentences merged where only layer numbers differ, with counts."""
    found: dict[str, list[str]] = {}
    for sentence in sentences:
        found.setdefault(sentence if everything else pattern(sentence), []).append(sentence)
    return [same[0] if len(same) == 1 else f"{text} ({len(same):,} times)" for text, same in found.items()]


def lines(sentences: Iterable[str], prefix: str) -> list[RenderableType]:
    """Return each sentence on a line of its own, behind ``prefix``."""
    return [Text(prefix + sentence) for sentence in sentences]


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
