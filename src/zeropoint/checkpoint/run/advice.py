"""Warnings about an output: weights that a scheme misfits or distorts.

This module decides nothing. It compares what was asked for with other schemes that could have been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...codecs.layer_schemes import layer_scheme, preset_layers
from ...codecs.protocol import LayerScheme
from ...errors import ZeropointError, count, option, printable, size_of
from ..plan.checkpoint_plan import CheckpointPlan
from ..plan.decisions import TensorDecision, misfit
from ..plan.selection import EXPERTS_AS_ROWS, WEIGHT_DTYPES, is_fused_experts, not_a_weight
from ..read.tensor_entries import TensorEntry

if TYPE_CHECKING:
    from .loop import RunResult

ROUGH = 0.5
"""Relative error from which an output is hardly the model any more: of published schemes of 4 bits, the worst
have 0.2."""


@dataclass(slots=True)
class _Total:
    """Count and bytes of weights, and one entry of each shape."""

    count: int = 0
    nbytes: int = 0
    shapes: dict[tuple[int, ...], TensorEntry] = field(default_factory=dict)

    def add(self, entry: TensorEntry) -> None:
        self.count += 1
        self.nbytes += entry.nbytes
        self.shapes.setdefault(entry.shape, entry)


def misfit_warnings(plan: CheckpointPlan) -> list[str]:
    """Return a sentence where a scheme fits only some shapes."""
    for layer in plan.layers:
        left, taken, reason = _Total(), _Total(), ""
        for decision in plan.decisions:
            if decision.layer == layer:
                taken.add(decision.entry)
            elif _is_left(decision, layer):
                reason = reason or decision.reason
                left.add(decision.entry)
        if left.count:
            return [_partly(layer, left, taken, reason)]
    return []


def _is_left(decision: TensorDecision, layer: LayerScheme) -> bool:
    """Return whether a linear weight is kept as a misfit."""
    entry = decision.entry
    if not decision.kept_by_default or entry.dtype not in WEIGHT_DTYPES:
        return False
    if is_fused_experts(entry) or decision.reason == EXPERTS_AS_ROWS:
        return True
    return not_a_weight(entry) is None and misfit(entry, layer) is not None


def _fits(entry: TensorEntry, layer: LayerScheme) -> bool:
    return not_a_weight(entry) is None and misfit(entry, layer) is None


def _partly(layer: LayerScheme, left: _Total, taken: _Total, reason: str) -> str:
    shapes = (*left.shapes.values(), *taken.shapes.values())
    fitting = (o.name for o in _others(layer) if all(_fits(e, o) for e in shapes))
    found = next(fitting, None)
    remedy = "no scheme like it fits all" if found is None else f"{option('to', found)} fits all of them"
    first = shapes[0]
    return (
        f"{size_of(left.nbytes)} of {size_of(left.nbytes + taken.nbytes)} of linear weights stay in "
        f"{first.dtype}: {layer} does not fit {count(left.count, 'weight')}, such as {printable(first.name)} "
        f"({reason}); {remedy}"
    )


def error_warnings(result: RunResult) -> list[str]:
    """Return a sentence about large relative errors, with a finer scheme."""
    number, worst, most = 0, None, ROUGH
    for outcome in result.outcomes:
        relative = outcome.error.relative
        number += relative > ROUGH
        if relative > most:
            worst, most = outcome, relative
    if worst is None:
        return []
    whose = "all weights" if number == len(result.outcomes) else count(number, "weight")
    said = (
        f"the relative error of {whose} is above {ROUGH}, that of {printable(worst.weight.module)} is "
        f"{most:.2f}"
    )
    finer = _finer(worst.weight.layer)
    return [said if finer is None else f"{said}; {option('to', finer.name)} has less error"]


def _others(layer: LayerScheme) -> Iterator[LayerScheme]:
    """Yield schemes like ``layer`` that fit more shapes, the closest first."""
    element = str(layer.weight).partition(":")[0]
    for blocks in ("g64", "g32", "g16", "channel") if layer.input is None else ():
        with contextlib.suppress(ZeropointError):  # not every element has a layout for every block
            found = layer_scheme(f"{element}:{blocks}", layer.codec)
            yield LayerScheme(codec=layer.codec, name=f"{element}:{blocks}", weight=found.weight)
    yield from sorted(
        preset_layers(layer.codec),
        key=lambda other: (abs(other.weight.bits - layer.weight.bits), other.input != layer.input),
    )


def _finer(layer: LayerScheme) -> LayerScheme | None:
    """Return the weight-only preset closest to ``layer`` in bits, or None."""
    own = layer.weight
    alone = [
        other for other in preset_layers(layer.codec) if other.input is None and other.weight.bits >= own.bits
    ]
    return min(
        alone, key=lambda other: (other.weight.bits, other.weight.element != own.element), default=None
    )
