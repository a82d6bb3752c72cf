"""LearnedThreshold: trained log thresholds with power-of-two scales (TQT)."""

from __future__ import annotations

import torch

from ..errors import NonFiniteError, RangeError, SchemeError
from ..formats import FloatFormat
from ..formats.torch_dtypes import wide_dtype
from ..params import QuantizationParams
from ..schemes import Scheme, ZeroPoint
from .learned_scale import require_wide
from .quantizer import Quantizer
from .straight_through import (
    fake_quantize_learned,
    on_grid,
    power_of_two,
    settled,
    settled_text,
    stored_params,
)
from .thresholds import ThresholdRule, threshold

LEAST_EXPONENT = -126
"""Exponent of the smallest normal float32; scales stay between this and its inverse, which all formats of 8
exponent bits hold."""


class LearnedThreshold(Quantizer):
    """Integer fake quantization with trained log2 thresholds (TQT).

        s         = 2 ** ceil(log2 t) / 2 ** (bits - 1)      signed;   / 2 ** bits   unsigned
        y         = s * clamp(round(x / s), qmin, qmax)
        dx        = m dy
        d log2 t  = s ln 2 sum_block dy (round(x / s) - x / s   inside,   qmin or qmax   outside)

    with m = 1 where round(x / s) lies within the codes, ends included, else 0; the ceiling is straight
    through.

    The parameter ``log2_threshold`` may go anywhere: exponents that the scale's format lacks act as its ends,
    and pass the gradient of these ends.

    Args:
        scheme: symmetric integers with one scale level of any granularity, in a format that holds powers of
            two: ``int8:tensor``, ``int8:channel:scale=ceil``. The rule of the level is not used.
        thresholds: t of each block, or one number for all; 0 means no data and starts at scale 1.
        shape, dtype: of the tensor whose grid of blocks the thresholds have.
        enabled: whether it quantizes; otherwise ``x`` is returned as it is.

    Raises:
        SchemeError: for another scheme.
        RangeError: for a negative threshold.
        NonFiniteError: for one that is not finite.

    Source: TQT, arXiv:1903.08066, section 3, with its rounding half to even.

    Example:
        >>> quantizer = LearnedThreshold("int4:tensor", 0.9)
        >>> quantizer.params.scales[0]
        tensor([0.1250])
        >>> quantizer(torch.tensor([5.0])).backward()
        >>> quantizer.log2_threshold.grad  # 7 * 0.125 * ln 2
        tensor([0.6065])
    """

    def __init__(
        self,
        scheme: str | Scheme,
        thresholds: float | torch.Tensor,
        *,
        shape: tuple[int, ...] = (1,),
        dtype: torch.dtype = torch.float32,
        enabled: bool = True,
    ) -> None:
        parsed = Scheme.parse(scheme)
        _check_scheme(parsed)
        super().__init__(parsed, enabled=enabled)
        self.shape, self.dtype = shape, dtype
        own = settled(parsed, dtype)
        element, fmt = parsed.element, own.scales[0].format
        assert isinstance(fmt, FloatFormat)
        self.shift = element.emax + 1
        self.lowest, self.highest = max(fmt.emin, LEAST_EXPONENT), min(fmt.emax, -LEAST_EXPONENT)
        values = torch.as_tensor(thresholds).detach().double()
        grid = parsed.granularity.grid(shape)
        values = values.expand(grid) if values.numel() == 1 else on_grid(values, parsed.granularity, shape)
        self.log2_threshold = torch.nn.Parameter(log2_exact(values, self.shift, wide_dtype(dtype)))

    @classmethod
    def from_tensor(
        cls, x: torch.Tensor, scheme: str | Scheme, rule: ThresholdRule = ThresholdRule.MAX
    ) -> LearnedThreshold:
        """Return a quantizer whose thresholds start where ``rule`` says; see :class:`ThresholdRule`.

        Args:
            x: a tensor from which the thresholds start.
            scheme: a :class:`~zeropoint.Scheme` or its text form, such as ``"int4:g128"``.
            rule: how they follow from it.
        """
        parsed = Scheme.parse(scheme)
        found = threshold(x, parsed, rule)
        return cls(parsed, found, shape=tuple(x.shape), dtype=x.dtype)

    @property
    def params(self) -> QuantizationParams:
        """The power-of-two scales that the forward uses."""
        with torch.no_grad():
            stored, _ = stored_params(settled(self.scheme, self.dtype), self._scale(self.shape), None)
        return QuantizationParams(scheme=self.scheme, shape=self.shape, scales=(stored,), dtype=self.dtype)

    def _scale(self, shape: tuple[int, ...]) -> torch.Tensor:
        scale = power_of_two(self.log2_threshold, self.shift, lowest=self.lowest, highest=self.highest)
        return on_grid(scale, self.scheme.granularity, shape)

    def simulate(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``dequantize(quantize(x, params))``, bit for bit, differentiable in x and thresholds."""
        require_wide(x, self.scheme)
        return fake_quantize_learned(
            x, self._scale(tuple(x.shape)), None, settled_text(self.scheme, self.dtype), 1.0
        )


def log2_exact(values: torch.Tensor, fallback: float, dtype: torch.dtype) -> torch.Tensor:
    """Return ``log2(values)`` in ``dtype``, with an exact ceiling.

    The exponent comes from the bits, so that a power of two has a whole logarithm, and no other has one. 0
    gives ``fallback``. Raises RangeError for a negative value, NonFiniteError for one that is not finite.
    """
    if not bool(torch.isfinite(values).all()):
        raise NonFiniteError("thresholds must be finite; clean the data or pass numbers")
    if bool((values < 0).any()):
        raise RangeError(f"thresholds (least {float(values.min())}) must not be negative")
    mantissa, exponent = torch.frexp(values)
    whole = mantissa == 0.5
    top = torch.where(whole, exponent - 1, exponent).to(dtype)
    above = torch.nextafter((exponent - 1).to(dtype), torch.full_like(top, torch.inf))
    inner = torch.minimum(torch.maximum((exponent + torch.log2(mantissa)).to(dtype), above), top)
    return torch.where(values == 0, fallback, torch.where(whole, top, inner))


def _check_scheme(scheme: Scheme) -> None:
    integer = scheme.element.is_integer and scheme.zero_point is ZeroPoint.NONE
    level = scheme.scales[0] if len(scheme.scales) == 1 and scheme.chained is None else None
    if not integer or level is None or not level.holds_floats:
        raise SchemeError(
            f"scheme (={scheme}) must be of symmetric integers with one scale level to learn a threshold; "
            "LearnedScale learns linear scales of any element, FakeQuantize takes every scheme"
        )
