"""Given scales in kernels: read as they are stored, in Triton.

Scales are floats, or bytes, of whose codes ``tables`` has three rows of 256 float32: values, times or over
the scale of the whole tensor where there is one, reciprocals of what elements are divided by, and what these
lack
(:func:`.element_codes.reciprocals`). Where elements are multiplied by exact reciprocals the second row has
these. ``coarse`` is the scale of the whole tensor, (1,) float32.
"""

import triton
import triton.language as tl

from .element_codes import float32, reciprocals

_ROW, _REST = tl.constexpr(256), tl.constexpr(512)


@triton.jit
def scale_of(found, tables, coarse, k: tl.constexpr):
    """Return the values of stored scales, float32; codes are multiplied by these and the step."""
    if k.held.bytes:
        return tl.load(tables + found.to(tl.int32))
    else:  # noqa: RET505 (Triton compiles one of the two)
        return _combined(float32(found), _outer(coarse, k), k)


@triton.jit
def _combined(scale, outer, k: tl.constexpr):
    """Return scales times or over the scale of the whole tensor, (1,) or a number."""
    if k.held.coarse:
        outer += tl.zeros_like(scale)
        scale = tl.div_rn(scale, outer) if k.held.inverse else scale * outer
    return scale


@triton.jit
def _outer(coarse, k: tl.constexpr):
    return float32(tl.load(coarse)) if k.held.coarse else 1.0


@triton.jit
def divisor_of(scale, k: tl.constexpr):
    """Return what elements are divided by; Inf, by which all divide to zero, where a scale was lost."""
    return tl.where(scale == 0.0, float("inf"), scale) * k.held.unit


@triton.jit
def looked_up(code, tables, k: tl.constexpr):
    """Return the factors of codes of scales, int32, their reciprocals, and what these lack."""
    factor = divisor_of(tl.load(tables + code), k)
    return factor, tl.load(tables + _ROW + code), tl.load(tables + _REST + code)


@triton.jit
def factors_of(found, tables, coarse, k: tl.constexpr):
    """Return what :func:`.element_codes.ratios` takes: factors, their reciprocals, and what these lack."""
    scale = scale_of(found, tables, coarse, k)
    if k.multiply:
        inverse = tl.load(tables + _ROW + found.to(tl.int32))
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
def fill_tables(levels, outer, tables, k: tl.constexpr):
    """Write the three rows of tables; levels: (256,), the values of all codes. outer: the tensor's scale."""
    code = tl.arange(0, 256)
    scale = _combined(tl.load(levels + code), outer, k)
    tl.store(tables + code, scale)
    if k.multiply:
        inverse = tl.div_rn(1.0, scale)
        rest = inverse
    else:
        inverse, rest = reciprocals(divisor_of(scale, k))
    tl.store(tables + _ROW + code, inverse)
    tl.store(tables + _REST + code, rest)


@triton.jit
def scale_tables(levels, coarse, tables, cut, k: tl.constexpr):
    """See :func:`fill_tables`."""
    fill_tables(levels, _outer(coarse, k), tables, k)
