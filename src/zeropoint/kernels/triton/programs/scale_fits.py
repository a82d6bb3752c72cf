"""Best scales of integer codes: :mod:`zeropoint.ops.integer_fits`, in exact integers.

Blocks lie one after the other in memory, ``f.size`` values each, ``f.many`` to a program. ``k`` is what
:mod:`.element_codes` takes, ``f`` a :class:`.fit_launch.Fit`.
"""

import triton
import triton.language as tl

from .element_codes import float32
from .scale_sweeps import squared_error

# 1.5 * 2**23 and 1.5 * 2**52: added to float32 and to float64, they leave the nearest integer.
_WHOLE, _WIDE_WHOLE = tl.constexpr(12582912.0), tl.constexpr(6755399441055744.0)


@triton.jit
def _power(exponent):
    """Return powers of two, float64, built from bits."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _better(product, square, numbers, inverse, f: tl.constexpr):
    """Keep product and square sums that gain more, later of equals.

    They are float64. product, square: those so far. numbers: int32, with places as many as keep sums below
    2**31.
    """
    steps = numbers.to(tl.float32) * inverse[:, None]
    steps = tl.minimum(tl.maximum(steps, f.low * 1.0), f.high * 1.0)
    # Bits of the sum are its constant's bits, and the code more.
    codes = (steps + _WHOLE).to(tl.int32, bitcast=True) - 0x4B400000
    new = tl.sum(numbers * codes, axis=1).to(tl.float64)
    own = tl.sum(codes * codes, axis=1).to(tl.float64)
    better = (new > 0.0) & (new * new * square >= product * product * own)
    return tl.where(better, new, product), tl.where(better, own, square)


@triton.jit
def fit_scales(x, ratios, scales, largest, blocks, f: tl.constexpr):
    """Write best scales, float64, 0 if none, and largest magnitudes.

    ratios: (f.ratios,) float32, of the first scale that is tried over each.
    """
    b = tl.program_id(0).to(tl.int64) * f.many + tl.arange(0, f.many)
    there = b < blocks
    at = b[:, None] * f.size + tl.arange(0, f.size)[None, :]
    value = float32(tl.load(x + at, mask=there[:, None], other=0))
    amax = tl.max(tl.abs(value), axis=1)
    bits = amax.to(tl.float64).to(tl.int64, bitcast=True)
    exponent = f.places - tl.where(amax > 0.0, (bits >> 52) - 1022, 0)
    numbers = value.to(tl.float64) * _power(exponent)[:, None]
    numbers = ((numbers + _WIDE_WHOLE) - _WIDE_WHOLE).to(tl.int32)
    most = tl.max(tl.abs(numbers), axis=1).to(tl.float32)
    first = tl.where(most > 0.0, tl.div_rn(tl.zeros_like(most) + f.first, most), 0.0)
    product = tl.zeros_like(amax).to(tl.float64)
    square = product + 1.0
    for place in range(f.ratios):
        product, square = _better(product, square, numbers, first * tl.load(ratios + place), f)
    for _fit in tl.static_range(2):
        again = tl.div_rn(square.to(tl.float32), product.to(tl.float32))
        product, square = _better(product, square, numbers, tl.where(product > 0.0, again, 0.0), f)
    fitted = product / square * _power(-exponent)
    least = amax.to(tl.float64) * f.least
    fitted = tl.where(fitted > least, fitted, least)
    tl.store(scales + b, tl.where(product > 0.0, fitted, 0.0), mask=there)
    tl.store(largest + b, amax, mask=there)


@triton.jit
def compare_scales(x, first, second, table, better, blocks, f: tl.constexpr, k: tl.constexpr):
    """Write to ``better``, uint8, whether second scales have less squared error."""
    b = tl.program_id(0).to(tl.int64) * f.many + tl.arange(0, f.many)
    there = b < blocks
    at = b[:, None] * f.size + tl.arange(0, f.size)[None, :]
    value = float32(tl.load(x + at, mask=there[:, None], other=0))
    block = value, value, tl.max(tl.abs(value), axis=1)
    start = squared_error(block, tl.load(first + b, mask=there, other=1.0), table, f, k)
    found = squared_error(block, tl.load(second + b, mask=there, other=1.0), table, f, k)
    tl.store(better + b, (found < start).to(tl.uint8), mask=there)
