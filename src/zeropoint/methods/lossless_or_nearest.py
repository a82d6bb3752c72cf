"""The values that a quantized weight has in the codes of another scheme, or the closest ones that it has.

Where the parameters of the result follow from those of the weight (:mod:`zeropoint.methods.lossless`), they
are taken even if some values change, unless rounding to nearest changes them less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..errors import UnsupportedError
from ..functional import row_errors
from ..schemes import Scheme
from ..stats import Accumulator
from ..tensor import QuantizedTensor
from .lossless import METHOD as LOSSLESS
from .lossless import difference, recoded
from .method import NO_DATA, NO_NEEDS, Bound, LayerData, LayerResult, Scope
from .nearest import METHOD as NEAREST
from .registry import LOSSLESS_OR_NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessOrNearest:
    """Convert codes without loss where that is possible, and quantize their values anew elsewhere."""

    name: ClassVar[str] = LOSSLESS_OR_NEAREST
    formula: ClassVar[str] = "that of lossless where it holds, else q = round(w / s + z)"
    source: ClassVar[str] = "lossless and nearest"
    needs: ClassVar[Mapping[str, Callable[[int], Accumulator]]] = NO_NEEDS

    def scope(self, scheme: Scheme) -> Scope:
        """Rows, as ``lossless``."""
        return LOSSLESS.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse every scheme, as ``lossless``."""
        return LOSSLESS.refusal(scheme)

    def bound(self, scheme: Scheme) -> Bound:
        """Return that of ``lossless``."""
        return LOSSLESS.bound(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory that ``lossless`` takes, and that of a second result."""
        return LOSSLESS.value_bytes(scheme) + 1

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return the codes of ``data.codes``, which ``weight`` was decoded from, under ``scheme``."""
        if data.codes is None:
            raise UnsupportedError(str(self.refusal(scheme)))
        try:
            kept = recoded(data.codes, weight, scheme, data.extremes)
        except UnsupportedError:
            return NEAREST.quantize(weight.to(data.codes.dtype), scheme, data)
        if difference(weight, kept) is None:
            return LayerResult(q=kept)
        rounded = NEAREST.quantize(weight.to(data.codes.dtype), scheme, data).q
        return LayerResult(q=min(kept, rounded, key=lambda q: _squared_error(weight, q)))


METHOD = LosslessOrNearest()


def _squared_error(weight: torch.Tensor, q: QuantizedTensor) -> float:
    return float(row_errors(weight, replace(q, dtype=weight.dtype)).errors.sum())
