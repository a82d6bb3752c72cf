"""Calibration results in a plan: statistics, codes, and static input scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...codecs.data_scales import CacheScales
from ...codecs.model_format import WEIGHTED
from ...codecs.protocol import LayerScheme
from ...codecs.stored_forms import RowOrder
from ...errors import CalibrationError, all_of, count, option, printable
from ...methods import NEAREST, LayerData, Method, method_named
from ...methods.channels import needs_model
from ...methods.method import MEAN_SQUARE
from ...recipes import PickedMethod, Quality, picked
from ...schemes import Scheme
from ...tensor import QuantizedTensor
from .additions import with_readers
from .checkpoint_plan import CheckpointPlan, kinds_of, remade
from .output_tensors import Output

if TYPE_CHECKING:
    from ...methods.channels import ChannelFold
    from ...stats import Statistics


def layer_data(
    plan: CheckpointPlan, weight: Output, extremes: tuple[float, float] | None, mean: float | None = None
) -> LayerData:
    """Return the data for a weight's method, with its group's extremes."""
    known = plan.solved.get(weight.module)
    if known is not None:
        q = QuantizedTensor.load(known.path)
        scales = q.params.scales[0].flatten().tolist() if weight.layer.codec.needs_mean(weight.layer) else []
        return LayerData(solved=q, mean=math.fsum(scales) / len(scales) if scales else None)
    columns = weight.reader.form.columns
    statistics = plan.statistics.get(weight.module, {})
    if columns is not None:
        statistics = {name: _in_order(found, columns) for name, found in statistics.items()}
    return LayerData(statistics=statistics, extremes=extremes if mean is None else None, mean=mean)


def _in_order(found: Statistics, columns: RowOrder) -> Statistics:
    """Return input statistics in the column order of a file."""
    features = next((len(value) for value in found.state.values() if value.ndim), 0)
    at = columns.model_rows(torch.arange(features))
    return replace(
        found, state={name: value[at] if value.ndim else value for name, value in found.state.items()}
    )


def solving_scheme(layer: LayerScheme) -> Scheme:
    """Return the scheme for solving a weight: without a scale mean.

    Scales less their mean follow from all scales of a weight, and are made once it is solved.
    """
    return layer.codec.with_mean(layer, 0.0).weight if layer.codec.needs_mean(layer) else layer.weight


def require_statistics(plan: CheckpointPlan) -> None:
    """Raise CalibrationError for a method, mixture or static input without data."""
    mixture = plan.recipe.mixture(plan.codec)
    of_importance = plan.codec.model_format.of_importance
    if mixture and not plan.statistics and (mixture.endswith(WEIGHTED) or mixture in of_importance):
        raise CalibrationError(
            f"mixture {mixture} needs to know which inputs are large; pass "
            f"{option('imatrix', metavar='FILE')}"
            f"{'' if mixture in of_importance else ', or leave out ' + WEIGHTED}"
        )
    static = static_inputs(plan)
    added = {origin.entry.name for origin in plan.outputs.added} if static else set()
    for weight in plan.weights:
        if weight.layer in static and f"{weight.module}.{static[weight.layer]}" not in added:
            raise CalibrationError(
                f"{printable(weight.module)}: inputs {weight.layer.input} need scales observed on data; pass "
                f"{option('calibration', metavar='FILE')} with text, or make inputs dynamic"
            )
    if unlearned_cache(plan) is not None:
        raise without_keys()
    require_statistics_of_methods(plan)


def without_keys() -> CalibrationError:
    """Return the error of cache scales without a run of the model."""
    return CalibrationError(
        f"{option('kv_scales', True)} learns from keys and values of the model; pass "
        f"{option('calibration', metavar='FILE')} with text"
    )


def require_statistics_of_methods(plan: CheckpointPlan) -> None:
    """Raise CalibrationError where a method lacks statistics of a weight's inputs."""
    for weight in plan.weights:
        method = method_named(weight.method)
        reason = None if weight.module in plan.solved else needs_model(method, weight.layer.weight)
        if reason is not None:
            raise CalibrationError(reason)
        needs = method.needs
        if weight.module not in plan.solved and needs.keys() - plan.statistics.get(weight.module, {}).keys():
            data = option("calibration", metavar="FILE"), option("imatrix", metavar="FILE")
            others = f", or {data[1]}" if needs.keys() == {MEAN_SQUARE} else ""
            remedy = (
                "which the data do not have; give it another method by a rule, or name it in "
                f"{option('ignore')}"
                if plan.statistics
                else f"pass {data[0]} with text, or random{others}"
            )
            raise CalibrationError(
                f"{printable(weight.module)}: method {weight.method} needs the {' and '.join(needs)} of its "
                f"inputs{',' if plan.statistics else ';'} {remedy}"
            )


def static_inputs(plan: CheckpointPlan) -> dict[LayerScheme, str]:
    """Return schemes with static inputs, and a parameter's suffix for each."""
    return {
        layer: layer.codec.input_names.needed(layer.input)
        for layer in plan.layers
        if layer.input is not None and not layer.input.dynamic and layer.codec.input_names is not None
    }


def unlearned_cache(plan: CheckpointPlan) -> CacheScales | None:
    """Return the place of unlearned cache scales, or None."""
    place = plan.codec.cache if plan.selection.kv_scales else None
    known = place and any(new.entry.name.endswith(f".{place.key}") for new in plan.outputs.added)
    return None if known else place


_FEW_BITS = 6
"""Largest bit width at which calibration data lowers the divergence by more than its standard error."""
_EXAMPLE = "for int4:g64 on SmolLM2-135M the KL divergence falls from 0.338 to 0.070"
"""Measurement from docs/methods/README.md."""


def of_lower_quality(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence for each method that is not the quality's own."""
    quality = plan.recipe.quality
    kinds = {(weight.layer, weight.method): None for weight in kinds_of(plan.weights)}
    for layer, method in kinds if quality is not None else ():
        pick = _picked(quality, layer)
        if pick.refusal and pick.method == method:
            asked = option("quality", str(quality))
            yield f"{asked} falls back on {method} for {layer}: {pick.refusal}"
    yield from of_no_inputs(plan)


def of_no_inputs(plan: CheckpointPlan) -> Iterator[str]:
    """Yield a sentence for each method of weights without inputs."""
    found: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if decision.no_inputs:
            found.setdefault(decision.method if decision.quantized else "", []).append(decision.entry.name)
    asked = "the method" if plan.recipe.quality is None else option("quality", str(plan.recipe.quality))
    for method, names in found.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        listed = f"{all_of(map(printable, names[:_LISTED]))}{more}"
        weights = f"{count(len(names), 'weight')} without inputs to learn from"
        yield (
            f"{asked} falls back on {method} for {weights}: {listed}"
            if method
            else f"{weights} stay floats, since scales of their inputs are not known: {listed}"
        )


_LISTED = 3


def without_data(weight: Output) -> Method:
    """Return the method of a weight where it has no inputs."""
    return replace(weight.layer.assignment, method=weight.method).without_inputs().weight_method


def require_inputs(known: Sized, others: Sequence[Output]) -> None:
    """Raise CalibrationError where no weight is in a Linear layer.

    known: weights in Linear layers of the model. others: the rest.
    """
    if others and not known:
        raise CalibrationError(
            f"{printable(others[0].module)} is in no Linear layer of the model, and neither are the others; "
            f"quantize them by {option('method', 'mse')}, which needs no data"
        )


def replanned(plan: CheckpointPlan, names: Iterable[str], folds: Mapping[str, ChannelFold]) -> CheckpointPlan:
    """Return a plan after a run, where some tensors have no inputs.

    names: of these. folds: of tensors, by name.
    """
    names = frozenset(names)
    same = folds is plan.folds or not (folds or plan.folds)
    if same and plan.selection.without_inputs.issuperset(names):
        return plan
    made = remade(plan, folds=folds, without_inputs=plan.selection.without_inputs.union(names))
    own, said = {reader.entry.name for reader in made.outputs.added}, {*of_no_inputs(plan)}
    made = with_readers(made, [each for each in plan.outputs.added if each.entry.name not in own])
    kept = (note for note in made.notes if note not in said)
    return replace(made, notes=(*kept, *of_no_inputs(made)))


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
