"""Kernels on segments: runs of elements of a row that share a scale, several to a program.

A segment is a block, or a part of a block that is too long for one; see :class:`.cuts.Cut`, which kernels take as ``cut``. Segment ``t`` is number
``t % per_row`` of row ``t // per_row``. Offsets are of 64 bits, so that tensors may have more than 2**31
elements.

``size`` is the length of a segment rounded up to a power of two, and ``many`` the segments of a program.
``flat`` says that segments follow each other in memory without gaps, ``own`` that segment ``t`` has scale
``t``. Records are those of :mod:`zeropoint.ops.lowering`.
"""

import triton
import triton.language as tl

from ...ops.lowering import Kind
from .block_scales import scales_of
from .elements import bits_of, decoded, encoded, float32, float_of, stored

_INTEGER = tl.constexpr(int(Kind.INTEGER))


@triton.jit
def _segments(many: tl.constexpr):
    """Return the numbers of the segments of this program, (many,) int64."""
    return tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)


@triton.jit
def _elements(t, cut, size: tl.constexpr, flat: tl.constexpr):
    """Return where the elements of segments lie, and which there are, (many, size)."""
    inside = tl.arange(0, size)[None, :]
    if flat:
        return t[:, None] * size + inside, (t < cut.count)[:, None]
    else:  # noqa: RET505
        row = t // cut.per_row
        first = (t - row * cut.per_row) * cut.length
        length = tl.minimum(cut.cols - first, cut.length)
        there = (t < cut.count)[:, None] & (inside < length[:, None])
        return (row * cut.cols + first)[:, None] + inside, there


@triton.jit
def _bytes(t, cut, size: tl.constexpr, width: tl.constexpr, flat: tl.constexpr):
    """Return where the bytes of segments begin, and how many there are, (many,)."""
    if flat:
        return t * (size * width // 8), tl.where(t < cut.count, size * width // 8, 0)
    else:  # noqa: RET505
        row = t // cut.per_row
        first = (t - row * cut.per_row) * cut.length
        length = tl.minimum(cut.cols - first, cut.length)
        last = (length * width + 7) // 8
        return row * cut.row_bytes + first * width // 8, tl.where(t < cut.count, last, 0)


@triton.jit
def _scale_places(t, cut, own: tl.constexpr):
    """Return the numbers of the scales of segments, (many,)."""
    if own:
        return t
    else:  # noqa: RET505
        row = t // cut.per_row
        first = (t - row * cut.per_row) * cut.length
        return row // cut.row_div % cut.row_mod * cut.row_blocks + first // cut.block


@triton.jit
def _largest(value):
    """Return the largest magnitude of each segment, NaN where there is one: its bits are the largest."""
    return float_of(tl.max((bits_of(value) & 0x7FFFFFFF).to(tl.int32), axis=1))


@triton.jit
def _no_zeros(t):
    """Return zero for the zero point of segments that have none."""
    return tl.zeros_like(t).to(tl.float32)


@triton.jit
def _store_codes(data, codes, first, last, width: tl.constexpr, group: tl.constexpr):
    """Pack codes, (many, size) int32, low bits first, a group of ``group`` codes into whole bytes."""
    many: tl.constexpr = codes.shape[0]
    groups: tl.constexpr = codes.shape[1] // group
    each: tl.constexpr = group * width // 8
    codes = codes & ((1 << width) - 1)
    if group > 1:
        parts = tl.reshape(codes, [many, groups, group]).to(tl.int64 if each > 3 else tl.int32)
        shifts = tl.arange(0, group).to(parts.dtype) * width
        words = tl.sum(parts << shifts[None, None, :], axis=2)
    else:
        words = codes
    for byte in tl.static_range(each):
        at = tl.arange(0, groups)[None, :] * each + byte
        value = ((words >> (8 * byte)) & 255).to(tl.uint8)
        tl.store(data + (first[:, None] + at), value, mask=at < last[:, None])


@triton.jit
def _load_codes(data, first, last, size: tl.constexpr, width: tl.constexpr, group: tl.constexpr):
    """Return what :func:`_store_codes` has stored, (many, size) int32."""
    many: tl.constexpr = first.shape[0]
    groups: tl.constexpr = size // group
    each: tl.constexpr = group * width // 8
    words = tl.zeros([many, groups], tl.int64 if each > 3 else tl.int32)
    for byte in tl.static_range(each):
        at = tl.arange(0, groups)[None, :] * each + byte
        found = tl.load(data + (first[:, None] + at), mask=at < last[:, None], other=0)
        words |= found.to(words.dtype) << (8 * byte)
    if group > 1:
        shifts = tl.arange(0, group).to(words.dtype) * width
        words = tl.reshape(words[:, :, None] >> shifts[None, None, :], [many, size])
    return (words & ((1 << width) - 1)).to(tl.int32)


@triton.jit
def quantize_segments(
    x, factors, zeros, data, bad, cut, element: tl.constexpr, order: tl.constexpr, width: tl.constexpr,
    group: tl.constexpr, size: tl.constexpr, many: tl.constexpr, flat: tl.constexpr, own: tl.constexpr,
):  # fmt: skip
    """Write the codes of ``x`` under given scales, and 1 to ``bad`` where a value is not finite.

    x: float32, float16, or int16 bits of bfloat16. factors, zeros: float32, one each block; zeros are read
    where there are zero points. data: uint8. bad: (1,) int32.
    """
    t = _segments(many)
    at, there = _elements(t, cut, size, flat)
    value = float32(tl.load(x + at, mask=there, other=0))
    place, inside = _scale_places(t, cut, own), t < cut.count
    factor = tl.load(factors + place, mask=inside, other=1.0)
    zero = tl.load(zeros + place, mask=inside, other=0.0) if element.zero_place else _no_zeros(t)
    codes = encoded(value, factor[:, None], zero[:, None], element, order)
    first, last = _bytes(t, cut, size, width, flat)
    _store_codes(data, tl.where(there, codes, 0), first, last, width, group)
    tl.store(bad + t * 0, 1, mask=inside & ((_largest(value) < float("inf")) == 0))


@triton.jit
def quantize_blocks(
    x, coarse, scales, zeros, data, bad, cut, element: tl.constexpr, rule: tl.constexpr, order: tl.constexpr,
    width: tl.constexpr, group: tl.constexpr, size: tl.constexpr, many: tl.constexpr, flat: tl.constexpr,
    multiply: tl.constexpr,
):  # fmt: skip
    """Choose the scale of each segment, a whole block, and write it with the codes.

    x, data: as in :func:`quantize_segments`. coarse: (1,) float32, the scale of the whole tensor, read where there are two levels. scales,
    zeros: float32, or uint8 for scales that are bytes, one each segment; zeros are written where there are
    zero points. bad: (1,) int32, set where a value is not finite or a scale does not fit its format.
    """
    t = _segments(many)
    at, there = _elements(t, cut, size, flat)
    value = float32(tl.load(x + at, mask=there, other=0))
    inside = t < cut.count
    low = tl.min(tl.where(there, value, float("inf")), axis=1)
    high = tl.max(tl.where(there, value, float("-inf")), axis=1)
    low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
    amax = _largest(value)
    scale, factor, zero, fits = scales_of(amax, low, high, coarse, rule, multiply)
    codes = encoded(value, factor[:, None], zero[:, None], element, order)
    first, last = _bytes(t, cut, size, width, flat)
    _store_codes(data, tl.where(there, codes, 0), first, last, width, group)
    tl.store(scales + t, scale.to(scales.dtype.element_ty), mask=inside)
    if element.zero_place:
        tl.store(zeros + t, zero, mask=inside)
    tl.store(bad + t * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))


@triton.jit
def segment_extremes(
    x, low, high, cut, size: tl.constexpr, many: tl.constexpr, flat: tl.constexpr
):
    """Write the smallest and the largest number of each segment, float32; both are NaN where there is one."""
    t = _segments(many)
    at, there = _elements(t, cut, size, flat)
    value = float32(tl.load(x + at, mask=there, other=0))
    lost = tl.max(tl.where(there & (value != value), 1, 0), axis=1) > 0
    least = tl.min(tl.where(there, value, float("inf")), axis=1)
    most = tl.max(tl.where(there, value, float("-inf")), axis=1)
    inside = t < cut.count
    tl.store(low + t, tl.where(lost, float("nan"), least), mask=inside)
    tl.store(high + t, tl.where(lost, float("nan"), most), mask=inside)


@triton.jit
def dequantize_segments(
    data, factors, zeros, table, out, cut, element: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
    size: tl.constexpr, many: tl.constexpr, flat: tl.constexpr, own: tl.constexpr,
):  # fmt: skip
    """Write the values of codes: float32, float16, or int16 bits of bfloat16.

    table: (256,) float32, the values of all codes.
    """
    t = _segments(many)
    first, last = _bytes(t, cut, size, width, flat)
    codes = _load_codes(data, first, last, size, width, group)
    at, there = _elements(t, cut, size, flat)
    place, inside = _scale_places(t, cut, own), t < cut.count
    value = decoded(codes, element, table, width)
    if element.zero_place:
        value -= tl.load(zeros + place, mask=inside, other=0.0)[:, None]
    value *= tl.load(factors + place, mask=inside, other=1.0)[:, None]
    tl.store(out + at, stored(value, out.dtype.element_ty), mask=there)


@triton.jit
def fake_quantize_segments(
    x, factors, back, zeros, table, out, cut, element: tl.constexpr, order: tl.constexpr,
    width: tl.constexpr, size: tl.constexpr, many: tl.constexpr, flat: tl.constexpr, own: tl.constexpr,
):  # fmt: skip
    """Write the values of the codes of ``x``; NaN takes the lowest integer, or stays NaN.

    factors: what values are divided by. back: what codes are multiplied by, 0 where the former is Inf.
    """
    t = _segments(many)
    at, there = _elements(t, cut, size, flat)
    value = float32(tl.load(x + at, mask=there, other=0))
    place, inside = _scale_places(t, cut, own), t < cut.count
    factor = tl.load(factors + place, mask=inside, other=1.0)[:, None]
    zero = tl.load(zeros + place, mask=inside, other=0.0) if element.zero_place else _no_zeros(t)
    # A block whose scale was lost holds zeros of the signs of its values, also where they are Inf.
    lost = (factor == float("inf")) & (value == value)
    kept = tl.where(lost, float_of(bits_of(value) & 0x80000000), value)
    codes = encoded(kept, factor, zero[:, None], element, order) & ((1 << width) - 1)
    result = decoded(codes, element, table, width)
    if element.zero_place:
        result -= zero[:, None]
    result *= tl.load(back + place, mask=inside, other=1.0)[:, None]
    if element.kind != _INTEGER:
        result = tl.where(value == value, result, float("nan"))
    tl.store(out + at, stored(result, out.dtype.element_ty), mask=there)
