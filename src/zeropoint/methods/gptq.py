r"""GPTQ in feedback form: each column's error is fed into later ones.

    t_j = w_j + sum_{k < j} (w_k - q_k) M_kj,      q_j = the value of the code closest to t_j
    H = M diag(D) M^T:      (w - q) H (w - q)^T = sum_j D_j (t_j - q_j)^2

H is the Gram matrix of the inputs, so that the left side is the squared error of the output. Columns run in
descending order of its diagonal; scales and their groups follow the original order, so that files hold no
order. Scales are found beforehand by the search of ``mse_weighted`` (by ``ggml`` for types of GGUF). After
the step ``shift`` its weights are the pivots D: D_j is the cost of an error in column j once later columns
make up for it. Without that step pivots lower the error of each layer and raise the whole model's at 3 and 4
bits (docs/evidence/methods.md). Codes and errors equal GPTQ's with the same order and scales; no inverse is
formed.

Source: Frantar et al., GPTQ, arXiv:2210.17323; Chee et al., QuIP, arXiv:2307.13304, section 3 (feedback, and
that the two agree).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from ..formats import ChoiceFormat, DigitsFormat, RoundingMode, VectorFormat
from ..formats.torch_dtypes import format_of
from ..functional import quantize
from ..ops.feedback import Grid, feed_back, output_errors
from ..ops.ggml import block_types
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..schemes import ScaleLevel, Scheme
from ..schemes.scale_rules import Pick
from ..stats import GramMatrix, MeanSquare, Statistics
from ..tensor import QuantizedTensor
from .factored import Factored, factored
from .ggml import METHOD as GGML
from .input_statistics import statistics_of
from .method import CROSS, GRAM, NO_DATA, Bound, LayerData, LayerResult, Method, Needs, Scope, require_scheme
from .mse_weighted import METHOD as MSE_WEIGHTED
from .mse_weighted import NEED
from .nearest import METHOD as NEAREST
from .output_bound import output_error
from .rounding_grid import grid_of

_VALUE_BYTES = 40
"""Memory of a value while a weight is solved: float64 of it, of its codes' value and of its error."""

Refine = Callable[[torch.Tensor, torch.Tensor, Factored, Grid], torch.Tensor]


def ungridded(name: str, scheme: Scheme) -> str | None:
    """Return the reason why numbers cannot be rounded singly, or None."""
    element = scheme.element
    if not scheme.scales:
        return f"method {name} rounds under scales, and {scheme} has none; use method nearest"
    if scheme.rounding.mode is RoundingMode.STOCHASTIC:
        return f"method {name} feeds errors back, which {scheme} draws at random; use half_even"
    if isinstance(element, VectorFormat | DigitsFormat | ChoiceFormat) or element.per_scale > 1:
        return f"method {name} rounds one weight at a time, and {scheme} several together; use method mse"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFeedback(Method):
    """Round columns in turn, and feed each error into those that follow.

    name, formula, source: see :class:`~.method.Method`. refine: from the target, the values that feedback
    chose, factors and grid to the values that are kept. limit: of its errors.
    """

    name: str = "gptq"
    formula: str = "q_j = nearest(w_j + sum_k<j (w_k - q_k) M_kj), with X^T X = M D M^T"
    source: str = "GPTQ (arXiv:2210.17323), in the feedback form of QuIP (arXiv:2307.13304)"
    refine: Refine | None = field(default=None, repr=False)
    limit: Bound = Bound.OUTPUT
    needs: ClassVar[Needs] = MappingProxyType({GRAM: lambda features: GramMatrix(features=features)})

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002 (as the protocol)
        """Return the layer: errors go through all columns."""
        return Scope.LAYER

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse joint or random rounding, and schemes without scales."""
        return ungridded(self.name, scheme)

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (as the protocol)
        """Return the output bound: codes approximate their fed target, not the weight."""
        return self.limit

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of a solved value and its scale search."""
        return _VALUE_BYTES + MSE_WEIGHTED.value_bytes(scheme)

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes of little output error.

        weight: (..., columns). data: with ``gram``, of columns inputs. Raises UnsupportedError for a scheme
        with a refusal, CalibrationError for absent statistics, and what :func:`zeropoint.quantize` raises.

        >>> from zeropoint.stats import Statistics
        >>> gram = GramMatrix(features=2)
        >>> state = gram.update(gram.start(), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
        >>> data = LayerData(statistics={"gram": Statistics(accumulator=gram, state=state)})
        >>> METHOD.quantize(torch.tensor([[0.4, 0.4], [7.0, 0.0]]), Scheme.parse("int4:tensor"), data).q.codes
        tensor([[0, 1],
                [7, 0]], dtype=torch.int8)
        """
        return self.solve(weight, weight, scheme, data)

    def solve(
        self, weight: torch.Tensor, target: torch.Tensor, scheme: Scheme, data: LayerData,
        *, notes: tuple[str, ...] = (),
    ) -> LayerResult:  # fmt: skip
        """Return codes whose outputs come close to the outputs of ``target``.

        target: the weight after the chain's steps, in float32 or float64. notes: the steps' notes.
        """
        require_scheme(self, scheme)
        if weight.numel() == 0:
            return NEAREST.quantize(weight, scheme, data)
        gram = statistics_of(weight, data, GRAM, GramMatrix, self.name)
        whole, wide = factored(gram), target.to(torch.promote_types(weight.dtype, torch.float32))
        own = _explicit(scheme, weight.dtype)
        squares = gram["gram"].diagonal().double() / int(gram["vectors"])
        params = _scales(wide, own, data, whole.costs if CROSS in data.statistics else squares, gram).params
        with gradual_underflow():
            rows = target.reshape(-1, target.shape[-1]).to(torch.promote_types(target.dtype, torch.float32))
            grid = grid_of(params)
            factors = whole.upper, whole.pivots, whole.order
            values, losses = feed_back(rows, *factors, grid)
            if self.refine is not None:
                values = self.refine(rows, values, whole, grid)
                losses = output_errors(rows, values, *factors)
        outputs = output_error(rows, losses, gram, grid)
        shape = tuple(weight.shape)
        final = QuantizationParams.of(scheme, shape, weight.dtype, params.stored)
        return LayerResult(q=coded(values, final), notes=notes, outputs=outputs)


METHOD = ErrorFeedback()


def coded(values: torch.Tensor, params: QuantizationParams) -> QuantizedTensor:
    """Return the codes of values that codes under these parameters have.

    values: the numbers, in any shape of as many, as dequantizing gives them in float32 or float64. params:
    with a shape.
    """
    dtype = torch.promote_types(params.dtype, torch.float32)
    wide = QuantizationParams.of(_explicit(params.scheme, params.dtype), params.shape, dtype, params.stored)
    q = quantize(values.reshape(params.shape).to(dtype), wide)
    return QuantizedTensor(
        data=q.data, params=params, shape=params.shape, dtype=params.dtype, own_params=True
    )


def _explicit(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    """Return the scheme with open scale formats in the weight's dtype."""
    own = format_of(dtype)

    def named(level: ScaleLevel) -> ScaleLevel:
        return replace(level, format=level.format_for(own))

    return replace(scheme, scales=tuple(map(named, scheme.scales)), offsets=tuple(map(named, scheme.offsets)))


def _scales(
    target: torch.Tensor, scheme: Scheme, data: LayerData, costs: torch.Tensor, gram: Statistics
) -> QuantizedTensor:
    """Return ``target`` under scales of little cost-weighted error."""
    counts = {name: gram[name] for name in ("vectors", "seen", "left_out")}
    square = MeanSquare(features=len(costs))
    state = {"squares": costs * int(gram["vectors"]), **counts}
    known = replace(data, statistics={NEED: Statistics(accumulator=square, state=state)}, out=None)
    # llama.cpp's search takes scales of either sign, where they are the only ones.
    signed = len(scheme.levels) > 1 or scheme.scales[0].picks(Pick.SIGNED)
    fits = signed and block_types.refusal(scheme, tuple(target.shape)) is None
    searches: list[Method] = [GGML, MSE_WEIGHTED] if fits else [MSE_WEIGHTED]
    method = next((each for each in searches if each.refusal(scheme) is None), NEAREST)
    return method.quantize(target, scheme, known).q
