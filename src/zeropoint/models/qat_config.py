"""QAT configurations: named sets of quantizers, and groups of what they train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import RecipeError, UnsupportedError, near_misses
from ..params import QuantizationParams
from ..recipes import Activation
from ..schemes import Scheme, ZeroPoint
from ..training import (
    FakeQuantize,
    LearnedScale,
    LearnedThreshold,
    MovingAverageFakeQuantize,
    Pact,
    Quantizer,
    ThresholdRule,
)
from .dynamic_quantize import DynamicQuantize


def follow(weight: torch.Tensor, scheme: Scheme) -> nn.Module:  # noqa: ARG001 (part of the signature)
    """Return a quantizer with parameters from the weight at each step."""
    return DynamicQuantize(Activation(scheme=scheme, dynamic=True))


def fixed(params: QuantizationParams, count: int) -> Quantizer:  # noqa: ARG001 (part of the signature)
    """Return a quantizer that keeps the parameters of calibration."""
    return FakeQuantize(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class QATConfig:
    """Two factories that create the quantizers of a prepared model, like ``torch.ao.quantization.QConfig``.

    Args:
        weight: creates a quantizer from a weight, shape (out_channels, in_features), and its scheme. A
            quantizer is a :class:`~zeropoint.training.Quantizer` or a
            :class:`~zeropoint.models.DynamicQuantize`.
        activation: creates a quantizer from the calibrated parameters of a static input or output, and the
            number of channels of one sample.

    Example:
        >>> QATConfig(weight=FakeQuantize.from_tensor).activation is fixed
        True
    """

    weight: Callable[[torch.Tensor, Scheme], nn.Module] = follow
    activation: Callable[[QuantizationParams, int], Quantizer] = fixed


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
        raise UnsupportedError(f"{params.scheme} has no scale to learn; use qat='minmax'")
    return scale


QAT_CONFIGS: Mapping[str, QATConfig] = MappingProxyType(
    {
        "minmax": QATConfig(),
        "average": QATConfig(activation=lambda params, _: MovingAverageFakeQuantize(params)),
        "fixed": QATConfig(weight=FakeQuantize.from_tensor),
        "lsq": QATConfig(
            weight=LearnedScale.from_tensor,
            activation=lambda params, n: LearnedScale(params, count=max(1, n // params.num_parameter_sets)),
        ),
        "tqt": QATConfig(
            weight=lambda weight, scheme: LearnedThreshold.from_tensor(
                weight, scheme, ThresholdRule.THREE_SD
            ),
            activation=_threshold_activation,
        ),
        "pact": QATConfig(activation=_pact_activation),
    }
)
"""QAT configurations by name. How the scales of weights, and of static activations, are updated:

``minmax``: recomputed from the weights; constant. ``average``: recomputed from the weights; moving average of
the extremes. ``fixed``: constant; constant. ``lsq``: learned; learned (LSQ; LSQ+ with zero points). ``tqt``:
powers of two with learned thresholds, both. ``pact``: recomputed from the weights; the upper ends of unsigned
ranges are learned."""


def qat_config(qat: str | QATConfig) -> QATConfig:
    """Return a QAT configuration by name, configurations unchanged.

    Raises RecipeError for an unknown name.

    >>> qat_config("pact").weight is follow
    True
    """
    if isinstance(qat, QATConfig):
        return qat
    name = str(qat)  # of anything, a list too, which is no key of a mapping
    if name not in QAT_CONFIGS:
        raise RecipeError(
            f"qat {qat!r} is unknown; {near_misses(name, QAT_CONFIGS)}; minmax is plain training through a "
            "straight-through estimator, with scales that follow the weights"
        )
    return QAT_CONFIGS[name]


def parameter_groups(
    model: nn.Module, *, lr: float, scale_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return optimizer groups: the model's parameters, and its quantizers'.

    Args:
        model: prepared.
        lr, weight_decay: of the first group.
        scale_lr: of the second group, a tenth of ``lr`` unless given; decay would pull scales towards 0, and
            is 0 there. Parameters that do not train are left out.

    Example:
        >>> from zeropoint.models import prepare
        >>> prepared = prepare(nn.Sequential(nn.Linear(64, 8)), "w4a16", qat="lsq")
        >>> [(len(group["params"]), group["lr"]) for group in parameter_groups(prepared, lr=0.5)]
        [(2, 0.5), (1, 0.05)]
    """
    learned = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, Quantizer)
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    weights = [p for p in model.parameters() if p.requires_grad and id(p) not in learned]
    rate = lr / 10 if scale_lr is None else scale_lr
    return [
        {"params": weights, "lr": lr, "weight_decay": weight_decay},
        {"params": list(learned.values()), "lr": rate, "weight_decay": 0.0},
    ]
