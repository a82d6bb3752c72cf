"""Tables of plans: actions, outputs, sizes, engines, and devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..checkpoint.plan.checkpoint_plan import CheckpointPlan
from ..checkpoint.plan.output_files import OutputShard, SharedScale
from ..checkpoint.plan.output_tensors import Output
from ..checkpoint.plan.verdicts import WAYS, Indivisible, Verdict, indivisible, verdicts
from ..checkpoint.run.advice import misfit_warnings
from ..errors import size_of
from .table_layout import Plain, plain
from .tables import decision_table, folded, lines, once, times
from .wording import name, shape

_SHARDS = 12
"""Shards that are listed unless all are asked for."""


def plan_report(plan: CheckpointPlan, *, everything: bool = False) -> RenderableType:
    """Return the report of a plan: summary, engines, notes, tables.

    everything: a line for each tensor instead of one for each pattern of names.
    """
    parts: list[RenderableType] = [
        decision_table(plan.decisions, everything=everything),
        output_table(plan, everything=everything),
        shard_table(plan.shards, everything=everything),
        parallel_table(indivisible(plan.weights), everything=everything),
    ]
    if plan.shared_scales:
        parts.append(shared_table(plan.shared_scales, everything=everything))
    spaced = [part for table in parts for part in (table, Text())]
    return Group(
        *lines(misfit_warnings(plan), "warning: "),
        Text("\n".join((*plan.summary, plan.memory, ""))),
        engine_table(verdicts(plan)),
        Text(),
        *lines(once(plan.notes, everything), "note: "),
        *([Text()] if plan.notes else []),
        *spaced[:-1],
    )


def output_table(plan: CheckpointPlan, *, everything: bool = False) -> Plain:
    """Return quantized weights, each with what its tensors take together.

    With ``everything``, a line for each of these tensors, with its shard.
    """
    if everything:
        table = plain("outputs", "dtype", "shape", "size", "shard", numbers=(3,))
        for tensor in plan.outputs.of_weights:
            cells = (name(tensor.name), tensor.spec.dtype, shape(tensor.spec.shape))
            table.add_row(*cells, size_of(tensor.nbytes), name(tensor.shard))
        return table
    table = plain("outputs", "n", "parts", "shape", "size", numbers=(1, 4))
    for label, group in folded(plan.weights, lambda w: w.module, _kind, everything):
        size = size_of(sum(tensor.nbytes for weight in group for tensor in weight.tensors))
        table.add_row(label, times(group), _parts(group[0]), shape(group[0].shape), size)
    return table


def _kind(weight: Output) -> tuple[tuple[int, int], str]:
    return weight.shape, _parts(weight)


def _parts(weight: Output) -> str:
    """Return a weight's tensors by name suffix and dtype."""
    suffixes = (tensor.name.rpartition(".")[2].removeprefix("weight_") for tensor in weight.tensors)
    dtypes = (tensor.spec.dtype for tensor in weight.tensors)
    return ", ".join(f"{suffix} {dtype}" for suffix, dtype in zip(suffixes, dtypes, strict=True))


def shard_table(shards: Sequence[OutputShard], *, everything: bool = False) -> Plain:
    """Return the table of shards: the first ones, others summed."""
    table = plain("shards", "size", numbers=(1,))
    listed = shards if everything or len(shards) <= _SHARDS else shards[: _SHARDS - 1]
    for shard in listed:
        table.add_row(name(shard.name), size_of(shard.size))
    rest = shards[len(listed) :]
    if rest:
        table.add_row(f"and {len(rest):,} more", size_of(sum(shard.size for shard in rest)))
    return table


def engine_table(found: Iterable[Verdict]) -> Plain:
    """Return which engines load the result, and why the others do not."""
    table = plain("engine", "loads", "why", "checked", whole=(0,))
    for verdict in found:
        checked = "by our tests" if verdict.checked else "not checked here"
        table.add_row(verdict.engine, verdict.loads.value, verdict.reason, checked)
    return table


def parallel_table(found: Sequence[Indivisible], *, everything: bool = False) -> Plain:
    """Return the table of tensor parallelism: indivisible weights by device count."""
    table = plain("tensor parallel", "weights that cannot be split", "n", "why", numbers=(0, 2))
    for ways in WAYS:
        here = [item for item in found if item.ways == ways]
        groups = folded(here, lambda item: item.module, lambda item: item.reason, everything)
        for row, (label, group) in enumerate(groups):
            table.add_row("" if row else str(ways), label, times(group), group[0].reason)
        if not groups:
            table.add_row(str(ways), "none", "", "")
    return table


def shared_table(shared: Sequence[SharedScale], *, everything: bool = False) -> Plain:
    """Return the table of sets with one scale, and their shards."""
    table = plain("one tensor scale for", "n", "across shards", numbers=(1, 2))
    for label, group in folded(shared, _members, lambda scale: len(scale.modules), everything):
        across = sum(len(item.shards) > 1 for item in group)
        table.add_row(label, times(group), f"{across:,}" if across else "")
    return table


def _members(shared: SharedScale) -> str:
    """Return the first member in full, the others by last part."""
    first, *others = shared.modules
    return ", ".join([first, *(module.rpartition(".")[2] for module in others)])
