"""Least-squares scales among 8-bit codes: :mod:`zeropoint.ops.window_search`.

Blocks lie one after the other in memory, ``s.size`` values each. Scales are codes, places of the ascending
positive numbers of their format from ``s.first`` on. ``k`` is what :mod:`.element_codes` takes, and ``s``,
which is ``k.cut``, a :class:`..sweep_launch.Sweep`.

:func:`sweep_exactly` measures errors as the reference does, float64 added pairwise. Where errors are not
weighted, :func:`sweep_nearly` measures them in float32 first, with products in the place of quotients, and
leaves to it the blocks that are not plain. A product ``x r``, whose reciprocal r may be two units off, is
within ``2 ** -20.6 |x r|`` of the quotient and, where it takes another code, both lie as near to the middle
between the two, so that the root of a sum of squares is within ``2 ** -20 ||x||`` of that in float64; and
sums of up to 128 squares, in any order and fused or not, are within ``2 ** -17`` of themselves. Hence a scale
whose sum exceeds the least one by more than

    2 ** -14 of the least  +  2 ** -21 ||x||^2

is worse in float64, too. Scales at or past the lower end of the window may be given a larger error: they are
never taken.
"""

import triton
import triton.language as tl

from ....ops.lowering import Kind
from .element_codes import decoded, encoded, float32

_INTEGER = tl.constexpr(int(Kind.INTEGER))
_INFINITE = tl.constexpr(float("inf"))
_WHOLE = tl.constexpr(12582912.0)
_EXPONENT = tl.constexpr(0x7F800000)
_NEAR, _ABSOLUTE, _TINY = tl.constexpr(1 + 2.0**-14), tl.constexpr(2.0**-21), tl.constexpr(2.0**-120)
_BEYOND = tl.constexpr(1 + 2.0**-19)
# Factors and magnitudes whose squares float32 holds.
_LEAST, _LARGEST = tl.constexpr(2.0**-50), tl.constexpr(2.0**50)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _times(value, coarse, s: tl.constexpr):
    """Scales times the tensor's scale, or over its reciprocal."""
    if s.inverse:
        return tl.div_rn(value, coarse)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return value * coarse


@triton.jit
def _factor(code, coarse, s: tl.constexpr):
    """Scales of int32 codes, coarser included, float32; NaN past the last."""
    if s.power:
        value = _float(tl.where(code > 0, code << 23, 0x00400000))
        value = tl.where(code > s.last, float("nan"), value)
    else:
        magnitude = code & ((1 << s.magnitude_bits) - 1)
        # Under the exponent of float32, subnormals included, the bits are the number over a power of two.
        value = _float(magnitude << (23 - s.mantissa)) * _float(tl.zeros_like(code) + ((s.emin + 126) << 23))
        value = tl.where(magnitude > s.last, float("nan"), value)
        value = tl.where(code > magnitude, -value, value)
    return _times(value, coarse, s)


@triton.jit
def _pairwise(values, s: tl.constexpr):
    """Add rows by halves: a sum of two has one order."""
    halvings: tl.constexpr = s.halvings
    for step in tl.static_range(halvings):
        values = tl.sum(tl.reshape(values, [s.many, 2, s.size >> (step + 1)]), axis=1)
    return tl.reshape(values, [s.many])


@triton.jit
def squared_error(block, factor, table, s: tl.constexpr, k: tl.constexpr):
    """Return the weighted squared errors of blocks under their scales, (many,) float64.

    block: values, weights, and largest magnitudes.
    """
    value, weight, amax = block
    divisor = tl.where(factor == 0.0, _INFINITE, factor) * s.unit
    codes = encoded(value, divisor, tl.zeros_like(factor), amax, k) & ((1 << k.width) - 1)
    numbers = decoded(codes, table, k) * (factor * s.unit)[:, None]
    off = numbers.to(tl.float64) - value.to(tl.float64)
    square = off * off
    if s.weighted:
        square = square * weight
    return _pairwise(square, s)


@triton.jit
def _clipped(block, factor, s: tl.constexpr):
    """Clipping's share of errors or a bit less, float64.

    Of the largest number, or of all.
    """
    value, weight, amax = block
    end = factor.to(tl.float64) * s.end
    if s.weighted:
        past = tl.abs(value).to(tl.float64) - end[:, None]
        past = tl.where(past > 0.0, past, 0.0)
        return _pairwise(past * past * weight, s)
    else:  # noqa: RET505
        past = amax.to(tl.float64) - end
        past = tl.where(past > 0.0, past, 0.0)
        return past * past


@triton.jit
def _count(amax, coarse, ratio, strict: tl.constexpr, s: tl.constexpr):
    """Count scales times ``ratio`` below ``amax``, or not above; (many,) int32."""
    least = tl.zeros_like(amax).to(tl.int32)
    most = least + s.scales
    for _ in range(8):
        middle = (least + most) // 2
        reach = _factor(tl.minimum(middle, s.scales - 1) + s.first, coarse, s) * ratio
        holds = (reach < amax) if strict else (reach <= amax)
        holds = holds & (middle < most)
        least, most = tl.where(holds, middle + 1, least), tl.where(holds, most, middle)
    return least


@triton.jit
def _highest(amax, coarse, s: tl.constexpr):
    """Places of the largest possible best scales, -1 where none."""
    high = _count(amax, coarse, s.halving, True, s) - 1
    if s.power:
        reach = _factor(tl.zeros_like(high), coarse, s) * s.empty
        high = tl.where(reach < amax, tl.maximum(high, 0), high)
    else:
        # Of odd codes so small, half is no scale.
        for code in range(1, s.normal, 2):
            reach = _factor(tl.zeros_like(high) + code, coarse, s) * s.empty
            high = tl.where(reach < amax, tl.maximum(high, code - s.first), high)
    return high


@triton.jit
def _sweep(block, start, coarse, table, s: tl.constexpr, k: tl.constexpr):
    """Codes of least-error scales; ties: the start, else the smallest."""
    amax, limit = block[2], squared_error(block, _factor(start, coarse, s), table, s, k)
    place = _highest(amax, coarse, s)
    low = tl.zeros_like(place)
    if not s.weighted:
        low = tl.minimum(_count(amax, coarse, s.doubling, False, s), s.doubled)
    alive = (place >= low) & (limit > 0.0)
    best, error = tl.zeros_like(place), tl.zeros_like(limit) + _INFINITE
    while tl.max(alive.to(tl.int32), axis=0) > 0:
        factor = _factor(tl.maximum(place, 0) + s.first, coarse, s)
        bound = tl.where(error < limit, error, limit) * s.safe
        alive = alive & ((_clipped(block, factor, s) > bound) == 0)
        found = squared_error(block, factor, table, s, k)
        better = alive & (found <= error)
        best, error = tl.where(better, place, best), tl.where(better, found, error)
        place -= 1
        alive = alive & (place >= low)
    return tl.where(error < limit, best + s.first, start)


@triton.jit
def sweep_exactly(x, weights, scales, coarse, table, unsure, count, cut, k: tl.constexpr):
    """Replace scale codes in place by the codes of least squared error.

    In float64. scales: uint8, one a block. coarse: (1,) float32, the scale above. table: (256,) float32,
    values of element codes. unsure, count: where ``k.cut.listed``, the blocks in question, int32, and how
    many there are, (1,) int32; else all ``cut.blocks``. weights: float64, ``cut.pitch`` between rows of
    ``cut.cols``, if weighted.
    """
    s: tl.constexpr = k.cut
    many: tl.constexpr = s.many
    size: tl.constexpr = s.size
    inside, above = tl.arange(0, size)[None, :], tl.load(coarse)
    total = tl.load(count).to(tl.int64) if s.listed else cut.blocks
    stride = tl.num_programs(0).to(tl.int64) * many
    for first in range(tl.program_id(0).to(tl.int64) * many, total, stride):
        b = first + tl.arange(0, many)
        there = b < total
        if s.listed:
            b = tl.load(unsure + b, mask=there, other=0).to(tl.int64)
        at = b[:, None] * size + inside
        value = float32(tl.load(x + at, mask=there[:, None], other=0))
        weight = value
        if s.weighted:
            place = at // cut.cols * cut.pitch + at % cut.cols
            weight = tl.load(weights + place, mask=there[:, None], other=0.0)
        start = tl.load(scales + b, mask=there, other=0).to(tl.int32)
        amax = tl.max(tl.abs(value), axis=1)
        code = _sweep((value, weight, amax), start, above, table, s, k)
        tl.store(scales + b, code.to(tl.uint8), mask=there)


@triton.jit
def _near_factor(code, by, s: tl.constexpr):
    """Compute normal scales times ``by``, within a few ulps."""
    return _float((code << (23 - s.mantissa)) + ((s.emin - 1) << 23)) * by


@triton.jit
def _near_highest(amax, by, coarse, s: tl.constexpr):
    """Codes of largest possible best scales, normal numbers; by: coarser levels.

    They may be past the last code: half of the scale behind them is none that can be best.
    """
    ratio = tl.div_rn(amax, by) * (1.0 / s.halving)
    below = (_bits(ratio) >> (23 - s.mantissa)) - ((s.emin - 1) << s.mantissa)
    code = tl.maximum(below, 0) + 1
    for _ in tl.static_range(2):
        code = tl.where(
            _times(_near_factor(code, 1.0, s), coarse, s) * s.halving < amax, code, tl.maximum(code - 1, 0)
        )
    return code


@triton.jit
def _reciprocal(x, k: tl.constexpr):
    """Return reciprocals of normal numbers within two units in the last place."""
    if k.native:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 (Triton compiles one of the two)
        return 1.0 / x


@triton.jit
def _near_error(values, factor, clip: tl.constexpr, s: tl.constexpr, k: tl.constexpr):
    """Return the squared errors of blocks under their scales, (many,) float32.

    values: pieces of blocks, a tuple of (many, size / s.pieces). clip: whether a magnitude may be past the
    middle between the largest number and the next.
    """
    element: tl.constexpr = k.element
    pieces: tl.constexpr = s.pieces
    inverse, total = _reciprocal(factor, k)[:, None], factor * 0.0
    for piece in tl.static_range(pieces):
        ratio = values[piece] * inverse
        near = ratio
        if element.kind == _INTEGER:
            if clip:
                near = tl.minimum(tl.maximum(ratio, element.low * 1.0), element.high * 1.0)
            off = ratio - ((near + _WHOLE) - _WHOLE)
        else:
            if clip:
                near = tl.minimum(ratio, element.maximum)
            # What is added has steps of the format's numbers there.
            power = _float(tl.maximum(_bits(near), element.emin << 23) & _EXPONENT)
            lift = power * (2.0 ** (23 - element.mantissa))
            off = ratio - ((near + lift) - lift)
        total += tl.sum(off * off, axis=1)
    return total * factor * factor


@triton.jit
def _nearer(error, code, best, second, picked):
    """Least error, next, and code of the least, after one more."""
    nearer = error < best
    second = tl.minimum(second, tl.where(nearer, best, error))
    return tl.where(nearer, error, best), second, tl.where(nearer, code, picked)


@triton.jit
def _near_clipped(amax, code, by, s: tl.constexpr):
    """Clipping's share of errors, largest number alone, or less; float32."""
    past = tl.maximum(amax - _near_factor(code, by, s) * (s.most / s.unit * _BEYOND), 0.0)
    return past * past


@triton.jit
def sweep_nearly(x, scales, coarse, unsure, count, cut, k: tl.constexpr):
    """Replace scale codes where float32 errors prove which is best.

    The others of the ``cut`` blocks are listed in ``unsure``, and ``count``, 0 before, becomes their number:
    in any order, as programs finish. Arguments: see :func:`sweep_exactly`; it may be compiled
    with products and sums fused.
    """
    s: tl.constexpr = k.cut
    many: tl.constexpr = s.many
    b = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    code, sure, amax, there = _swept_nearly(x, scales, coarse, b, cut, s, k)
    # Each thread stores the codes of its own blocks.
    tl.store(scales + b, code.to(tl.uint8), mask=there & sure)
    listed = ((sure == 0) & (amax > 0.0) & there).to(tl.int32)
    total = tl.sum(listed, axis=0)
    if total > 0:
        place = tl.atomic_add(count, total) + tl.cumsum(listed, axis=0) - listed
        tl.store(unsure + place, b.to(tl.int32), mask=listed > 0)


@triton.jit
def _swept_nearly(x, scales, coarse, b, blocks, s: tl.constexpr, k: tl.constexpr):
    """Best codes of blocks ``b``, proven mask, magnitudes, and block mask."""
    there, above = b < blocks, tl.load(coarse)
    pieces: tl.constexpr = s.pieces
    size: tl.constexpr = s.size // s.pieces
    values, squares, amax = (), b.to(tl.float32) * 0.0, b.to(tl.float32) * 0.0
    for piece in tl.static_range(pieces):
        at = b[:, None] * s.size + (tl.arange(0, size)[None, :] + piece * size)
        value = float32(tl.load(x + at, mask=there[:, None], other=0))
        if k.element.kind != _INTEGER:
            value = tl.abs(value)
        values = values + (value,)  # noqa: RUF005 (Triton has no other way to grow a tuple)
        amax, squares = (
            tl.maximum(amax, tl.max(tl.abs(value), axis=1)),
            squares + tl.sum(value * value, axis=1),
        )
    slack = squares * _ABSOLUTE + _TINY
    coarser = tl.div_rn(1.0, above) if s.inverse else above
    high = _near_highest(amax, coarser, above, s)
    # Half of every scale must be one, and squares normal numbers.
    factor, by = _times(_near_factor(high, 1.0, s), above, s), coarser * s.unit
    plain = (high >= s.normal) & (amax <= _LARGEST) & (factor <= _LARGEST) & (factor >= _LEAST)
    best, code = tl.zeros_like(amax) + _INFINITE, high
    second, picked = best, high
    for _free in range(s.free):
        error = _near_error(values, _near_factor(code, by, s), False, s, k)
        error = tl.where(code <= s.last, error, _INFINITE)
        best, second, picked = _nearer(error, code, best, second, picked)
        code -= 1
    alive = plain & (amax > 0.0) & (_near_clipped(amax, code, by, s) < best * _NEAR + slack)
    alive = alive & (code > s.normal)
    while tl.max(alive.to(tl.int32), axis=0) > 0:
        for _pair in tl.static_range(2):
            error = _near_error(values, _near_factor(code, by, s), True, s, k)
            error = tl.where(alive & (code <= s.last), error, _INFINITE)
            best, second, picked = _nearer(error, code, best, second, picked)
            code -= alive.to(tl.int32)
        alive = alive & (_near_clipped(amax, code, by, s) < best * _NEAR + slack) & (code > s.normal)
    # Smaller scales must clip too much, rather than lie below the normal numbers.
    bound = best * _NEAR + slack
    plain = plain & (_near_clipped(amax, code, by, s) >= bound)
    # The start must have been tried, too.
    start = tl.load(scales + b, mask=there, other=0).to(tl.int32)
    sure = plain & (start <= high) & (start >= s.normal) & (second >= bound)
    return picked, sure & (amax > 0.0), amax, there
