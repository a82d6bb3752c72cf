"""Fake quantization gradients, passed where the rounded value is a code.

Gradients are moved as the bits they are, so that NaN keeps its own. A program has the pieces of
:mod:`.pieces`.
"""

import triton
import triton.language as tl

from ....ops.lowering import Kind, Rounded, ZeroPlace
from .element_codes import float32, largest, on_the_grid, ratios, rounded
from .held_scales import factors_of
from .pieces import (
    load_of_blocks,
    part_blocks,
    part_elements,
    part_noise,
    part_place,
    part_start,
    part_zeros,
    without_offsets,
)
from .rounding_modes import rounded_to

_INTEGER = tl.constexpr(int(Kind.INTEGER))
_AFTER, _INSIDE = tl.constexpr(int(ZeroPlace.AFTER)), tl.constexpr(int(ZeroPlace.INSIDE))
# 1.5 * 2**23: added to a float32 below 2**22 and subtracted again, it leaves the nearest integer.
_WHOLE = tl.constexpr(12582912.0)
_HALF_EVEN = tl.constexpr(int(Rounded.HALF_EVEN))


@triton.jit
def _within(ratio, zero, noise, low, high, k: tl.constexpr):
    """Mask of quotients, (many, size), that are not clipped; NaN is."""
    if k.element.kind == _INTEGER:
        first, last = zero * 0 + low, zero * 0 + high
        if k.element.zero_place == _AFTER:
            first, last = first - zero, last - zero
        elif k.element.zero_place == _INSIDE:
            ratio = rounded(ratio + zero, k.element.quotient)
        # Past a code more than the ends nothing changes, and below 2**22 the sum rounds to an integer.
        near = tl.minimum(tl.maximum(ratio, first - 1.0), last + 1.0)
        near = (
            (near + _WHOLE) - _WHOLE
            if k.element.rounding == _HALF_EVEN
            else rounded_to(near, 1.0, 1.0, noise, k)
        )
        return (near >= first) & (near <= last) & (ratio == ratio)
    elif k.element.rounding == _HALF_EVEN:  # noqa: RET505 (Triton compiles one of these)
        return (ratio >= low) & (ratio <= high)
    else:
        near = tl.minimum(tl.maximum(ratio, -2.0 * k.element.maximum), 2.0 * k.element.maximum)
        magnitude, _ = on_the_grid(near, True, noise, k)
        return (magnitude <= k.element.maximum) & (ratio == ratio)


@triton.jit(do_not_specialize=["seed"])
def pass_within(x, grad, scales, tables, coarse, zeros, ends, out, seed, cut, k: tl.constexpr):
    """Write gradients of unclipped values, and signed zeros for others.

    grad, out: integers of the gradients' bits. ends: (2,) float32, the smallest and the largest integer, or
    quotient that is not clipped. Other arguments: see :mod:`.pieces`.
    """
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    value = float32(tl.load(x + start + at, mask=there, other=0))
    gradient = tl.load(grad + start + at, mask=there, other=0)
    place = part_blocks(row, part, at, cut, k)
    found, zero = load_of_blocks(scales, place, there, 1, k), part_zeros(zeros, place, there, k)
    value = without_offsets(value, zero, k)
    factor, inverse, rest = factors_of(found, tables, coarse, k)
    ratio = ratios(value, factor, inverse, rest, largest(value, k)[:, None], k)
    noise = part_noise(seed, start, k)
    kept = _within(ratio, zero, noise, tl.load(ends), tl.load(ends + 1), k)
    sign: tl.constexpr = -(1 << (gradient.dtype.primitive_bitwidth - 1))
    tl.store(out + start + at, tl.where(kept, gradient, gradient & sign), mask=there)
