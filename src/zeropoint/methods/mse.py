"""Scales of least squared error per block, searched among storable ones.

    minimize over s, z:   sum_i (dequantize(quantize(w_i; s, z)) - w_i)^2        for each block

Of schemes for which it is known which scales can be best, it is rule ``search``
(:mod:`zeropoint.ops.scale_search`), which kernels run; signed scales are what it finds for the numbers or for
their negatives. Of others, whose zero points or coarser levels are searched too, it starts from what
round-to-nearest gives; blocks of a coarser level are searched before finer ones. No block is worse than under
``nearest``. Offsets, and a scale of the whole tensor above others, stay as they are: rows are independent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..formats import RoundingMode
from ..formats.torch_dtypes import wide_dtype
from ..functional import choose_params, quantize
from ..ops import library, scale_search
from ..ops.registry import Op
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..params.ladder import Ladder
from ..params.scale_windows import has_window
from ..params.tensors import Params
from ..schemes import Granularity, Scheme
from ..schemes.dialects import ZEROPOINT
from ..schemes.scale_rules import LINEAR, Pick, Search, Store
from ..tensor import QuantizedTensor
from .method import NO_DATA, LayerData, LayerResult, Method, Scope, require_scheme
from .nearest import METHOD as NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastSquaredError(Method):
    """Search of scales, and zero points, of least squared error per block."""

    name: ClassVar[str] = "mse"
    formula: ClassVar[str] = "argmin over s, z of sum (dequantize(quantize(w; s, z)) - w)^2, for each block"
    source: ClassVar[str] = (
        "a sweep over the codes of block scales, as ScaleSweep does for NVFP4; a line search for others"
    )

    def scope(self, scheme: Scheme) -> Scope:
        """Blocks, or the layer if the searched scale is tensor-wide."""
        searched = (scheme.scales[index].granularity for index in scale_search.searched_levels(scheme))
        return Scope.LAYER if Granularity.tensor() in searched else Scope.BLOCKS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse casts, random rounding, and scales rounded after encoding."""
        return unsearchable(self.name, scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the temporaries of a whole weight; pieces are constant."""
        return scale_search.WHOLE_BYTES if self.scope(scheme) is Scope.LAYER else 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes, each block at most as wrong as ``nearest``.

        >>> METHOD.quantize(
        ...     torch.tensor([[1.0, 1.0, 0.95, 1.6]]), Scheme.parse("int2:channel")
        ... ).q.dequantize()
        tensor([[1.1375, 1.1375, 1.1375, 1.1375]])
        """
        require_scheme(self, scheme)
        by_rule = _searching(scheme)
        if by_rule is None:
            return searched(weight, NEAREST.quantize(weight, scheme, data).q)
        out = None if data.out is None else _under(by_rule, data.out)
        q = NEAREST.quantize(weight, by_rule, replace(data, out=out)).q
        return LayerResult(q=_under(scheme, q))


METHOD = LeastSquaredError()


def _searching(scheme: Scheme) -> Scheme | None:
    """Return the scheme whose rule ``search`` finds these scales, or None."""
    if not has_window(scheme) or scale_search.searched_levels(scheme) != [0]:
        return None
    finest, *coarser = scheme.scales
    if isinstance(finest.rule, Search) or finest.granularity == Granularity.tensor():
        return None
    return replace(scheme, scales=(replace(finest, rule=Search()), *coarser))


def _of_one_sign(scheme: Scheme) -> Scheme | None:
    """Return the scheme whose rule ``search`` finds signed scales' magnitudes, or None."""
    if len(scheme.scales) != 1 or not scheme.scales[0].picks(Pick.SIGNED) or scheme.offsets:
        return None
    unsigned = replace(scheme, scales=(replace(scheme.scales[0], rule=LINEAR),), dialect=ZEROPOINT)
    if not has_window(unsigned):
        return None
    return replace(unsigned, scales=(replace(scheme.scales[0], rule=Search()),))


def _of_either_sign(
    x: torch.Tensor, start: QuantizationParams, one_sign: Scheme, importance: torch.Tensor | None
) -> QuantizationParams:
    """Return the best scales: the start's, or searched ones of either sign.

    The codes of x under a scale -s equal the codes of -x under s.
    """
    ladder, found = Ladder.of(start.scheme.scales[0], x.dtype), [start]
    for sign in (1, -1):
        scale = sign * ladder.load(_of_magnitudes(sign * x, one_sign, importance))
        found.append(replace(start, scales=(ladder.store(scale),)))
    return scale_search.best_of(x, found, _decoded, importance=importance)


def _of_magnitudes(x: torch.Tensor, one_sign: Scheme, importance: torch.Tensor | None) -> torch.Tensor:
    """Return the stored scales that the search finds."""
    if importance is None:
        return choose_params(x, one_sign).scales[0]
    start = choose_params(x, one_sign.start).stored
    stored: Params = library.kernel_for(Op.SEARCH_PARAMS, x, one_sign.start).run(x, start, importance)
    return stored[0]


def _decoded(x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Return ``x`` quantized and dequantized under parameters, in the wide dtype."""
    return quantize(x, params).dequantize(wide_dtype(x.dtype))


def _under(scheme: Scheme, q: QuantizedTensor) -> QuantizedTensor:
    """Return the same codes and parameters under another scheme."""
    return replace(q, params=replace(q.params, scheme=scheme))


def unsearchable(name: str, scheme: Scheme) -> str | None:
    """Return the reason why scales cannot be searched, or None."""
    if not scheme.scales:
        return f"method {name} chooses scales, and {scheme} has none; use method nearest"
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        return f"method {name} compares errors, which {scheme} draws at random; use half_even"
    if any(level.stores(Store.LATE) for level in scheme.levels):
        return f"method {name} encodes with stored scales, and {scheme} rounds them later; use method nearest"
    return None


def searched(
    weight: torch.Tensor, start: QuantizedTensor, importance: torch.Tensor | None = None
) -> LayerResult:
    """Return ``weight`` under scales of least error, searched from a start.

    importance: weights of the squared errors, float64, broadcast against ``weight``; all alike if None.
    """
    if weight.numel() == 0:
        return LayerResult(q=start)
    scheme, x = start.params.scheme, weight.detach()
    one_sign = _of_one_sign(scheme)
    with gradual_underflow():
        if one_sign is not None:
            params = _of_either_sign(x, start.params, one_sign, importance)
        else:
            kernel = library.kernel_for(Op.SEARCH_PARAMS, x, scheme)
            stored = kernel.run(x, start.params.stored, importance)
            params = QuantizationParams.of(scheme, tuple(x.shape), x.dtype, stored)
    return LayerResult(q=quantize(weight, params, out=start))
