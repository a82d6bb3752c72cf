"""Scales of least output error per block for uncorrelated inputs.

    minimize over s, z:   sum_j m_j (dequantize(quantize(w_j; s, z)) - w_j)^2        for each block
    m_j = mean over input vectors of x_j^2

The squared error of a layer's output is ``e^T H e`` for each row, with the Gram matrix H of its inputs and
the errors e of the row's weights; this uses the diagonal of H alone, and the search of ``mse``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from ..schemes import Scheme
from ..stats import MeanSquare
from .input_statistics import statistics_of
from .method import MEAN_SQUARE, NO_DATA, LayerData, LayerResult, Method, Needs, Scope, require_scheme
from .mse import METHOD as MSE
from .mse import searched, unsearchable
from .nearest import METHOD as NEAREST

NEED = MEAN_SQUARE
"""The name of the statistics."""
_VALUE_BYTES = 8
"""Memory that the importance of a value takes, should whole blocks have to be held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSquaredError(Method):
    """Search of scales and zero points, with errors weighted by inputs' squares."""

    name: ClassVar[str] = "mse_weighted"
    formula: ClassVar[str] = "argmin over s, z of sum mean(x^2) (dequantize(quantize(w; s, z)) - w)^2"
    source: ClassVar[str] = "the importance matrix of llama.cpp (tools/imatrix); the search of mse"
    needs: ClassVar[Needs] = MappingProxyType({NEED: lambda features: MeanSquare(features=features)})

    def scope(self, scheme: Scheme) -> Scope:
        """Rows, which match the statistics, or the layer where ``mse`` needs it."""
        return Scope.LAYER if MSE.scope(scheme) is Scope.LAYER else Scope.ROWS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse what ``mse`` refuses."""
        return unsearchable(self.name, scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of ``mse``, and the importance of whole weights."""
        found = MSE.value_bytes(scheme)
        return found + _VALUE_BYTES if found else 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes, each block's weighted error at most ``nearest``'s.

        data: with ``mean_square``, of (..., columns) inputs. Raises UnsupportedError for a scheme with a
        refusal, CalibrationError for absent statistics and for another number of inputs, and what
        :func:`zeropoint.quantize` raises.

        >>> from zeropoint.stats import Statistics
        >>> square = MeanSquare(features=4)
        >>> seen = square.update(square.start(), torch.tensor([[1.0, 1.0, 1.0, 9.0]]))
        >>> data = LayerData(statistics={"mean_square": Statistics(accumulator=square, state=seen)})
        >>> weight = torch.tensor([[1.0, 1.0, 0.95, 1.6]])
        >>> METHOD.quantize(weight, Scheme.parse("int2:channel"), data).q.dequantize()
        tensor([[1.5780, 1.5780, 1.5780, 1.5780]])
        """
        require_scheme(self, scheme)
        start = NEAREST.quantize(weight, scheme, data).q
        return searched(weight, start, importance_of(weight, data, self.name) if weight.numel() else None)


METHOD = WeightedSquaredError()


def importance_of(weight: torch.Tensor, data: LayerData, method: str) -> torch.Tensor:
    """Return the mean square of each input, (columns,) float64.

    method: the name of the requesting method. Raises CalibrationError for absent statistics, and for another
    number of inputs.
    """
    found = statistics_of(weight, data, NEED, MeanSquare, method)
    square: MeanSquare = found.accumulator  # type: ignore[assignment]
    return square.mean(found.state).to(weight.device)
