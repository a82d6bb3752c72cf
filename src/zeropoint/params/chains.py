"""Chained levels: offsets, scales with sign or center, factors in any format.

A number n of each finest block, scale or offset, is stored as a product of levels, coarsest first:

    factor_k = round_F((the largest n of the block of level k) / (the largest products of finer levels))
    factor_1 = round_F((n - center) / (factor_2 * factor_3 * ...)),    center = round_F(mean n)

A rule of powers of two takes the place of round_F, and on the finest level of scales that exponent
``n * divisor``, as in MX. Of a block with the extremes low and high, and of elements whose codes in use have
the values a..b,

    linear      n = max(|low|, |high|) / divisor,  or (high - low) / (b - a) in schemes with an offset, or
                with a zero point, for which the range is widened to contain 0
    signed      n = (the number of largest magnitude) / (a or b, the one of largest magnitude)
    edge        n = e / rint(e / ((high - low) / (a - b))), e = low or high, of the larger magnitude; with the
                sign of a - b reversed where e is low
    minimum     n = low - a * scale; of offsets without negative codes low is min(low, 0), under edge it is e

This module is the reference for schemes that :attr:`Scheme.chained` names; others are in :mod:`.arithmetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import RangeError
from ..formats import Format
from ..formats.division import divided
from ..formats.torch_dtypes import format_of
from ..layout.blocks import blocks_of_blocks, mean_blocks, reduce_blocks, signed_largest, spread_grid
from ..schemes import ScaleLevel, Scheme, ZeroPoint
from ..schemes.scale_rules import Pick, Store
from .effective import signed_end, span
from .powers_of_two import fitted_powers, number_exponent, scale_exponent
from .stored import LEAST_NORMAL, round_to, smallest, store, top
from .zero_points import zero_points

if TYPE_CHECKING:
    from .arithmetic import Ranges


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What is chosen for a tensor.

    tensors: of each level, in the order of :attr:`Scheme.levels`, as they are stored, then the zero point.
    scale, offset: those that elements are encoded with, one a finest block, in the wide dtype.
    """

    tensors: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None


def choose(scheme: Scheme, ranges: Ranges) -> Chosen:
    """Return the levels of a chained scheme, or raise RangeError."""
    small = scheme.dialect.small_scales
    scales = _Chain(scheme, scheme.scales, ranges, quiet=small.of_zeros)
    edge = scheme.scales[0].picks(Pick.EDGE)
    ideal, low = _from_edge(scheme, ranges) if edge else _ideal_scale(scheme, ranges)
    tensors, scale = scales.stored(ideal, least=0.0 if edge else small.least)
    if scheme.zero_point is not ZeroPoint.NONE:
        zero = _zero_points(scheme, low, scale, empty=ideal == 0)
        return Chosen(tensors=(*tensors, zero), scale=scale, zero_point=zero)
    if not scheme.offsets:
        return Chosen(tensors=tensors, scale=scale)
    offsets = _Chain(scheme, scheme.offsets, ranges, quiet=0.0)
    # The smallest of zeros of both signs is either of them.
    more, offset = offsets.stored(low - scheme.ends[0] * scale + 0.0, least=0.0)
    count = len(scheme.scales)
    return Chosen(tensors=(*tensors[:count], *more, *tensors[count:]), scale=scale, offset=offset)


def _ideal_scale(scheme: Scheme, ranges: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each finest block's unstored scale, and the range's minimum.

    Where the finest scales are powers of two, the scale times the divisor of the elements.
    """
    low, high = ranges.minimum[0], ranges.maximum[0]
    affine = scheme.zero_point is not ZeroPoint.NONE
    if scheme.offsets or affine:
        if affine or scheme.offsets[0].format_for(format_of(ranges.dtype)).min >= 0:
            low = low.clamp(max=0)
        high = high.clamp(min=0) if affine else high
        steps = (scheme.ends[1] - scheme.ends[0]) / _unit(scheme)
        width = high - low
        ideal = divided(width.double(), steps).to(width.dtype)
        return torch.where(torch.isinf(width), from_halves(low, high, steps), ideal), low
    if scheme.scales[0].picks(Pick.SIGNED):
        return divided(ranges.signed(), signed_end(*scheme.ends)), low
    return divided(ranges.magnitude(0), scheme.divisor / _unit(scheme)), low


def from_halves(low: torch.Tensor, high: torch.Tensor, steps: float) -> torch.Tensor:
    """Return ``(high - low) / steps`` for ranges whose width overflows."""
    if steps > torch.finfo(low.dtype).max:
        return ((high.double() - low.double()) / steps).to(low.dtype)
    return divided(high, steps) - divided(low, steps)


def _unit(scheme: Scheme) -> float:
    """Return the unit of scales: the divisor under powers of two."""
    return scheme.divisor if scheme.scales[0].rule.power_of_two else 1.0


def _zero_points(
    scheme: Scheme, low: torch.Tensor, scale: torch.Tensor, *, empty: torch.Tensor
) -> torch.Tensor:
    """Return zero points; a lost scale takes the code of zero."""
    lost = scale == 0
    zero = zero_points(scheme, low, torch.where(lost, 1.0, scale), empty=empty)
    return torch.where(lost, max(scheme.qmin, 0), zero)


def _from_edge(scheme: Scheme, ranges: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unstored scale by rule edge, and the smallest code's number."""
    low, high = ranges.minimum[0], ranges.maximum[0]
    steps = scheme.ends[1] - scheme.ends[0]
    width, small = high - low, scheme.dialect.small_scales
    quiet = torch.finfo(ranges.dtype).eps if small.of_zeros is None else small.of_zeros
    step = torch.where(torch.isinf(width), from_halves(low, high, steps), divided(width, steps))
    step = torch.where(width == 0, quiet, step).clamp(min=max(small.least, LEAST_NORMAL))
    at_low = low.abs() > high.abs()
    edge, step = torch.where(at_low, low, high), torch.where(at_low, step, -step)
    codes = torch.round(edge / step)
    return torch.where(codes != 0, edge / codes, step), torch.where(codes != 0, edge, 0.0)


def in_table(numbers: torch.Tensor, scale: torch.Tensor, fmt: Format, steps: int) -> torch.Tensor:
    """Return table values for numbers over scales, from equal steps.

    As in C, in float32: ``(n * (1 / s) + 1) * 0.5 * steps + 0.5``, cut off. numbers, scale: of one shape.
    fmt: a table from -1 to 1. steps: number of equal steps.
    """
    ratio = torch.where(scale == 0, 0.0, numbers * (1 / scale)).clamp(-1, 1)
    number = ((ratio + 1) * 0.5 * steps + 0.5).to(torch.int64)
    return round_to((divided(2 * number.double(), steps) - 1).to(numbers.dtype), fmt, up=False)


class _Chain:
    """Levels of a scale or offset, coarsest first; each divides the remainder.

    quiet: the scale of a block of zeros; None means the machine epsilon of the dtype.
    """

    def __init__(
        self, scheme: Scheme, levels: Sequence[ScaleLevel], ranges: Ranges, *, quiet: float | None
    ) -> None:
        of_scales = levels is scheme.scales
        self._scheme, self._levels = scheme, levels
        self._center = scheme.center if of_scales else None
        self._unit = _unit(scheme) if of_scales else 1.0
        self._table_steps = scheme.dialect.table_steps if of_scales else 0
        self._shape, self._own = ranges.shape, format_of(ranges.dtype)
        self._quiet = torch.finfo(ranges.dtype).eps if quiet is None else quiet

    def stored(self, numbers: torch.Tensor, *, least: float) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the levels' tensors, and the numbers with which elements are encoded.

        least: the smallest magnitude that a single level writes.
        """
        tensors: list[torch.Tensor] = []
        fine, wide, whole = self._levels[0], numbers.dtype, numbers
        center = None
        if self._center is not None:
            blocks = blocks_of_blocks(self._center.granularity, fine.granularity, self._shape)
            center = self._rounded(self._center, mean_blocks(numbers, blocks).to(wide))
            tensors.append(store(center, self._format(self._center)))
            center = spread_grid(center, self._center.granularity, fine.granularity, self._shape)
            numbers = numbers - center
        outer: torch.Tensor | None = None
        for index in reversed(range(1, len(self._levels))):
            level = self._levels[index]
            factor = self._coarse(index, numbers, outer)
            tensors.insert(0, store(factor, self._format(level)))
            factor = spread_grid(factor, level.granularity, fine.granularity, self._shape)
            outer = factor if outer is None else factor * outer
        if outer is not None:
            if self._table_steps and self._format(fine).is_table and not fine.rule.power_of_two:
                values = in_table(numbers, outer, self._format(fine), self._table_steps)
            else:
                values = self._saturated(fine, torch.where(outer == 0, 0.0, numbers / outer))
            used = numbers if fine.stores(Store.LATE) else values * outer
        elif center is not None:
            values = self._rounded(fine, numbers)
            used = numbers if fine.stores(Store.LATE) else values
        else:
            values, used = self._single(numbers, least)
        tensors.insert(0, store(values, self._format(fine)))
        if center is not None:
            used = whole if fine.stores(Store.LATE) else used + center
        return tuple(tensors), used

    def _format(self, level: ScaleLevel) -> Format:
        return level.format_for(self._own)

    def _single(self, numbers: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the only level's numbers: stored, and for encoding."""
        level = self._levels[0]
        if level.rule.power_of_two:
            values = self._rounded(level, numbers)
            return values, values
        fmt = self._format(level)
        if self._quiet == 0.0 and not level.picks(Pick.MINIMUM):
            # Their reciprocals overflow. The sign of zero stays, as in ggml.
            numbers = torch.where(numbers.abs() < LEAST_NORMAL, numbers * 0.0, numbers)
        if least >= smallest(fmt):
            numbers = torch.copysign(numbers.abs().clamp(min=least), numbers)
        numbers = numbers + 0.0 if level.picks(Pick.MINIMUM) else numbers  # without a sign of zero
        values = self._rounded(level, numbers)
        lost = (values == 0) & (numbers != 0)
        if self._quiet and bool(lost.any()):
            self._refuse(level, numbers, lost)
        if self._quiet:
            quiet = torch.full_like(values, max(self._quiet, smallest(fmt)))
            values = torch.where(numbers == 0, round_to(quiet, fmt, up=False), values)
        return values, torch.where(numbers == 0, values, numbers) if level.stores(Store.LATE) else values

    def _coarse(self, index: int, numbers: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
        """Return a level's factors relative to ``outer``, the product above it."""
        level, fine = self._levels[index], self._levels[0].granularity
        blocks = blocks_of_blocks(level.granularity, fine, self._shape)
        relative = numbers if outer is None else torch.where(outer == 0, 0.0, numbers / outer)
        signed = level.picks(Pick.SIGNED)
        largest = (
            signed_largest(relative, blocks) if signed else reduce_blocks(relative.abs(), blocks, "amax", 0)
        )
        ideal = divided(largest.double(), self._span(index, signed=signed) * self._unit).to(numbers.dtype)
        fmt = self._format(level)
        if not level.rule.power_of_two:
            ideal = torch.where(largest == 0, min(1.0, float(fmt.max)) if self._quiet else 0.0, ideal)
        values = self._rounded(level, ideal) if outer is None else self._saturated(level, ideal)
        if level.rule.power_of_two:
            return values
        tiny = torch.copysign(torch.full_like(values, smallest(fmt)), largest)
        return torch.where((values == 0) & ((largest != 0) | bool(self._quiet)), tiny, values)

    def _span(self, index: int, *, signed: bool) -> float:
        return span(self._levels[:index], self._own, signed=signed)

    def _saturated(self, level: ScaleLevel, numbers: torch.Tensor) -> torch.Tensor:
        """Round and clip numbers below a coarser level."""
        if level.rule.power_of_two:
            return self._powers(level, numbers)[0]
        fmt, most = self._format(level), torch.finfo(numbers.dtype).max
        held = numbers.clamp(max(float(fmt.min), -most), min(float(fmt.max), most))
        return round_to(held, fmt, up=level.stores(Store.UP))

    def _rounded(self, level: ScaleLevel, numbers: torch.Tensor) -> torch.Tensor:
        """Round numbers to a level's format; RangeError beyond its ends."""
        if level.rule.power_of_two:
            values, bad = self._powers(level, numbers)
            if bool(bad.any()):
                self._refuse(level, numbers, bad)
            return values
        fmt, up = self._format(level), level.stores(Store.UP)
        values = round_to(numbers, fmt, up=up)
        below = min(fmt.ceiling - fmt.max, fmt.smallest / 2)
        low = -top(fmt, up=up) if fmt.min == -fmt.max else float(fmt.min - below)
        bad = ~torch.isfinite(values) | (numbers > top(fmt, up=up)) | (numbers < low)
        if bool(bad.any()):
            self._refuse(level, numbers, bad)
        return values

    def _powers(self, level: ScaleLevel, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a level's powers of two for numbers, and an overflow mask."""
        numbers = numbers.clamp(max=torch.finfo(numbers.dtype).max)
        finest = level is self._levels[0]
        exponent = (
            scale_exponent(numbers, self._scheme, level.rule)
            if finest
            else number_exponent(numbers, level.rule)
        )
        return fitted_powers(exponent, self._format(level), numbers.dtype)

    def _refuse(self, level: ScaleLevel, numbers: torch.Tensor, bad: torch.Tensor) -> None:
        where = tuple(torch.nonzero(bad)[0].tolist())
        raise RangeError(
            f"number of block {where} (={float(numbers[where])}) does not fit {level}; "
            "use float32 or a coarser block"
        )
