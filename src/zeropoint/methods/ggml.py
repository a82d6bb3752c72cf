"""llama.cpp's codes and scales: the searches of ``ggml_quantize_chunk``, bit for bit.

    minimize over s, m:   sum_j v_j (q_j s - m - w_j)^2        for each block, v from the weights themselves
    v_j <- i_j sqrt(mean(w^2) + w_j^2)                         where the importance i_j of inputs is known

A few tens of scales are tried and refined by least squares; how many, and v, differ by type. Importance is
the mean square of inputs, llama.cpp's importance matrix (imatrix). Float64 is rounded to float32 first.

Source: ggml-org/llama.cpp, ggml/src/ggml-quants.c; see :mod:`zeropoint.ops.ggml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import ShapeError
from ..functional import check_input
from ..ops import library
from ..ops.ggml import block_types
from ..ops.reference_backend import filled
from ..ops.registry import Op
from ..ops.threads import gradual_underflow
from ..params import QuantizationParams
from ..schemes import Scheme
from ..tensor import QuantizedTensor
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Needs, Scope, require_scheme
from .mse_weighted import METHOD as MSE_WEIGHTED
from .mse_weighted import NEED, importance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlSearch(Method):
    """Quantize to a type of ggml as llama.cpp does."""

    name: ClassVar[str] = "ggml"
    formula: ClassVar[str] = (
        "the search of llama.cpp for each type of GGUF, weighted by mean(x^2) where it is known"
    )
    source: ClassVar[str] = "ggml_quantize_chunk of llama.cpp, bit for bit"
    takes: ClassVar[Needs] = MSE_WEIGHTED.takes

    def scope(self, scheme: Scheme) -> Scope:  # noqa: ARG002 (all types have blocks within rows)
        """Rows: error weights depend on a row's or block's mean square."""
        return Scope.ROWS

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse what no type of ggml holds."""
        if block_types.type_of(scheme) is None:
            return f"method ggml is for the types of GGUF, such as q4_k, unlike {scheme}; use method mse"
        return None

    def bound(self, scheme: Scheme) -> Bound:
        """Return the rounding bound if codes are chosen under stored scales."""
        return Bound.ROUNDING if block_types.rounds_last(scheme) else Bound.NONE

    def value_bytes(self, scheme: Scheme) -> int:  # noqa: ARG002 (weights are searched in pieces)
        """Take nothing that grows with the weight, but float32 of it."""
        return 4

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in the codes of llama.cpp, weighted where ``data`` has ``mean_square``.

        Raises UnsupportedError for a scheme with a refusal, ShapeError for a last axis that is no multiple of
        the block, RangeError for numbers or scales past what the type holds, CalibrationError for statistics
        of another number of inputs, and what :func:`zeropoint.quantize` raises.

        >>> METHOD.quantize(torch.arange(32.0)[None], Scheme.parse("q4_0")).q.dequantize()[0, -3:]
        tensor([27.1250, 31.0000, 31.0000])
        """
        check_input(weight)
        require_scheme(self, scheme)
        refusal = block_types.refusal(scheme, tuple(weight.shape))
        if refusal is not None:
            raise ShapeError(
                f"{refusal}; method ggml takes whole blocks: keep the weight, or use method nearest"
            )
        block_types.require_range(weight.detach(), scheme)
        importance = importance_of(weight, data, self.name).float() if NEED in data.statistics else None
        kernel = library.kernel_for(Op.SEARCH, weight, scheme)
        with gradual_underflow():
            codes, stored = kernel.run(weight.detach(), importance)
        if data.out is not None:
            codes, stored = filled((data.out.data, data.out.params.stored), codes, stored)
        shape = tuple(weight.shape)
        params = QuantizationParams.of(scheme, shape, weight.dtype, stored)
        return LayerResult(
            q=QuantizedTensor(data=codes, params=params, shape=shape, dtype=weight.dtype, own_params=True)
        )


METHOD = GgmlSearch()
