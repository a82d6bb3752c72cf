"""Kernels on segments: runs of elements of a row that share a scale, several to a program.

A segment is a block, or a part of a block that is too long for a program. Segment ``t`` is number ``t %
per_row`` of row ``t // per_row``. Offsets are of 64 bits, so that tensors may have more than 2**31 elements.
``cut`` is a :class:`.segmentation.Cut`, ``k`` the :class:`.specialization.Constants` of compilation.

Values are float32, float16, bfloat16, or int16 bits of bfloat16; codes are packed bytes; factors and zero
points are float32, one each block, and zero points are read where there are some.
"""

import triton
import triton.language as tl

from ...ops.lowering import Kind
from .element_codes import bits_of, decoded, encoded, float32, float_of, stored
from .scale_choice import scales_of

_INTEGER = tl.constexpr(int(Kind.INTEGER))


@triton.jit
def _segments(k: tl.constexpr):
    """Return the numbers of the segments of this program, (many,) int64."""
    return tl.program_id(0).to(tl.int64) * k.many + tl.arange(0, k.many)


@triton.jit
def _place(t, cut):
    """Return row, first column and length of segments, (many,)."""
    row = t // cut.per_row
    first = (t - row * cut.per_row) * cut.length
    return row, first, tl.minimum(cut.cols - first, cut.length)


@triton.jit
def _elements(t, cut, k: tl.constexpr):
    """Return where the elements of segments lie, and which there are, (many, size)."""
    inside = tl.arange(0, k.size)[None, :]
    if k.flat:
        return t[:, None] * k.size + inside, (t < cut.segments)[:, None]
    else:  # noqa: RET505 (Triton compiles one of the two)
        row, first, length = _place(t, cut)
        there = (t < cut.segments)[:, None] & (inside < length[:, None])
        return (row * cut.cols + first)[:, None] + inside, there


@triton.jit
def _bytes(t, cut, k: tl.constexpr):
    """Return where the bytes of segments begin, and how many there are, (many,)."""
    if k.flat:
        return t * (k.size * k.width // 8), tl.where(t < cut.segments, k.size * k.width // 8, 0)
    else:  # noqa: RET505
        row, first, length = _place(t, cut)
        last = (length * k.width + 7) // 8
        return row * cut.row_bytes + first * k.width // 8, tl.where(t < cut.segments, last, 0)


@triton.jit
def _load_blocks(numbers, t, cut, otherwise, k: tl.constexpr):
    """Return the numbers of the blocks of segments, (many,)."""
    if k.own:
        place = t
    else:
        row, first, _ = _place(t, cut)
        place = row // cut.row_div % cut.row_mod * cut.row_blocks + first // cut.block
    return tl.load(numbers + place, mask=t < cut.segments, other=otherwise)


@triton.jit
def _load_zeros(zeros, t, cut, k: tl.constexpr):
    """Return the zero points of segments, (many,); 0 where there are none."""
    if k.element.zero_place:
        return _load_blocks(zeros, t, cut, 0.0, k)
    else:  # noqa: RET505
        return tl.zeros_like(t).to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(value, k: tl.constexpr):
    """Return the largest magnitude of each segment, NaN where there is one.

    The interpreter takes long for a reduction of its own, and finds the largest bits.
    """
    if k.native:
        return tl.reduce(tl.abs(value), 1, _larger)
    else:  # noqa: RET505
        return float_of(tl.max((bits_of(value) & 0x7FFFFFFF).to(tl.int32), axis=1))


@triton.jit
def _store_codes(data, codes, t, there, cut, k: tl.constexpr):
    """Pack codes, (many, size) int32, low bits first, a group of codes into whole bytes."""
    many: tl.constexpr = k.many
    groups: tl.constexpr = k.size // k.group
    each: tl.constexpr = k.group * k.width // 8
    if not k.flat:
        codes = tl.where(there, codes, 0)
    words = codes
    if k.group > 1:
        parts = tl.reshape(codes, [many, groups, k.group]).to(tl.int64 if each > 3 else tl.int32)
        place = tl.arange(0, k.group)
        # What is above the last code is cut off with the word's last byte.
        mask = tl.where(place < k.group - 1, (1 << k.width) - 1, -1).to(parts.dtype)
        shifts = place.to(parts.dtype) * k.width
        words = tl.sum((parts & mask[None, None, :]) << shifts[None, None, :], axis=2)
    first, last = _bytes(t, cut, k)
    for byte in tl.static_range(each):
        at = tl.arange(0, groups)[None, :] * each + byte
        tl.store(data + (first[:, None] + at), (words >> (8 * byte)).to(tl.uint8), mask=at < last[:, None])


@triton.jit
def _load_codes(data, t, cut, k: tl.constexpr):
    """Return what :func:`_store_codes` has stored, (many, size) int32."""
    many: tl.constexpr = k.many
    groups: tl.constexpr = k.size // k.group
    each: tl.constexpr = k.group * k.width // 8
    words = tl.zeros([many, groups], tl.int64 if each > 3 else tl.int32)
    first, last = _bytes(t, cut, k)
    for byte in tl.static_range(each):
        at = tl.arange(0, groups)[None, :] * each + byte
        found = tl.load(data + (first[:, None] + at), mask=at < last[:, None], other=0)
        words |= found.to(words.dtype) << (8 * byte)
    if k.group > 1:
        shifts = tl.arange(0, k.group).to(words.dtype) * k.width
        words = tl.reshape(words[:, :, None] >> shifts[None, None, :], [many, k.size])
    return (words & ((1 << k.width) - 1)).to(tl.int32)


@triton.jit
def quantize_segments(x, factors, zeros, data, bad, cut, k: tl.constexpr):
    """Write the codes of ``x`` under given scales, and 1 to ``bad``, (1,) int32, if a value is not finite."""
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    amax = _largest(value, k)
    factor, zero = _load_blocks(factors, t, cut, 1.0, k), _load_zeros(zeros, t, cut, k)
    _store_codes(data, encoded(value, factor, zero, amax, k), t, there, cut, k)
    tl.store(bad + t * 0, 1, mask=(t < cut.segments) & ((amax < float("inf")) == 0))


@triton.jit
def quantize_blocks(x, coarse, scales, zeros, data, bad, cut, k: tl.constexpr):
    """Choose the scale of each segment, a whole block, and write it with zero point and codes.

    coarse: (1,) float32, the scale of the whole tensor, read where there are two levels. scales: float32, or
    uint8 for scales that are bytes. bad: (1,) int32, set if a value is not finite or a scale does not fit its
    format.
    """
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    inside, amax = t < cut.segments, _largest(value, k)
    low = tl.where(inside, tl.min(tl.where(there, value, float("inf")), axis=1), 0.0)
    high = tl.where(inside, tl.max(tl.where(there, value, float("-inf")), axis=1), 0.0)
    scale, factor, zero, fits = scales_of(amax, low, high, coarse, k)
    _store_codes(data, encoded(value, factor, zero, amax, k), t, there, cut, k)
    tl.store(scales + t, scale.to(scales.dtype.element_ty), mask=inside)
    if k.element.zero_place:
        tl.store(zeros + t, zero, mask=inside)
    tl.store(bad + t * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))


@triton.jit
def segment_extremes(x, low, high, cut, k: tl.constexpr):
    """Write the smallest and the largest number of each segment, float32; both are NaN where there is one."""
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    lost, inside = _largest(value, k), t < cut.segments
    least = tl.min(tl.where(there, value, float("inf")), axis=1)
    most = tl.max(tl.where(there, value, float("-inf")), axis=1)
    tl.store(low + t, tl.where(lost == lost, least, lost), mask=inside)
    tl.store(high + t, tl.where(lost == lost, most, lost), mask=inside)


@triton.jit
def dequantize_segments(data, factors, zeros, table, out, cut, k: tl.constexpr):
    """Write the values of codes; table: (256,) float32, those of all codes."""
    t = _segments(k)
    codes = _load_codes(data, t, cut, k)
    value = decoded(codes, table, k)
    if k.element.zero_place:
        value -= _load_zeros(zeros, t, cut, k)[:, None]
    value *= _load_blocks(factors, t, cut, 1.0, k)[:, None]
    at, there = _elements(t, cut, k)
    tl.store(out + at, stored(value, out.dtype.element_ty), mask=there)


@triton.jit
def fake_quantize_segments(x, factors, back, zeros, table, out, cut, k: tl.constexpr):
    """Write the values of the codes of ``x``; NaN takes the lowest integer, or stays NaN.

    factors: what values are divided by. back: what codes are multiplied by, 0 where the former is Inf.
    """
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    factor, zero = _load_blocks(factors, t, cut, 1.0, k), _load_zeros(zeros, t, cut, k)
    # A block whose scale was lost holds zeros of the signs of its values, also where they are Inf.
    lost = (factor[:, None] == float("inf")) & (value == value)
    kept = tl.where(lost, float_of(bits_of(value) & 0x80000000), value)
    codes = encoded(kept, factor, zero, _largest(value, k), k) & ((1 << k.width) - 1)
    result = decoded(codes, table, k)
    if k.element.zero_place:
        result -= zero[:, None]
    result *= _load_blocks(back, t, cut, 1.0, k)[:, None]
    if k.element.kind != _INTEGER:
        result = tl.where(value == value, result, float("nan"))
    tl.store(out + at, stored(result, out.dtype.element_ty), mask=there)
