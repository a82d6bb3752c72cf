"""Round to nearest, under parameters from the range of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..functional import quantize, quantize_part
from ..ops.scale_search import WHOLE_BYTES
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor
from .method import NO_DATA, Bound, LayerData, LayerResult, Method, Scope
from .registry import NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(Method):
    """Round to nearest: ``round(w / scale)``, scaled by the block's range."""

    name: ClassVar[str] = NEAREST
    formula: ClassVar[str] = "q = round(w / s + z), s and z from the range of each block"
    source: ClassVar[str] = "the scheme's own rule, such as OCP MX 1.0, section 6.3"

    def scope(self, scheme: Scheme) -> Scope:
        """Blocks, or the layer for a tensor-wide searched scale."""
        whole = scheme.search is not None and scheme.granularity == Granularity.tensor()
        return Scope.LAYER if whole else Scope.BLOCKS

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (the same for all)
        """Return the scheme's own bound."""
        return Bound.SCHEME

    def value_bytes(self, scheme: Scheme) -> int:
        """Return no extra memory, but for a tensor-wide scale search."""
        return WHOLE_BYTES if self.scope(scheme) is Scope.LAYER else 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes, bit for bit as :func:`zeropoint.quantize` does.

        >>> METHOD.quantize(torch.tensor([[1.0, -2.0, 4.0]]), Scheme.parse("int8:channel:narrow")).q.codes
        tensor([[ 32, -64, 127]], dtype=torch.int8)
        """
        if data.extremes is None:
            return LayerResult(q=quantize(weight, scheme, out=data.out))
        return LayerResult(q=quantize_part(weight, scheme, data.extremes, out=data.out))


METHOD = Nearest()


def with_params(weight: torch.Tensor, params: QuantizationParams) -> QuantizedTensor:
    """Return ``weight`` in the closest codes under given parameters."""
    return quantize(weight, params)
