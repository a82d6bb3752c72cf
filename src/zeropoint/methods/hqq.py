r"""Half-quadratic quantization: zero points of least outlier-tolerant error, without data.

    minimize over z:   sum_i |w_i - (q_i - z) s|^p        with p = 0.7, for each block

by half-quadratic splitting. With u = UNIT s and r = (w - (q - z) s) / u, each of `STEPS` iterations sets

    e <- sign(r) max(|r| - |r|^(p - 1) / beta, 0)         the estimate of an outlier's error
    z <- mean of q - w / s + UNIT e over the block
    beta <- KAPPA beta                                    from BETA

The scales stay as under round-to-nearest. Of all iterates, the start from ``nearest`` among them, a block
keeps the zero point of least squared error: the one of least 0.7-norm has up to 3 % more squared error, and
up to 1 % less of its own. Integer zero points are refused: rounding undoes moves of less than half a code,
which most of them are.

Source: Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023
(https://mobiusml.github.io/hqq_blog/), and hqq 0.2.8 (core/optimize.py), which takes the last of 20 steps, or
stops all blocks where the mean error of the whole weight grows. It takes errors as they are, so that numbers
of the size of weights, whose errors are small, have no outliers for its beta; here they are counted in units
of the scale. Each block keeps its best, and does not depend on others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats import RoundingMode
from ..formats.torch_dtypes import wide_dtype
from ..functional import quantize
from ..layout.blocks import pairwise_sums, spread_blocks
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..params.ladder import Ladder
from ..schemes import Granularity, Scheme, ZeroPoint
from .method import NO_DATA, LayerData, LayerResult, Method, Scope, require_scheme
from .nearest import METHOD as NEAREST

P, BETA, KAPPA, STEPS = 0.7, 10.0, 1.01, 40
UNIT = 1.5
"""Steps in which errors are counted: chosen on normal, Laplace's and Student's numbers of 2 to 4 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfQuadratic(Method):
    """Real zero points moved by the 0.7-norm, the best kept per block."""

    name: ClassVar[str] = "hqq"
    formula: ClassVar[str] = (
        "z of least squared error on the way to argmin of sum |w - (q - z) s|^0.7, s as under nearest"
    )
    source: ClassVar[str] = "HQQ (Badri and Shaji, 2023)"

    def scope(self, scheme: Scheme) -> Scope:
        """Blocks, unless the whole tensor is one."""
        return Scope.LAYER if scheme.granularity == Granularity.tensor() else Scope.BLOCKS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse other zero points, several scale levels, and random rounding."""
        if scheme.zero_point is not ZeroPoint.REAL:
            return f"method hqq moves real zero points, and {scheme} has none; use asym=real, or method mse"
        if len(scheme.scales) != 1 or scheme.chained is not None:
            return f"method hqq needs one level of scales, unlike {scheme}; use method mse"
        if scheme.rounding.mode is RoundingMode.STOCHASTIC:
            return f"method hqq compares errors, which {scheme} draws at random; use half_even"
        return None

    def value_bytes(self, scheme: Scheme) -> int:  # noqa: ARG002 (all schemes take the same)
        """Return the memory of float64 temporaries: values, decoded, errors, sums."""
        return 48

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes, each block at most as wrong as ``nearest``.

        >>> w = torch.tensor([[0.0, 0.4, 0.4, 0.4, 0.4, 3.0]])
        >>> METHOD.quantize(w, Scheme.parse("uint2:channel:asym=real")).q.dequantize()
        tensor([[0.2667, 0.2667, 0.2667, 0.2667, 0.2667, 3.2667]])
        """
        require_scheme(self, scheme)
        start = NEAREST.quantize(weight, scheme, data).q
        if weight.numel() == 0:
            return LayerResult(q=start)
        with torch.no_grad(), gradual_underflow():
            params = _moved(weight.detach(), start.params)
        return LayerResult(q=quantize(weight, params, out=start))


METHOD = HalfQuadratic()


def _moved(weight: torch.Tensor, params: QuantizationParams) -> QuantizationParams:
    """Return ``params`` with the best zero points that the iterations meet."""
    level, values = params.scheme.scales[0], weight.double()
    scale = Ladder.of(level, weight.dtype).load(params.scales[0])
    units = spread_blocks(scale * UNIT, level.granularity, tuple(weight.shape))
    count = pairwise_sums(torch.ones_like(values), level.granularity)
    best = zero = params.zero_point
    least, beta = torch.full_like(count, torch.inf), BETA
    for step in range(STEPS + 1):
        assert best is not None
        assert zero is not None
        decoded = (
            quantize(weight, replace(params, zero_point=zero)).dequantize(wide_dtype(weight.dtype)).double()
        )
        left = (values - decoded) / units
        error = pairwise_sums(left.square(), level.granularity)
        best, least = torch.where(error < least, zero, best), torch.minimum(error, least)
        if step < STEPS:
            outlying = left.sign() * (left.abs() - left.abs().pow(P - 1) / beta).clamp(min=0)
            move = pairwise_sums(outlying - left, level.granularity) / count * UNIT
            zero = torch.where(torch.isfinite(move), zero.double() + move, zero.double()).to(zero.dtype)
            beta *= KAPPA
    return replace(params, zero_point=best)
