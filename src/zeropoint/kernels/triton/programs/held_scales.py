"""Given scales in kernels: read as they are stored, in Triton.

Scales are floats, E8M0 bytes, or other bytes, of whose codes ``tables`` has three rows of 256 float32:
values, times or over the scale of the whole tensor where there is one, reciprocals of what elements are
divided by, and what these lack (:func:`.element_codes.reciprocals`). ``coarse`` is the scale of the whole
tensor, (1,) float32.
"""

import triton
import triton.language as tl

from ....ops.lowering import How
from .element_codes import float32, reciprocals, stored
from .scale_choice import power, scales_fit_fusing, scales_of

_AFFINE, _MINIFLOAT = tl.constexpr(int(How.AFFINE)), tl.constexpr(int(How.MINIFLOAT))
_ROW, _REST = tl.constexpr(256), tl.constexpr(512)


@triton.jit
def _power_of(code):
    """Return ``2**(code - 127)`` of E8M0 codes, int32; NaN for 255."""
    return tl.where(code == 255, float("nan"), power(code))


@triton.jit
def scale_of(found, tables, coarse, k: tl.constexpr):
    """Values of stored scales, float32; codes multiply these and the step."""
    if k.held.power:
        return _power_of(found.to(tl.int32))
    if k.held.bytes:
        return tl.load(tables + found.to(tl.int32))
    return _combined(float32(found), _outer(coarse, k), k)


@triton.jit
def _combined(scale, outer, k: tl.constexpr):
    """Scales times or over the tensor's scale, (1,) or a number."""
    if k.held.coarse:
        outer += tl.zeros_like(scale)
        scale = tl.div_rn(scale, outer) if k.held.inverse else scale * outer
    return scale


@triton.jit
def _outer(coarse, k: tl.constexpr):
    return float32(tl.load(coarse)) if k.held.coarse else 1.0


@triton.jit
def divisor_of(scale, k: tl.constexpr):
    """Divisor of elements; Inf, which gives zeros, for lost scales."""
    return tl.where(scale == 0.0, float("inf"), scale) * k.held.unit


@triton.jit
def looked_up(code, tables, k: tl.constexpr):
    """Look up factors of int32 scale codes, reciprocals, and their remainders."""
    if k.held.power:
        inverse = _power_of(tl.where(code == 255, code, 254 - code)) * (1.0 / k.held.unit)
        return _power_of(code) * k.held.unit, inverse, inverse * 0.0
    factor = divisor_of(tl.load(tables + code), k)
    return factor, tl.load(tables + _ROW + code), tl.load(tables + _REST + code)


@triton.jit
def factors_of(found, tables, coarse, k: tl.constexpr):
    """Arguments of :func:`.element_codes.ratios`: factors, reciprocals and their remainders."""
    scale = scale_of(found, tables, coarse, k)
    if k.multiply:
        inverse = looked_up(found.to(tl.int32), tables, k)[1]
        return inverse, inverse, inverse
    else:  # noqa: RET505
        if k.held.bytes:
            return looked_up(found.to(tl.int32), tables, k)
        factor = divisor_of(scale, k)
        if k.fused:
            inverse, rest = reciprocals(factor)
            return factor, inverse, rest
        else:  # noqa: RET505
            return factor, factor, factor


@triton.jit
def chosen_scales(amax, low, high, coarse, scales, tables, zeros, notes, place, inside, k: tl.constexpr):
    """Choose and write block scales and zero points; return :func:`factors_of`.

    All are (blocks,). low, high: read where scales follow from both. place: numbers of blocks. inside: which
    of them there are. notes: (1,) int32, set if a value is not finite or a scale does not fit its format.

    Returns (factor, inverse, rest, zero).
    """
    if k.fused and not (k.rule.how == _AFFINE or k.rule.unsigned):
        if scales_fit_fusing(amax, coarse, k):
            scale, factor, zero, fits = scales_of(amax, low, high, coarse, True, k)
        else:
            scale, factor, zero, fits = scales_of(amax, low, high, coarse, False, k)
    else:
        scale, factor, zero, fits = scales_of(amax, low, high, coarse, False, k)
    tl.store(scales + place, stored(scale, scales.dtype.element_ty), mask=inside)
    if k.element.zero_place:
        tl.store(zeros + place, stored(zero, zeros.dtype.element_ty), mask=inside)
    tl.store(notes + place * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))
    inverse, rest = factor, factor
    if k.fused:
        # A block of zeros has the codes of zeros under any factor.
        if k.rule.how == _MINIFLOAT:
            factor, inverse, rest = looked_up(scale, tables, k)
            inverse, rest = tl.where(amax == 0.0, 1.0, inverse), tl.where(amax == 0.0, 0.0, rest)
        else:
            inverse, rest = reciprocals(tl.where(amax == 0.0, 1.0, factor))
        factor = tl.where(amax == 0.0, 1.0, factor)
    return factor, inverse, rest, zero


@triton.jit
def fill_tables(levels, outer, tables, k: tl.constexpr):
    """Write three table rows; levels: all codes' values; outer: tensor's scale."""
    code = tl.arange(0, 256)
    scale = _combined(tl.load(levels + code), outer, k)
    tl.store(tables + code, scale)
    inverse, rest = reciprocals(divisor_of(scale, k))
    tl.store(tables + _ROW + code, inverse)
    tl.store(tables + _REST + code, rest)


@triton.jit
def scale_tables(levels, coarse, tables, cut, k: tl.constexpr):
    """See :func:`fill_tables`."""
    fill_tables(levels, _outer(coarse, k), tables, k)
