"""Calibration results in a plan: statistics, codes, and static input scales."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...codecs.model_format import WEIGHTED
from ...codecs.protocol import LayerScheme
from ...codecs.stored_forms import RowOrder
from ...errors import CalibrationError, option, printable
from ...methods import LayerData, method_named
from ...methods.channels import needs_model
from ...methods.method import MEAN_SQUARE
from ...schemes import Scheme
from ...tensor import QuantizedTensor
from .checkpoint_plan import CheckpointPlan
from .output_tensors import Output

if TYPE_CHECKING:
    from ...stats import Statistics


def layer_data(
    plan: CheckpointPlan, weight: Output, extremes: tuple[float, float] | None, mean: float | None = None
) -> LayerData:
    """Return the data for a weight's method, with its group's extremes."""
    known = plan.solved.get(weight.module)
    if known is not None:
        q = QuantizedTensor.load(known.path)
        return LayerData(solved=q, mean=_mean_of(q) if weight.layer.codec.needs_mean(weight.layer) else None)
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


def _mean_of(q: QuantizedTensor) -> float:
    """Return the mean of all scales, of their exact sum."""
    scales = q.params.scales[0].flatten().tolist()
    return math.fsum(scales) / max(1, len(scales))


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
    require_statistics_of_methods(plan)


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
