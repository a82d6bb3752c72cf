"""K-means codebooks: a table of least squared error per weight.

    minimize over t:   sum_i (s_b(i) min_j |t_j - w_i / s_b(i)|)^2

The scheme says how many values the table has and which scales there are, by a codebook of as many values,
such as ``nf4:g64`` or ``codebook[0,1,2,3]:cast`` (no scales: k-means of the weights themselves). Scales stay
as under round-to-nearest; the table is the weighted k-means of the numbers over their scales
(:mod:`zeropoint.ops.clusters`), rounded to float32. The result has the scheme ``codebook[...]`` of these
values, so that it is saved, loaded and decoded like any other. A weight for which the scheme's own table has
no more error keeps it.

A scheme whose blocks have tables of their own, such as ``table4:channel:scale=float16``, stays as it is: each
table is the k-means of its block, which method ``mse`` finds, too (:mod:`zeropoint.ops.block_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats import CodebookFormat
from ..formats.codebooks import float32
from ..functional import quantize
from ..layout.blocks import spread_blocks
from ..ops.clusters import fitted
from ..params import QuantizationParams
from ..schemes import Scheme
from ..schemes.scale_rules import Store
from .method import NO_DATA, LayerData, LayerResult, Method, Scope, require_scheme
from .mse import METHOD as MSE
from .nearest import METHOD as NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCodebook(Method):
    """Fit the table of a codebook, whose ends lie within the numbers."""

    name: ClassVar[str] = "kmeans"
    formula: ClassVar[str] = "argmin over the table t of sum (s min_j |t_j - w / s|)^2, s as under nearest"
    source: ClassVar[str] = "k-means of numbers by dynamic programming (Wu, 1991; arXiv:1701.07204)"

    def scope(self, scheme: Scheme) -> Scope:
        """Layers, for a codebook; for block tables the scope of ``mse``."""
        return MSE.scope(scheme) if _of_blocks(scheme) else Scope.LAYER

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse elements other than tables, and what scales alone do not express."""
        if _of_blocks(scheme):
            return MSE.refusal(scheme)
        if not isinstance(scheme.element, CodebookFormat):
            return f"method kmeans fits tables of codebooks, unlike {scheme}; use nf4:g64, or method mse"
        if scheme.chained is not None or any(level.stores(Store.LATE) for level in scheme.levels):
            return f"method kmeans needs plain scales, unlike {scheme}; use method mse, or nearest"
        return None

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of numbers, weights, their order and sums, in float64."""
        return MSE.value_bytes(scheme) if _of_blocks(scheme) else 80

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes of its own table, the result's element.

        >>> q = METHOD.quantize(torch.tensor([0.0, 1.0, 4.0, 5.0]), Scheme.parse("binary:cast")).q
        >>> str(q.scheme), q.dequantize()
        ('codebook[0.5,4.5]:cast', tensor([0.5000, 0.5000, 4.5000, 4.5000]))
        """
        require_scheme(self, scheme)
        if _of_blocks(scheme):
            return MSE.quantize(weight, scheme, data)
        start = NEAREST.quantize(weight, scheme, replace(data, out=None)).q
        with torch.no_grad():
            table = _table(weight.detach(), start.params)
        if table is None:
            return LayerResult(q=start)
        own = replace(scheme, element=table)
        params = QuantizationParams.of(own, start.shape, start.dtype, list(start.params.stored))
        first, second = LayerResult(q=start), LayerResult(q=quantize(weight, params))
        better = second.report(weight).squared_error < first.report(weight).squared_error
        return second if better else first


METHOD = FittedCodebook()


def _of_blocks(scheme: Scheme) -> bool:
    """Return whether each block has a table, which is its scale."""
    return scheme.element.per_scale > 1


def _table(weight: torch.Tensor, params: QuantizationParams) -> CodebookFormat | None:
    """Return the best table under given scales, or None without two values."""
    scheme, numbers = params.scheme, weight.double().reshape(-1)
    squares, scale = torch.ones_like(numbers), params.effective_scale()
    if scale is not None and numbers.numel():
        spread = spread_blocks(scale.double(), scheme.granularity, tuple(weight.shape))
        spread = spread.expand(weight.shape).reshape(-1)
        numbers = torch.where(spread == 0, 0.0, numbers / spread)
        squares = spread.square()
    if numbers.numel() == 0:
        return None
    count = scheme.element.code_count
    found = [float32(value) + 0.0 for value in fitted(numbers.numpy(), squares.numpy(), count).tolist()]
    if len(set(found)) < 2:
        return None
    return CodebookFormat((*found, *[found[-1]] * (count - len(found))))
