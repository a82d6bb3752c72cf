"""Error bounds of chained schemes: the bounds of :mod:`.bounds`, with chains.

Let S and O be the scale and the offset of a block as they are stored, dS and dO how far they can be from the
numbers before they were stored (:func:`drift`), and a..b the values of the codes in use. Then

    |x - (S c + O)| <= |S| (gap + roundings),   or how far x lies past S a + O and S b + O if it is clipped,

and, under a scale and an offset that are rounded late, ``gap dS + max(|a|, |b|) dS + dO`` more. The data that
chose the parameters had a magnitude of at most ``divisor (|S| + dS)``, or, with an offset, lay in

    S a + O - dO  ..  S a + O + dO + (b - a) (|S| + dS).

A zero point z moves the codes, whose values are then ``a - z .. b - z``. It is off by at most half a step
(one, where it is truncated), or was clamped; the range was at most ``W = (b - a) (|S| + dS)`` wide and held
0, so that its ends exceed the ends of the codes by at most ``W - (b - a) S`` plus the error of the zero
point. For a scale that is a power of two, n is the largest magnitude over the divisor, which its rule lets
be larger than S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..formats import Format, Overflow, RoundingMode
from ..formats.codes import rounding_reach, second_grid, widest_gap
from ..formats.torch_dtypes import format_of, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import Arithmetic, ScaleLevel, Scheme
from ..schemes.dialects import ZeroPointFormula
from ..schemes.scale_rules import Pick, Store
from .arithmetic import multiplies
from .bounds import Extremes, UnitRoundoff, inside_or_clipped
from .effective import effective_offset, effective_scale, signed_end, span
from .powers_of_two import rule_reach
from .stored import LEAST_NORMAL, load_scale
from .tensors import Params, zero_point_of


def drift(
    levels: Sequence[ScaleLevel], tensors: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype,
    *, beyond: float = 0.0, steps: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Return the largest storage error of levels' products, per finest block.

    beyond: the fraction by which a number may exceed its power of two on the finest level. steps: the
    dialect's number of steps to which numbers are rounded before a table, or 0.
    """
    own, fine, wide = format_of(dtype), levels[0].granularity, wide_dtype(dtype)
    unit = UnitRoundoff.of(wide)
    outer: torch.Tensor | None = None
    reach: torch.Tensor | None = None
    for index in reversed(range(len(levels))):
        level = levels[index]
        fmt = level.format_for(own)
        values = load_scale(tensors[index], fmt, torch.float64).reshape(level.granularity.grid(shape)).abs()
        values = spread_grid(values, level.granularity, fine, shape)
        if level.rule.power_of_two:
            off = values * (1.0 if index else beyond)
        else:
            # Quotients round where they are computed, too: a float64 factor may hold a lost float32.
            off = _off(values, fmt) * (2 if level.stores(Store.UP) else 1) + unit.least
            off = off + (2 / steps if steps and fmt.is_table else 0.0)
        finer = abs(span(levels[:index], own, signed=level.picks(Pick.SIGNED))) * (1 + 8 * unit.relative)
        if outer is None or reach is None:
            reach, outer = (values + off) * finer, values
            continue
        # What is saturated, or has lost its factor, is bounded by the level above.
        most = (values + off) * outer * finer
        end = min(fmt.max, -fmt.min) if fmt.min < 0 < fmt.max else max(fmt.max, -fmt.min)
        saturated = (values >= float(end)) | (outer == 0)
        reach = torch.where(saturated, torch.maximum(most, reach), most)
        outer = (values * outer).to(wide).double()
    assert reach is not None
    assert outer is not None
    return (reach - outer) * (1 + 2.0**-20) + 8 * unit.relative * reach + 8 * unit.least


def _off(magnitudes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the error of rounding to ``fmt`` at each of its magnitudes."""
    off = rounding_reach(magnitudes, fmt) - magnitudes
    return torch.maximum(off, magnitudes) if fmt.min > 0 else off


class ChainedErrors:
    """Error bounds of a tensor under a chained scheme.

    levels: tensors of all levels, as they are stored, then the zero point where there is one.
    """

    def __init__(self, scheme: Scheme, levels: Params, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.scheme, self.wide = scheme, UnitRoundoff.of(wide_dtype(dtype))
        scale = effective_scale(scheme, levels, shape, dtype)
        assert scale is not None
        count, ends, finest = len(scheme.scales), scheme.ends, scheme.scales[0].rule
        self.scale = scale.double()
        self.factor = scale.double().abs()
        self.gap = widest_gap(scheme.element, second_grid(scale, scheme.element))
        past = rule_reach(scheme, finest) / scheme.divisor - 1 if finest.power_of_two else 0.0
        levels_of_scale, steps = levels[:count], scheme.dialect.table_steps
        self.drift = drift(scheme.scales, levels_of_scale, shape, dtype, beyond=max(past, 0.0), steps=steps)
        if scheme.center is not None:
            self.drift = self.drift + 8 * self.wide.relative * self.factor
        if scheme.dialect.small_scales.of_zeros == 0.0:
            self.drift = self.drift + LEAST_NORMAL
        self.offset = self.offset_drift = torch.zeros_like(self.factor)
        offset = effective_offset(scheme, levels, shape, dtype)
        if offset is not None:
            self.offset = offset.double()
            stored = levels[count : count + len(scheme.offsets)]
            self.offset_drift = drift(scheme.offsets, stored, shape, dtype)
        zero = zero_point_of(scheme, levels)
        self.zero = None if zero is None else zero.double().reshape(self.scale.shape)
        moved = 0.0 if self.zero is None else self.zero * float(scheme.element_step)
        codes = [torch.as_tensor(end - moved, dtype=torch.float64, device=scale.device) for end in ends]
        self.first, last = (end * self.scale + self.offset for end in codes)
        self.low, self.high = torch.minimum(self.first, last), torch.maximum(self.first, last)
        self.furthest_code = torch.maximum(codes[0].abs(), codes[1].abs())
        self.late = torch.zeros_like(self.factor)
        if scheme.scales[0].stores(Store.LATE):
            self.late = self.drift * (self.furthest_code + self._gap())
        if scheme.offsets and scheme.offsets[0].stores(Store.LATE):
            self.late = self.late + self.offset_drift

    def representable(self) -> Extremes:
        """Return the ends of the codes, between which nothing is clipped."""
        return self.low, self.high

    def implied(self) -> Extremes:
        """Return the extremes of data for which the rules choose these parameters."""
        element, ends, rounding = self.scheme.element, self.scheme.ends, 1 + 8 * self.wide.relative
        most = self.factor + self.drift
        width = self._width(most * ((ends[1] - ends[0]) * rounding))
        if self.zero is not None:
            return self._affine(width)
        if self.scheme.offsets:
            pad = self.offset_drift + 8 * self.wide.least
            pad = pad + 8 * self.wide.relative * (self.offset.abs() + self.factor * abs(ends[0]))
            pad = pad + (self.drift * abs(ends[0]) if self.scheme.scales[0].stores(Store.LATE) else 0.0)
            if self.scheme.scales[0].picks(Pick.EDGE):
                # It was (n + t) / n steps of the range, |t| <= 1/2, and n is the half of the codes or more.
                least = max(1.0, (ends[1] - ends[0] - 1) / 2)
                width = width * (least / (least - 0.5))
                down = self.first > self.low
                other = torch.where(down, self.first - width, self.first + width)
                return torch.minimum(self.first, other) - pad, torch.maximum(self.first, other) + pad
            return self.first - pad, self.first + width + pad
        signed = self.scheme.scales[0].picks(Pick.SIGNED)
        extent = most * ((abs(signed_end(*ends)) if signed else self.scheme.divisor) * rounding)
        none = torch.zeros_like(extent)
        return (none if element.min >= 0 else -extent), (none if element.max <= 0 else extent)

    def _width(self, width: torch.Tensor) -> torch.Tensor:
        """Return the widest range of data, from the range of the scale.

        Under a power of two that number is a range over a number, which, past the largest of its dtype, was
        taken for that; the range was at most twice as large.
        """
        finest = self.scheme.scales[0].rule
        if not finest.power_of_two:
            return width
        largest = self.wide.largest
        taken = self.factor * rule_reach(self.scheme, finest) * (1 + 8 * self.wide.relative) >= largest
        return torch.where(taken, torch.maximum(width, torch.full_like(width, 2 * largest)), width)

    def _affine(self, width: torch.Tensor) -> Extremes:
        """Return the extremes of data that give the chosen zero point."""
        assert self.zero is not None
        scheme, step = self.scheme, float(self.scheme.element_step)
        steps = scheme.ends[1] - scheme.ends[0]
        truncates = scheme.dialect.zero_points.formula is ZeroPointFormula.TRUNCATED
        inexact = (self.zero.abs() + max(abs(scheme.qmin), abs(scheme.qmax)) + 1) * (8 * self.wide.relative)
        off = self.factor * ((1.0 if truncates else 0.5) + inexact) * step
        past = torch.where(torch.isfinite(width), width - self.factor * steps, math.inf)
        pad = past.clamp(min=0) + off + 8 * self.wide.least
        if scheme.scales[0].stores(Store.LATE):
            pad = pad + self.drift * (steps + 2 * step)
        # Of a scale that was lost, or rounded past 0, the codes say nothing.
        width = width + 8 * self.wide.least
        return (
            torch.where(self.scale > 0, self.first - pad, -width),
            torch.where(self.scale > 0, self.high + pad, width),
        )

    def bound(self, extremes: Extremes, out_dtype: torch.dtype) -> torch.Tensor:
        """Return each block's bound for numbers within ``extremes``, decoded to ``out_dtype``."""
        out, wide = UnitRoundoff.of(out_dtype), self.wide
        largest = torch.maximum(self.low.abs(), self.high.abs())
        furthest = torch.maximum(extremes[0].abs(), extremes[1].abs())
        step = self.factor * self._gap()
        furthest = torch.minimum(furthest, largest + step + self.late).clamp(
            max=torch.finfo(torch.float64).max
        )
        inside = step + self._ratio_error(furthest + self.offset.abs())
        clipped = torch.maximum(self.low - extremes[0], extremes[1] - self.high)
        terms = largest + self.offset.abs() + self.factor * self.furthest_code
        decoding = (2 * wide.relative + out.relative) * terms + 3 * wide.least + out.least
        result = inside_or_clipped(inside, clipped, self.scheme)
        result = (result + self.late + decoding) * (1 + 2.0**-22)
        return torch.where(self._lost(extremes, out_dtype), math.inf, result)

    def _ratio_error(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the error of the computed quotient, times S.

        distance: the largest ``|x - O|``.
        """
        scheme, wide, factor = self.scheme, self.wide, self.factor
        inverted = multiplies(scheme)
        error = factor * scheme.element.boundary_error
        error = error + distance * wide.relative * (1 + inverted + bool(scheme.offsets)) + wide.least
        error = error + factor * wide.least + (distance * factor * wide.least if inverted else 0.0)
        if scheme.zero_inside:
            sums_of_codes = (max(abs(scheme.qmin), abs(scheme.qmax)) + 1) * float(scheme.element_step)
            error = error + factor * (sums_of_codes * wide.relative)
        sums = scheme.dialect.arithmetic is Arithmetic.SUMS and scheme.rounding.mode is RoundingMode.HALF_UP
        if sums and scheme.element.is_integer:
            steps = scheme.ends[1] - scheme.ends[0] + 2 * float(scheme.element_step)
            error = error + factor * (2 * steps * wide.relative)
        return error

    def _lost(self, extremes: Extremes, out_dtype: torch.dtype) -> torch.Tensor:
        """Return where a result may be Inf or NaN."""
        rounding = 1 + 4 * self.wide.relative
        largest = torch.maximum(self.low.abs(), self.high.abs()) * rounding
        lost = ~torch.isfinite(largest.to(out_dtype)) | ~torch.isfinite(self.factor)
        distance = self.offset.abs() + torch.maximum(extremes[0].abs(), extremes[1].abs())
        sides = self.factor * self.furthest_code
        if self.scheme.offsets:
            sides = torch.maximum(sides, distance)
        lost = lost | (sides * rounding > self.wide.largest)
        if self.scheme.overflow is Overflow.SPECIAL:
            lost = lost | (extremes[0] < self.low + self.late) | (extremes[1] > self.high - self.late)
        return lost

    def _gap(self) -> float | torch.Tensor:
        return self.gap * (0.5 if self.scheme.rounding.mode.to_nearest else 1.0)
