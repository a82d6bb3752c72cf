"""What a plan says of qualities: schemes that a method refuses, and what a method with data would gain."""

from __future__ import annotations

from collections.abc import Iterator

from ...codecs.protocol import LayerScheme
from ...errors import option
from ...methods import NEAREST
from ...recipes import PickedMethod, Quality, picked
from .checkpoint_plan import CheckpointPlan, kinds_of

_FEW_BITS = 6
"""Bits up to which outputs of a model are closer with data by more than their spread."""
_EXAMPLE = "for int4:g64 on SmolLM2-135M the KL divergence falls from 0.338 to 0.070"
"""What docs/methods.md has measured."""


def of_lower_quality(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence about each scheme whose method is of a lower quality than the recipe asks for."""
    quality = plan.recipe.quality
    if quality is None:
        return
    for layer, method in {(weight.layer, weight.method): None for weight in kinds_of(plan.weights)}:
        pick = _picked(quality, layer)
        if pick.refusal and pick.method == method:
            asked = option("quality", str(quality))
            yield f"{asked} falls back on {method} for {layer}: {pick.refusal}"


def offered_quality(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence where a scheme of few bits is rounded to nearest, by default."""
    asked = not plan.recipe.is_bare or plan.statistics or plan.solved
    if asked or plan.source.config is None:
        return
    layers = {weight.layer for weight in kinds_of(plan.weights) if weight.method == NEAREST}
    if any(layer.weight.bits <= _FEW_BITS and not _picked(Quality.GOOD, layer).refusal for layer in layers):
        options = f"{option('quality', str(Quality.GOOD))} and {option('calibration', metavar='DATA')}"
        yield f"with {options} outputs come closer: {_EXAMPLE}"


def _picked(quality: Quality, layer: LayerScheme) -> PickedMethod:
    return picked(quality, layer.weight, quantized_inputs=layer.input is not None)
