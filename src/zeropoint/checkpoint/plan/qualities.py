"""Notes on quality: refused methods, and the gain from calibration data."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...codecs.protocol import LayerScheme
from ...errors import all_of, count, option, printable
from ...methods import NEAREST
from ...recipes import PickedMethod, Quality, picked
from .checkpoint_plan import CheckpointPlan, kinds_of
from .selection import is_embedding

_FEW_BITS = 6
"""Bits up to which outputs of a model are closer with data by more than their spread."""
_EXAMPLE = "for int4:g64 on SmolLM2-135M the KL divergence falls from 0.338 to 0.070"
"""Measurement from docs/methods/README.md."""


def of_lower_quality(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence for each scheme below the quality of the recipe."""
    quality = plan.recipe.quality
    if quality is None:
        return
    for layer, method in {(weight.layer, weight.method): None for weight in kinds_of(plan.weights)}:
        pick = _picked(quality, layer)
        if pick.refusal and pick.method == method:
            asked = option("quality", str(quality))
            yield f"{asked} falls back on {method} for {layer}: {pick.refusal}"
    yield from _without_inputs(plan, quality)


def _without_inputs(plan: CheckpointPlan, quality: Quality) -> Iterator[str]:
    """Yield a sentence about embeddings, which have no inputs to learn from."""
    entries, config = plan.source.entries, plan.source.config or {}
    found: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if decision.layer is None or _picked(quality, decision.layer).method == decision.method:
            continue
        if is_embedding(decision.entry, entries, config):
            found.setdefault(decision.method, []).append(decision.entry.name)
    for method, names in found.items():
        yield (
            f"{option('quality', str(quality))} falls back on {method} for {count(len(names), 'weight')} "
            f"without inputs to learn from: {all_of(map(printable, names[:_LISTED]))}"
            f"{f' and {len(names) - _LISTED} more' if len(names) > _LISTED else ''}"
        )


_LISTED = 3


def offered_quality(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence where few-bit weights are rounded to nearest by default."""
    asked = not plan.recipe.is_bare or plan.statistics or plan.solved
    if asked or plan.source.config is None:
        return
    layers = {weight.layer for weight in kinds_of(plan.weights) if weight.method == NEAREST}
    if any(layer.weight.bits <= _FEW_BITS and not _picked(Quality.GOOD, layer).refusal for layer in layers):
        options = f"{option('quality', str(Quality.GOOD))} and {option('calibration', metavar='DATA')}"
        yield f"with {options} outputs come closer: {_EXAMPLE}"


@functools.lru_cache(maxsize=256)
def _picked(quality: Quality, layer: LayerScheme) -> PickedMethod:
    return picked(quality, layer.weight, quantized_inputs=layer.input is not None)
