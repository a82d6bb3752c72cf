"""Error bounds of dequantized values, from the scheme and its parameters.

A block has the factor S, the zero point z and codes with the values low..high, z subtracted. For a number x
of the block let r be ``x / S`` as it is computed, and c the value of its code. Either rounding decides,

    |x - S c| <= S (gap + |r - x / S|)         gap: half the largest distance between neighboring codes,
                                                    the whole one where rounding is directed or random

or x is past an end of the codes and is clipped to it,

    |x - S c| <= max(x_max - S high, S low - x_min, 0).

Decoding adds the roundings of the product and of the result. The extremes x_min and x_max are observed, or
follow from the scale: what was rounded to the scale s was at most ceil(s), the middle between s and the
number above it, so that ``|x| <= divisor * ceil(s)`` under a linear rule, and ``|x| <= S * reach`` under a
power of two. An integer zero point is off by at most half a step (one, where it is truncated) and the range
is short of ``(qmax - qmin) (ceil(s) / s - 1)`` steps. So a symmetric or affine integer scheme with float32
scales has the bound S / 2, up to roundings; a coarse scale adds what it cuts off.

A rule that compares errors keeps the scale of its start, of which all this holds, or picks one inside its
window (:mod:`.scale_windows`): then ``|x| < A S``, or half of the largest scale was less than s, which the
start was not above. Where no window is known, as with a zero point or codes of several values, the range was
at most the range of a scale four times as large.

Where ``S * max(|low|, |high|)`` overflows in the dtype of the result, the bound is Inf: so may be the result.
The same holds for numbers past the ends under overflow=special, which become Inf or NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..formats import Overflow
from ..formats.codes import decode, rounding_reach
from ..formats.torch_dtypes import dtype_of, format_of, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import Scheme, ZeroPoint
from ..schemes.dialects import ZeroPointFormula
from ..schemes.scale_rules import LINEAR_UP
from .arithmetic import multiplies, rounder
from .effective import combined, effective_scale
from .powers_of_two import reach
from .scale_windows import SHRINKING, STEP, block_length, has_window, window_of
from .stored import load_scale
from .tensors import Params, zero_point_of

Extremes = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest number of each finest block, float64."""


@dataclass(frozen=True)
class UnitRoundoff:
    """Errors of rounding to a dtype: ``relative``, and ``least`` for subnormals."""

    relative: float
    least: float
    largest: float

    @staticmethod
    def of(dtype: torch.dtype | None) -> UnitRoundoff:
        """Return the unit roundoff of a dtype; zero for None."""
        if dtype is None:
            return UnitRoundoff(0.0, 0.0, math.inf)
        info = torch.finfo(dtype)
        # Of float64 half the smallest number is none.
        return UnitRoundoff(info.eps / 2, max(info.tiny * info.eps / 2, math.ulp(0.0)), info.max)


class BlockErrors:
    """Error bounds of a tensor from its stored parameters.

    params: as they are stored.
    """

    def __init__(self, scheme: Scheme, params: Params, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.scheme, self.scales, self.shape, self.dtype = scheme, params[: len(scheme.scales)], shape, dtype
        self.wide = UnitRoundoff.of(wide_dtype(dtype))
        self.narrow = UnitRoundoff.of(rounder(scheme, dtype))
        scale, zero_point = effective_scale(scheme, params, shape, dtype), zero_point_of(scheme, params)
        self.scale = (
            torch.ones(scheme.granularity.grid(shape), dtype=torch.float64)
            if scale is None
            else scale.double()
        )
        self.step = float(scheme.element_step)
        low, high = scheme.ends
        self.zero = None if zero_point is None else zero_point.double().reshape(self.scale.shape)
        shift = 0.0 if self.zero is None else self.zero * self.step
        # In float64: codes of 32 bits are no float32.
        ends = (
            torch.as_tensor(end - shift, dtype=torch.float64).to(self.scale.device) for end in (low, high)
        )
        first, last = ends
        # Files of others have negative scales: their magnitudes give the bound, with ends exchanged.
        negative, self.scale = self.scale < 0, self.scale.abs()
        self.low, self.high = torch.where(negative, -last, first), torch.where(negative, -first, last)

    def representable(self) -> Extremes:
        """Return the ends of the codes, between which nothing is clipped."""
        return self.low * self.scale, self.high * self.scale

    def implied(self) -> Extremes:
        """Return the extremes of data for which the rules choose these parameters.

        Of a scheme without scales, all that its elements hold.
        """
        low, high = self.representable()
        if not self.scheme.scales:
            return low.clamp(max=0), high.clamp(min=0)
        if self.zero is not None and self.scheme.search is not None:
            return self._searched_range()
        if self.zero is not None:
            # A scale of zero belongs to a block of zeros.
            excess = torch.where(self.scale == 0, 0.0, self.scale * self._affine_excess())
            return low - excess, high + excess
        extent = self._extent()
        none = torch.zeros_like(extent)
        element = self.scheme.element
        return (none if element.min >= 0 else -extent), (none if element.max <= 0 else extent)

    def bound(self, extremes: Extremes, out_dtype: torch.dtype) -> torch.Tensor:
        """Return each block's bound for numbers within ``extremes``, decoded to ``out_dtype``."""
        low, high = self.representable()
        largest = torch.maximum(low.abs(), high.abs())
        furthest = torch.maximum(extremes[0].abs(), extremes[1].abs())
        step = self.scale * self._gap()
        furthest = torch.minimum(furthest, largest + step).clamp(max=torch.finfo(torch.float64).max)
        inside = step + self._ratio_error(furthest, largest)
        clipped = torch.maximum(low - extremes[0], extremes[1] - high)
        out = UnitRoundoff.of(out_dtype)
        decoding = (2 * self.wide.relative + out.relative) * largest + 2 * self.wide.least + out.least
        result = (inside_or_clipped(inside, clipped, self.scheme) + decoding) * (1 + 2.0**-22)
        return torch.where(self._lost(extremes, out_dtype), math.inf, result)

    def _lost(self, extremes: Extremes, out_dtype: torch.dtype) -> torch.Tensor:
        """Return where a result may be Inf or NaN."""
        low, high = self.representable()
        # Products of a scale round once, and numbers of wide formats on the way to it.
        rounding = 1 + 4 * self.wide.relative if self.scheme.scales else 1.0
        lost = ~torch.isfinite((torch.maximum(low.abs(), high.abs()) * rounding).to(out_dtype))
        if multiplies(
            self.scheme
        ):  # reciprocals of the smallest scales overflow, and any code may come of it
            most = min(self.wide.largest, self.narrow.largest * (1 - self.narrow.relative))
            lost = lost | ((self.scale > 0) & (1 / self.scale >= most))
        if self.scheme.overflow is Overflow.SPECIAL:
            room = self.scale * self._gap() / 2 if self.scheme.rounding.mode.to_nearest else 0.0
            below = room if self.scheme.element.min < 0 else 0.0
            lost = lost | (extremes[0] < low - below) | (extremes[1] > high + room)
            quotient = torch.maximum(extremes[0].abs(), extremes[1].abs()) / self.scale
            lost = lost | (quotient * (1 + 2 * self.narrow.relative) > self.narrow.largest)
        return lost

    def _gap(self) -> float:
        """Return the largest rounding error inside the ends, in scale units."""
        return float(self.scheme.element.largest_gap) * (0.5 if self.scheme.rounding.mode.to_nearest else 1.0)

    def _ratio_error(self, furthest: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Return the error of the quotient, times S, up to ``furthest``.

        largest: magnitude of the codes' values, to which a quotient that overflows is clipped.
        """
        scheme, wide, scale = self.scheme, self.wide, self.scale
        error = scale * scheme.element.boundary_error
        if not scheme.scales:
            return error
        inverted = multiplies(scheme)
        error = error + furthest * (wide.relative * (2 if inverted else 1)) + scale * wide.least
        if inverted:  # the reciprocal of a large scale is subnormal
            error = error + furthest * scale * wide.least
        narrow = self.narrow if len(scheme.scales) == 1 else UnitRoundoff.of(None)
        error = error + furthest * narrow.relative * (2 if inverted else 1) + scale * narrow.least
        if inverted and narrow.largest < math.inf:
            error = error + furthest * scale * narrow.least
        if narrow.largest < math.inf:
            past = furthest >= scale * (narrow.largest * (1 - narrow.relative))
            error = error + torch.where(past, (largest - scale * narrow.largest).clamp(min=0), 0.0)
        if scheme.zero_inside:
            most = max(abs(scheme.qmin), abs(scheme.qmax)) + 1
            sums = most * self.step
            error = error + scale * (sums * (wide.relative + narrow.relative) + narrow.least)
            # Sums past the largest value of a narrow dtype overflow, and take the last code.
            beyond = max(most - narrow.largest * (1 - narrow.relative), 0.0)
            error = error + scale * (beyond * self.step)
        return error

    def _affine_excess(self) -> torch.Tensor:
        """Return the range's excess over the codes, in scale units."""
        scheme, wide, narrow = self.scheme, self.wide, self.narrow
        assert self.zero is not None
        steps = (scheme.qmax - scheme.qmin) * self.step
        width = steps * (4 * wide.relative + narrow.relative) + (narrow.least + wide.least) / self.scale
        shortfall = steps * (self._ceiling() / self.scale - 1) + width
        offset = 0.0
        if scheme.zero_point is ZeroPoint.INTEGER:
            truncates = scheme.dialect.zero_points.formula is ZeroPointFormula.TRUNCATED
            offset = 1.0 if truncates else 0.5
        shift = self.zero.abs() + max(abs(scheme.qmin), abs(scheme.qmax)) + 1
        inexact = shift * (4 * wide.relative + 2 * narrow.relative) + 2 * narrow.least / self.step
        return shortfall + (offset + inexact) * self.step

    def _extent(self) -> torch.Tensor:
        """Return the largest magnitude that a block with these scales held."""
        extent = self._start_extent()
        rule = self.scheme.search
        if rule is None:
            return extent
        if rule.factor:  # of the quotient that was rounded, which the start has at most
            return extent
        if not has_window(self.scheme):
            return SHRINKING * extent
        window = window_of(self.scheme, block_length(self.scheme, self.shape), rule.power)
        # Half of what the largest scale reaches is less than any scale reaches whose double is not stored.
        reached = (self.scale * (window.doubling * STEP)).nan_to_num(nan=0.0, posinf=math.inf)  # 0 times Inf
        return torch.maximum(2 * extent, reached)

    def _start_extent(self) -> torch.Tensor:
        """Return the largest magnitude for a scale of the starting rule."""
        rounding = 1 + 8 * self.wide.relative
        if self.scheme.scales[0].rule.power_of_two:
            return (self.scale + 2 * self.wide.least) * (reach(self.scheme.start) * rounding)
        return self._ceiling() * (self.scheme.divisor * rounding)

    def _searched_range(self) -> Extremes:
        """Return the widest range for a searched scale and zero point."""
        steps = (self.scheme.qmax - self.scheme.qmin) * self.step
        extent = self._ceiling() * (steps * SHRINKING * (1 + 8 * (self.wide.relative + self.narrow.relative)))
        return -extent, extent

    def _ceiling(self) -> torch.Tensor:
        """Return the largest factor that rounds to each block's own."""
        scheme, first = self.scheme, self.scheme.scales[0]
        fmt = first.format_for(format_of(self.dtype))
        values = (
            load_scale(self.scales[0], fmt, torch.float64).abs().reshape(first.granularity.grid(self.shape))
        )
        up = first.rule == LINEAR_UP
        # Quotients round where they are computed, too: a float64 scale may hold a subnormal float32.
        ceiling = values + self.wide.least
        if not up:
            ceiling = torch.maximum(ceiling, rounding_reach(values, fmt))
        if len(self.scales) > 1:
            rest = effective_scale(_tail(scheme), self.scales[1:], self.shape, self.dtype)
            assert rest is not None
            coarse = spread_grid(rest.double(), scheme.scales[1].granularity, first.granularity, self.shape)
            # A block whose scale is zero can have held what underflowed on the way to it.
            ceiling = combined(scheme, 0, ceiling, coarse) + 2 * self.wide.least
        narrow = rounder(scheme, self.dtype)
        if narrow is None or (not up and dtype_of(fmt) is narrow and len(self.scales) == 1):
            return ceiling
        return rounding_reach(ceiling, format_of(narrow))


def inside_or_clipped(inside: torch.Tensor, clipped: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the bound of numbers that may be rounded or clipped."""
    count = scheme.element.per_code
    return torch.maximum(inside, clipped) if count == 1 else inside + clipped.clamp(min=0) * math.sqrt(count)


def clippable(
    patterns: torch.Tensor, scheme: Scheme, *, chosen: bool, negative: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mask of codes of clipped numbers: ends, Inf and NaN.

    negative: as :func:`zeropoint.formats.codes.second_grid` has it.
    chosen: whether parameters were chosen from the data, in which no number has a sign that elements lack.
    """
    low, high = scheme.ends
    values = decode(patterns, scheme.element, torch.float64, negative)
    above, below = ~(values < high), ~(values > low)
    if chosen and scheme.element.max <= 0:
        return below
    return above if chosen and scheme.element.min >= 0 else above | below


def _tail(scheme: Scheme) -> Scheme:
    return Scheme(element=scheme.element, scales=scheme.scales[1:], dialect=scheme.dialect)
