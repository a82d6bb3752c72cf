"""The quantization scheme of burn 0.16 (burn_tensor::quantization), bit for bit.

A thin view for programs that come from there. Tensors are quantized under ``scheme``, in dialect ``burn``,
whose scales and zero points are these wherever a scale can be used. Where burn's cannot, 0 for a symmetric
range of zeros and Inf past the largest float32, they are here as burn has them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..schemes import Scheme


class QuantizationType(enum.Enum):
    """The types of codes."""

    QInt8 = "int8"
    """8-bit signed integer."""


@dataclass(frozen=True)
class CalibrationRange:
    """The extremes of a tensor, float32."""

    min: torch.Tensor | float
    max: torch.Tensor | float


@dataclass(frozen=True)
class QuantizationParameters:
    """scale: float32. offset: int32, or None for the symmetric scheme."""

    scale: torch.Tensor
    offset: torch.Tensor | None


@dataclass(frozen=True, order=True)
class QuantizationScheme:
    """Per-tensor affine or symmetric quantization, as a copyable, hashable, ordered value.

    text: the scheme as zeropoint spells it, and as it is serialized.

    >>> QuantizationScheme.PerTensorAffine(QuantizationType.QInt8).text
    'int8:tensor:asym:dialect=burn'
    """

    text: str

    @classmethod
    def PerTensorAffine(cls, kind: QuantizationType) -> QuantizationScheme:  # noqa: N802 (burn's name)
        """Return the affine scheme."""
        return cls(f"{kind.value}:tensor:asym:dialect=burn")

    @classmethod
    def PerTensorSymmetric(cls, kind: QuantizationType) -> QuantizationScheme:  # noqa: N802 (burn's name)
        """Return the symmetric scheme, which leaves out the most negative code."""
        return cls(f"{kind.value}:tensor:narrow:dialect=burn")

    @property
    def scheme(self) -> Scheme:
        """The scheme that the functions of zeropoint take."""
        return Scheme.parse(self.text)

    def compute_q_params(self, range: CalibrationRange) -> QuantizationParameters:  # noqa: A002 (burn's name)
        """Return scale and offset of a range.

            affine       scale = (max - min) / (b - a), or 0.1 where that is 0; offset = -int(min / scale - a)
            symmetric    scale = 2 max(|min|, |max|) / (b - a); no offset

        [a, b] is -128..127, or -127..127 if symmetric. The affine range is widened to contain 0; int() cuts
        the fraction off.

        >>> scheme = QuantizationScheme.PerTensorSymmetric(QuantizationType.QInt8)
        >>> scheme.compute_q_params(CalibrationRange(-127.0, 3.0)).scale
        tensor(1.)
        """
        a, b = self.scheme.qmin, self.scheme.qmax
        low, high = (torch.as_tensor(end, dtype=torch.float32) for end in (range.min, range.max))
        steps = torch.tensor(b - a, dtype=torch.float32)
        if a == -b:
            return QuantizationParameters(torch.maximum(low.abs(), high.abs()) * 2 / steps, None)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scale = (high - low) / steps
        scale = torch.where(scale == 0, 0.1, scale)
        return QuantizationParameters(scale, -(low / scale - a).to(torch.int32))
