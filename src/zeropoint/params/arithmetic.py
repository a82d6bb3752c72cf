"""Reference arithmetic for scales and zero points of blocks, in plain torch.

    linear         scale = round_F(amax / divisor)
    power of two   scale = 2 ** (e(amax) - emax), e by the rule, from the bits of amax
    asymmetric     scale = round_F((max - min) / (qmax - qmin)),  zero_point = round(qmin - min / scale)

This module owns the order of the operations and where each is rounded. Kernels repeat it fused and are
compared with it bit for bit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import NonFiniteError, RangeError
from ..formats import Format, RoundingMode
from ..formats.codes import decode, encode
from ..formats.division import divided
from ..formats.torch_dtypes import dtype_of, format_of, wide_dtype
from ..layout.blocks import spread_grid
from ..schemes import Arithmetic, ScaleLevel, Scaling, Scheme, TensorScale, ZeroPoint
from ..schemes.dialects import FinestQuotient
from ..schemes.scale_rules import LINEAR, LINEAR_UP, Linear
from . import chains
from .effective import combined, over_reciprocal, span
from .powers_of_two import fitted_powers, quiet_below, reach, scale_exponent
from .scale_tables import even_tables
from .stored import IEEE, LEAST_NORMAL, round_to, smallest, store, through, top
from .zero_points import zero_points


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Extremes of each block of each level, finest first, wide dtype.

    minimum, maximum: one tensor a level, shaped like the level's grid. Symmetric schemes use the larger
        magnitude.
    dtype: dtype of the data itself, which the compressed-tensors dialect computes in.
    largest: the number of the largest magnitude of each finest block, where its sign matters; None where only
        extremes are known.
    """

    minimum: tuple[torch.Tensor, ...]
    maximum: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    largest: torch.Tensor | None = None

    def signed(self) -> torch.Tensor:
        """Return each block's number of largest magnitude; of equals, the minimum."""
        if self.largest is not None:
            return self.largest
        low, high = self.minimum[0], self.maximum[0]
        return torch.where(low.abs() >= high.abs(), low, high)

    def magnitude(self, level: int) -> torch.Tensor:
        """Return the largest magnitude of each block of a level."""
        low, high = self.minimum[level], self.maximum[level]
        return high.abs() if low is high else torch.maximum(high.abs(), low.abs())


def scales_from_ranges(scheme: Scheme, ranges: Ranges) -> tuple[torch.Tensor, ...]:
    """Return the stored tensors of each level, then any zero point.

    A rule that compares errors yields its starting parameters. Raises NonFiniteError when a range is not
    finite, RangeError when a scale does not fit its format or numbers occur whose sign the scheme lacks.
    """
    scheme = scheme.start
    require_chosen(scheme, ranges)
    if not scheme.scales:
        return ()
    if scheme.element.per_scale > 1:
        return (even_tables(scheme, ranges),)
    if scheme.chained is not None:
        return chains.choose(scheme, ranges).tensors
    if scheme.zero_point is not ZeroPoint.NONE:
        return _affine(scheme, ranges)
    scales: list[torch.Tensor] = []
    coarser: torch.Tensor | None = None
    for index in reversed(range(len(scheme.scales))):
        level = scheme.scales[index]
        if coarser is not None:
            coarser = spread_grid(
                coarser, scheme.scales[index + 1].granularity, level.granularity, ranges.shape
            )
        values = _level(scheme, index, ranges.magnitude(index), coarser, ranges.dtype)
        outer, coarser = coarser, values if coarser is None else combined(scheme, index, values, coarser)
        if index and outer is not None and not bool(torch.isfinite(coarser).all()):
            raise RangeError(
                f"scales of {scheme} above the finest overflow {coarser.dtype} together, for a largest value "
                f"of {float(ranges.magnitude(index).max()):g}; use fewer levels, or scale the tensor down"
            )
        scales.append(store(values, level.format_for(format_of(ranges.dtype))))
    return tuple(reversed(scales))


def coarsest_scale(scheme: Scheme, ranges: Ranges) -> torch.Tensor:
    """Return the coarsest stored scale, which alone needs the whole tensor."""
    scheme = scheme.start
    index = len(scheme.scales) - 1
    values = _level(scheme, index, ranges.magnitude(index), None, ranges.dtype)
    return store(values, scheme.scales[index].format_for(format_of(ranges.dtype)))


class TensorRule(NamedTuple):
    """Formula of a tensor-wide scale above one finer level.

    largest: the largest number of a scale of 1. divisor: of elements alone. reciprocal: whether the kept
    scale is ``1 / max(amax, tiny)`` times ``largest``, each rounded to ``narrow``, which fits while its
    product with ``amax / divisor`` is at most ``fits``. Else the scale is ``amax / largest`` in float64,
    rounded to float32.
    """

    largest: float
    divisor: float
    reciprocal: bool
    narrow: torch.dtype | None
    tiny: float
    fits: float


def tensor_rule(scheme: Scheme, dtype: torch.dtype) -> TensorRule | None:
    """Return the float32 rule of :func:`coarsest_scale`, or None if none applies."""
    scheme = scheme.start
    if len(scheme.scales) != 2:
        return None
    level, span = scheme.scales[1], _finer_span(scheme, 1, dtype)
    reciprocal = scheme.dialect.tensor_scale is TensorScale.RECIPROCAL
    plain = not level.rule.power_of_two and not _up(level)
    if dtype_of(level.format_for(format_of(dtype))) is not torch.float32 or not plain:
        return None
    if not reciprocal and not _always_fits(scheme, dtype):
        return None
    return TensorRule(
        largest=float(scheme.divisor * span),
        divisor=float(scheme.divisor),
        reciprocal=reciprocal,
        narrow=rounder(scheme, dtype),
        tiny=torch.finfo(dtype).tiny,
        fits=span * _slack(scheme, 1, dtype),
    )


def finest_scales(
    scheme: Scheme, amax: torch.Tensor, coarser: torch.Tensor | None, dtype: torch.dtype, *, factor: float
) -> torch.Tensor:
    """Return stored linear scales of the finest level, times ``factor`` unrounded.

    amax: of each block, in the wide dtype. coarser: the factor of coarser levels at each block.
    """
    level = scheme.scales[0]
    fmt = level.format_for(format_of(dtype))
    relative = (_fine_ratio(scheme, amax, coarser, dtype) * factor).clamp(max=float(fmt.max))
    if coarser is None:
        return store(_linear(relative, scheme, level, dtype), fmt)
    return store(_fine_linear(scheme, relative, dtype), fmt)


def require_chosen(scheme: Scheme, ranges: Ranges) -> None:
    """Raise NonFiniteError or RangeError for ranges unfit to choose parameters from."""
    for low, high in zip(ranges.minimum, ranges.maximum, strict=True):
        require_finite_range(low, high)
    if scheme.scales:
        require_signs(scheme, ranges.minimum[0], ranges.maximum[0])


def require_signs(scheme: Scheme, low: torch.Tensor, high: torch.Tensor) -> None:
    """Raise RangeError for numbers of a sign that the elements lack.

    Given parameters ask for clipping; parameters chosen from the data must hold them.
    """
    if scheme.zero_point is not ZeroPoint.NONE or scheme.offsets:
        return
    for lost, sign, extreme, remedy in (
        (scheme.element.min >= 0, "negative", low < 0, "clamp(min=0)"),
        (scheme.element.max <= 0, "positive", high > 0, "clamp(max=0)"),
    ):
        if lost and bool(extreme.any()):
            where = tuple(torch.nonzero(extreme)[0].tolist())
            value = float((low if sign == "negative" else high)[where])
            raise RangeError(
                f"block {where} holds {value}, but {scheme.element_name} has no {sign} numbers; use a format "
                f"with both signs or a zero point (asym), or {remedy} first"
            )


def require_finite_range(low: torch.Tensor, high: torch.Tensor) -> None:
    """Raise NonFiniteError unless every extreme is finite."""
    good = torch.isfinite(low) & torch.isfinite(high)
    if not bool(good.all()):
        where = tuple(torch.nonzero(~good)[0].tolist())
        raise NonFiniteError(
            f"range of block {where} is {float(low[where])}..{float(high[where])}; it must be finite"
        )


def rounder(scheme: Scheme, dtype: torch.dtype) -> torch.dtype | None:
    """Return the rounding dtype of intermediates, or None for the wide dtype."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return dtype if scheme.dialect.arithmetic is Arithmetic.INPUT and narrow else None


def multiplies(scheme: Scheme) -> bool:
    """Whether values are multiplied by the rounded reciprocal of their scale.

    Programs that do so have one level of linear scales, without a center, around which a scale may be too
    small for that; dividing by a power of two is exact either way.
    """
    single = len(scheme.scales) == 1 and not scheme.scales[0].rule.power_of_two and scheme.center is None
    return single and scheme.dialect.scaling is Scaling.RECIPROCAL


def zero_scale(scheme: Scheme, dtype: torch.dtype) -> float:
    """Return the linear scale of a block whose range is zero."""
    value = scheme.dialect.small_scales.of_zeros
    return torch.finfo(dtype).eps if value is None else value


def _relative(scheme: Scheme, index: int, factor: torch.Tensor, coarse: torch.Tensor | None) -> torch.Tensor:
    """Return the scales with which :func:`combined` gives ``factor``, before they are rounded."""
    if coarse is None:
        return factor
    return factor * coarse if over_reciprocal(scheme, index) else factor / coarse


def _level(
    scheme: Scheme, index: int, amax: torch.Tensor, coarser: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return one level's scales relative to coarser factors, in wide dtype."""
    if scheme.scales[index].rule.power_of_two:
        return _power_of_two(scheme, index, amax, coarser, dtype)
    ideal = through(divided(amax, scheme.divisor), rounder(scheme, dtype))
    if index > 0:
        return _coarse_linear(scheme, index, amax, (ideal, coarser), dtype)
    if coarser is None:
        return _linear(ideal, scheme, scheme.scales[0], dtype)
    return _fine_linear(scheme, _fine_ratio(scheme, amax, coarser, dtype), dtype)


def _fine_ratio(
    scheme: Scheme, amax: torch.Tensor, coarser: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return linear scales of the finest level before they are rounded."""
    if coarser is not None and scheme.dialect.finest_quotient is FinestQuotient.BY_PRODUCT:
        return amax / (scheme.divisor * coarser)
    return _relative(scheme, 0, through(divided(amax, scheme.divisor), rounder(scheme, dtype)), coarser)


def _linear(ideal: torch.Tensor, scheme: Scheme, level: ScaleLevel, dtype: torch.dtype) -> torch.Tensor:
    """Round ``amax / divisor`` to the level's format, floored and nonzero."""
    fmt = level.format_for(format_of(dtype))
    values = round_to(ideal.clamp(min=_least(scheme, fmt)), fmt, up=_up(level))
    _require_fit(ideal, values, level, fmt, lost=(values == 0) & (ideal > 0))
    # Any scale serves a block of zeros, but for 0 itself, to which the dialect's may round.
    quiet = torch.full_like(ideal, max(zero_scale(scheme, dtype), smallest(fmt)))
    return torch.where(ideal == 0, round_to(quiet, fmt, up=False), values)


def _require_fit(
    ideal: torch.Tensor, values: torch.Tensor, level: ScaleLevel, fmt: Format, *, lost: torch.Tensor | None
) -> None:
    """Raise RangeError for scales above the format's largest, or ``lost``."""
    bad, most = ~torch.isfinite(values), top(fmt, up=_up(level))
    if most < math.inf:
        bad |= ideal > most
    if lost is not None:
        bad |= lost
    if bool(bad.any()):
        where = tuple(torch.nonzero(bad)[0].tolist())
        raise RangeError(
            f"scale of block {where} (={float(ideal[where])}) does not fit {level}; "
            "use scale=float32 or a coarser block"
        )


def _up(level: ScaleLevel) -> bool:
    return level.rule == LINEAR_UP


def _least(scheme: Scheme, fmt: Format) -> float:
    """Return the smallest written scale: the dialect's, if the format reaches it."""
    least = scheme.dialect.small_scales.least
    return least if least >= smallest(fmt) else 0.0


def _coarse_linear(
    scheme: Scheme,
    index: int,
    amax: torch.Tensor,
    known: tuple[torch.Tensor, torch.Tensor | None],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return linear scales that let finer levels use their whole format.

    known: ``amax / divisor`` and the factor of the coarser levels. Rounded to nearest, but up where the next
    level would not fit its format; never zero, which no finer scale could mend.
    """
    ideal, coarser = known
    level, wide = scheme.scales[index], amax.dtype
    fmt = level.format_for(format_of(dtype))
    span = _finer_span(scheme, index, dtype)
    if coarser is None and _always_fits(scheme, dtype):
        return _shared(amax, scheme.divisor * span).to(wide).masked_fill(amax == 0, 1.0)
    fits = span * _slack(scheme, index, dtype)
    own, outer = ideal.double(), 1.0 if coarser is None else coarser.double()
    if over_reciprocal(scheme, index):
        outer = 1.0 / outer
    if coarser is None and scheme.dialect.tensor_scale is TensorScale.RECIPROCAL:
        # torch computes `number / tensor` as reciprocal, then product: two roundings in the tensor's dtype.
        narrow = rounder(scheme, dtype)
        inverse = through(1.0 / amax.clamp(min=torch.finfo(dtype).tiny), narrow)
        inverse = through(inverse * (scheme.divisor * span), narrow)
        inverse = round_to(torch.where(torch.isfinite(inverse), inverse, 1.0), fmt, up=False)
        enough = own * inverse <= fits
        if not bool(enough.all()):  # seldom, and encoding takes longer than all else
            smaller = encode((span * _BELOW / own).clamp(max=float(fmt.max)), fmt, RoundingMode.FLOOR)
            inverse = torch.where(enough, inverse, decode(smaller, fmt, wide))
        inverse = inverse.clamp(min=smallest(fmt))
        _require_fit(ideal, inverse, level, fmt, lost=~torch.isfinite(ideal))
        return inverse
    shared = (_shared(amax, scheme.divisor * span) / outer).to(wide)
    values = round_to(shared.masked_fill(amax == 0, 1.0), fmt, up=_up(level))
    enough = own <= fits * outer * values.double()
    if not bool(enough.all()):
        larger = round_to((own / (span * _BELOW * outer)).to(wide), fmt, up=True)
        values = torch.where(enough, values, larger)
    values = values.clamp(min=smallest(fmt))
    # The quotient of a dialect that computes in float16 may be infinite, where the exact one is not.
    over = ~torch.isfinite(ideal)
    _require_fit(torch.where(over, ideal, shared.to(wide)), values, level, fmt, lost=over)
    return values


def _shared(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the factor under which the largest values below reach ``amax``."""
    return divided(amax.double(), largest).clamp(min=LEAST_NORMAL)


@functools.lru_cache(maxsize=256)
def _always_fits(scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether no finite range can overflow the coarsest scale, as in ``nvfp4``.

    A scale that keeps the wide dtype, and so at least ``LEAST_NORMAL``, differs from the exact quotient by
    ``2**-24``, and ``ideal`` by as much: less than the next level's slack. Divisors of at least 1 do not
    overflow.
    """
    index, wide = len(scheme.scales) - 1, wide_dtype(dtype)
    level = scheme.scales[index]
    return (
        dtype_of(level.format_for(format_of(dtype))) is wide
        and not _up(level)
        and rounder(scheme, dtype) is None
        and scheme.dialect.tensor_scale is not TensorScale.RECIPROCAL
        and min(scheme.divisor, _finer_span(scheme, index, dtype)) >= 1
        and _slack(scheme, index, dtype) >= 1 + 2.0**-20
    )


_BELOW = 1 - 2.0**-20
"""Leaves the roundings of finer scales and of products of scales below the largest of their formats."""


@functools.lru_cache(maxsize=256)
def _finer_span(scheme: Scheme, index: int, dtype: torch.dtype) -> float:
    """Return the largest factor that the levels finer than ``index`` have."""
    return span(scheme.scales[:index], format_of(dtype))


def _slack(scheme: Scheme, index: int, dtype: torch.dtype) -> float:
    """Return the multiple of its largest value that a finer level accepts."""
    finer = scheme.scales[index - 1]
    fmt = finer.format_for(format_of(dtype))
    if isinstance(finer.rule, Linear) and finer.rule.room > 1:
        return finer.rule.room
    if index > 1 or finer.rule != LINEAR or dtype_of(fmt) in IEEE:
        return 1.0
    return 1 + 2.0 ** -(fmt.mantissa_bits + 2)


def _fine_linear(scheme: Scheme, relative: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the finest linear scales below others; zeros yield zero blocks."""
    level = scheme.scales[0]
    fmt = level.format_for(format_of(dtype))
    values = round_to(relative, fmt, up=_up(level))
    _require_fit(relative, values, level, fmt, lost=None)
    small = scheme.dialect.small_scales
    values = torch.where(values == 0, small.finest, values)
    return (
        values if small.finest_of_zeros is None else values.masked_fill(relative == 0, small.finest_of_zeros)
    )


def _power_of_two(
    scheme: Scheme, index: int, amax: torch.Tensor, coarser: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    level, emax = scheme.scales[index], scheme.element.emax
    if coarser is None:
        exponent = scale_exponent(amax, scheme, level.rule)
        # compressed-tensors reads exponents from the bits of the input's dtype: a float16 block below the
        # normal numbers has scale 0 there, which it replaces by 1.
        if rounder(scheme, dtype) is torch.float16:
            exponent = torch.where(amax < quiet_below(scheme), 0, exponent.clamp(min=-14 - emax))
    elif all(above.rule.power_of_two for above in scheme.scales[index + 1 :]):
        exponent = scale_exponent(amax, scheme, level.rule).clamp(min=-127 - min(emax, 0))
        _, shift = torch.frexp(coarser)
        exponent = exponent - (shift.to(torch.int64) - 1).clamp(min=-127)
    else:
        # Of elements as wide as the quotient itself, that can overflow; its exponent is then the largest.
        ratio = _relative(scheme, index, amax, coarser).clamp(max=torch.finfo(amax.dtype).max)
        exponent = scale_exponent(ratio, scheme, level.rule)
    values, past = fitted_powers(exponent, level.format_for(format_of(dtype)), amax.dtype)
    if coarser is not None:
        # Below another level, a rule may ask for one power more than the block needs.
        past = past & (amax > reach(scheme) * combined(scheme, index, values, coarser).double())
    if bool(past.any()):
        raise RangeError(
            f"a block needs scale 2**{int(exponent[past].max())}, past the largest of {level}; "
            "scale the tensor down"
        )
    return values


def _affine(scheme: Scheme, ranges: Ranges) -> tuple[torch.Tensor, torch.Tensor]:
    level, narrow = scheme.scales[0], rounder(scheme, ranges.dtype)
    low, high = ranges.minimum[0], ranges.maximum[0]
    if scheme.widens_to_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    steps = float((scheme.qmax - scheme.qmin) * scheme.element_step)
    width = through(high - low, narrow)
    ideal = through(divided(width, steps), narrow)
    ideal = torch.where(torch.isinf(width), chains.from_halves(low, high, steps), ideal)
    scale = _linear(ideal, scheme, level, ranges.dtype)
    zero = zero_points(scheme, low, scale, empty=ideal == 0, narrow=narrow)
    return store(scale, level.format_for(format_of(ranges.dtype))), zero
