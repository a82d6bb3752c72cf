"""Learners: which quantizers a model trains with, by the names under which people know them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from ..errors import RecipeError, UnsupportedError, near_misses
from ..params import QuantizationParams
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..training import (
    FakeQuantize,
    FollowedRange,
    LearnedScale,
    LearnedThreshold,
    Pact,
    Quantizer,
    ThresholdRule,
)
from .dynamic_quantize import DynamicQuantize


def follow(weight: torch.Tensor, scheme: Scheme) -> nn.Module:  # noqa: ARG001 (what a learner takes)
    """Return a quantizer whose parameters are those of the weight at each step."""
    return DynamicQuantize(Activation(scheme=scheme, dynamic=True))


def fixed(params: QuantizationParams, count: int) -> Quantizer:  # noqa: ARG001 (what a learner takes)
    """Return a quantizer that keeps the parameters of calibration."""
    return FakeQuantize(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """How the quantizers of a model are made.

    weight: from a weight as a matrix, a row for each output channel, and its scheme. A quantizer is a
    :class:`~zeropoint.training.Quantizer`, or a :class:`~zeropoint.models.DynamicQuantize`.
    activation: from the parameters that calibration found for a static input or output, and the number of
    channels of one sample.

    >>> Learner(weight=FakeQuantize.from_tensor).activation is fixed
    True
    """

    weight: Callable[[torch.Tensor, Scheme], nn.Module] = follow
    activation: Callable[[QuantizationParams, int], Quantizer] = fixed


def _average_activation(params: QuantizationParams, count: int) -> Quantizer:  # noqa: ARG001 (as the others)
    return FollowedRange(params)


def _lsq_activation(params: QuantizationParams, count: int) -> Quantizer:
    return LearnedScale(params, count=max(1, count // params.num_parameter_sets))


def _threshold_weight(weight: torch.Tensor, scheme: Scheme) -> nn.Module:
    return LearnedThreshold.from_tensor(weight, scheme, ThresholdRule.THREE_SD)


def _threshold_activation(params: QuantizationParams, count: int) -> Quantizer:  # noqa: ARG001 (as the others)
    if params.zero_point is not None:
        raise UnsupportedError(f"{params.scheme} has a zero point; thresholds are for symmetric codes")
    scale = _one_scale(params)
    top = max(-params.scheme.qmin, params.scheme.qmax + 1) * float(params.scheme.element_step)
    return LearnedThreshold(params.scheme, scale * top, shape=params.shape, dtype=params.dtype)


def _pact_activation(params: QuantizationParams, count: int) -> Quantizer:  # noqa: ARG001 (as the others)
    if params.scheme.zero_point is not ZeroPoint.NONE:
        raise UnsupportedError(f"{params.scheme} has a zero point; PACT learns the end of a range from 0")
    return Pact(params.scheme, float(_one_scale(params)) * params.scheme.qmax, dtype=params.dtype)


def _one_scale(params: QuantizationParams) -> torch.Tensor:
    scale = params.effective_scale()
    if scale is None:
        raise UnsupportedError(f"{params.scheme} has no scale to learn; use the learner minmax")
    return scale


LEARNERS: Mapping[str, Learner] = MappingProxyType({
    "minmax": Learner(),
    "average": Learner(activation=_average_activation),
    "fixed": Learner(weight=FakeQuantize.from_tensor),
    "lsq": Learner(weight=LearnedScale.from_tensor, activation=_lsq_activation),
    "tqt": Learner(weight=_threshold_weight, activation=_threshold_activation),
    "pact": Learner(activation=_pact_activation),
})  # fmt: skip
"""By name. Scales of weights and of static activations:

``minmax``: follow the weights; stay. ``average``: follow the weights; follow a moving average of extremes.
``fixed``: stay; stay. ``lsq``: are learned; are learned (LSQ; LSQ+ with zero points). ``tqt``: powers of two
under learned thresholds, both. ``pact``: follow the weights; the ends of unsigned ranges are learned."""


def learner_named(learner: str | Learner) -> Learner:
    """Return the learner with this name; a learner is itself.

    Raises RecipeError for an unknown name.

    >>> learner_named("pact").weight is follow
    True
    """
    if isinstance(learner, Learner):
        return learner
    name = str(learner)  # of anything, a list too, which is no key of a mapping
    if name not in LEARNERS:
        raise RecipeError(f"learner {learner!r} is unknown; {near_misses(name, LEARNERS)}")
    return LEARNERS[name]
