"""Lossless conversion to another scheme where possible, else nearest rounding.

Where the parameters of the result follow from the weight's (:mod:`zeropoint.methods.lossless`), they
are taken even if some values change, but for blocks in which rounding to nearest changes them less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..errors import UnsupportedError
from ..layout.blocks import reduce_blocks, spread_blocks
from ..layout.packing import pack
from ..method_names import LOSSLESS_OR_NEAREST
from ..params import QuantizationParams
from ..schemes import Granularity, Scheme
from ..schemes.structure import stored_numbers
from ..tensor import QuantizedTensor
from .lossless import METHOD as LOSSLESS
from .lossless import recoded
from .method import NO_DATA, LayerData, LayerResult, Method, Scope
from .nearest import METHOD as NEAREST


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessOrNearest(Method):
    """Lossless conversion of codes where possible, else requantization of values."""

    name: ClassVar[str] = LOSSLESS_OR_NEAREST
    formula: ClassVar[str] = "that of lossless where it holds, else q = round(w / s + z)"
    source: ClassVar[str] = "lossless and nearest"

    def scope(self, scheme: Scheme) -> Scope:
        """Rows, as ``lossless``."""
        return LOSSLESS.scope(scheme)

    def refusal(self, scheme: Scheme) -> str | None:
        """Refuse every scheme, as ``lossless``."""
        return LOSSLESS.refusal(scheme)

    def value_bytes(self, scheme: Scheme) -> int:
        """Return the memory of ``lossless`` and a second result."""
        return LOSSLESS.value_bytes(scheme) + 1

    def quantize(self, weight: torch.Tensor, scheme: Scheme, data: LayerData = NO_DATA) -> LayerResult:
        """Return the codes of ``data.codes``, which ``weight`` was decoded from, under ``scheme``."""
        if data.codes is None:
            raise UnsupportedError(str(self.refusal(scheme)))
        try:
            kept = recoded(data.codes, weight, scheme, data.extremes, rounded=True)
        except UnsupportedError:
            return NEAREST.quantize(weight.to(data.codes.dtype), scheme, data)
        have, wanted = (stored_numbers(each, weight.dtype)[:-1] for each in (data.codes.scheme, scheme))
        if have == wanted or len(scheme.scales) > 1:
            return LayerResult(q=kept)
        rounded = NEAREST.quantize(weight.to(data.codes.dtype), scheme, data).q
        # One scale for all is one choice for all, which a part cannot make.
        whole = scheme.granularity == Granularity.tensor()
        return LayerResult(q=rounded if whole else _closer(weight, kept, rounded))


METHOD = LosslessOrNearest()


def _closer(weight: torch.Tensor, kept: QuantizedTensor, rounded: QuantizedTensor) -> QuantizedTensor:
    """Return per block the candidate of smaller largest error, else ``kept``.

    No block depends on others, and so not on how a weight is cut.
    """
    blocks = kept.scheme.granularity
    errors = [
        reduce_blocks((q.dequantize(weight.dtype) - weight).abs(), blocks, "amax", 0.0)
        for q in (kept, rounded)
    ]
    better = errors[1] < errors[0]
    pairs = zip(kept.params.stored, rounded.params.stored, strict=True)
    stored = [_where(better.reshape(own.shape), other, own) for own, other in pairs]
    codes = torch.where(spread_blocks(better, blocks, kept.shape), rounded.codes, kept.codes)
    params = QuantizationParams.of(kept.scheme, kept.shape, kept.params.dtype, stored)
    return replace(kept, data=pack(codes, kept.scheme.bits), params=params)


def _where(condition: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return numbers selected from two tensors; 8-bit floats as bytes."""
    if a.dtype.itemsize > 1:
        return torch.where(condition, a, b)
    return torch.where(condition, a.view(torch.uint8), b.view(torch.uint8)).view(a.dtype)
