"""Round to nearest: parameters follow from the range of each block, and each value takes the closest code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ..functional import quantize, quantize_part
from ..ops.scale_search import WHOLE_BYTES
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from ..tensor import QuantizedTensor
from .method import NO_DATA, NO_NEEDS, Bound, LayerData, LayerResult, Scope
from .registry import NEAREST

if TYPE_CHECKING:  # statistics are loaded where they are needed
    from ..stats import Accumulator


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """``q = round(w / scale)``, with the scale that the scheme's rule gives for the block's range."""

    name: ClassVar[str] = NEAREST
    formula: ClassVar[str] = "q = round(w / s + z), s and z from the range of each block"
    source: ClassVar[str] = "the scheme's own rule, such as OCP MX 1.0, section 6.3"
    needs: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = NO_NEEDS
    takes: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = NO_NEEDS

    def scope(self, scheme: Scheme) -> Scope:
        """Blocks: a scale of the whole tensor follows from its extremes, unless its rule compares errors."""
        whole = scheme.search is not None and scheme.granularity == Granularity.tensor()
        return Scope.LAYER if whole else Scope.BLOCKS

    def refusal(self, scheme: Scheme) -> str | None:  # noqa: ARG002 (every scheme rounds)
        """Refuse nothing."""
        return None

    def bound(self, scheme: Scheme) -> Bound:  # noqa: ARG002 (the same for all)
        """Return that of the scheme."""
        return Bound.SCHEME

    def value_bytes(self, scheme: Scheme) -> int:
        """Take nothing more, but for a search of one scale of all values."""
        return WHOLE_BYTES if self.scope(scheme) is Scope.LAYER else 0

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return ``weight`` in codes, bit for bit those of :func:`zeropoint.quantize`.

        >>> METHOD.quantize(torch.tensor([[1.0, -2.0, 4.0]]), Scheme.parse("int8:channel:narrow")).q.codes
        tensor([[ 32, -64, 127]], dtype=torch.int8)
        """
        if data.extremes is None:
            return LayerResult(q=quantize(weight, scheme, out=data.out))
        return LayerResult(q=quantize_part(weight, scheme, data.extremes, out=data.out))


METHOD = Nearest()


def with_params(weight: torch.Tensor, params: QuantizationParams) -> QuantizedTensor:
    """Return ``weight`` in the closest codes under parameters that training or calibration found."""
    return quantize(weight, params)
