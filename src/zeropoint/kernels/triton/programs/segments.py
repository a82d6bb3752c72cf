"""Segment kernels: runs in a row sharing a scale, several a program.

A segment is a block, or a part of a block that is too long for a program. Segment ``t`` is number ``t %
per_row`` of row ``t // per_row``. Offsets are of 64 bits, so that tensors may have more than 2**31 elements.
``cut`` is a :class:`..segmentation.SegmentCut`, ``k`` the :class:`..specialization.Constants` of compilation.

Values are float32, float16, bfloat16, or int16 bits of bfloat16; codes are packed bytes; factors and zero
points are float32, one each block, and zero points are read where there are some.
"""

import triton
import triton.language as tl

from .element_codes import bits_of, encoded, float32, float_of, largest, stored
from .rounding_modes import noise_of
from .scale_choice import scales_of


@triton.jit
def _segments(k: tl.constexpr):
    """Return the numbers of the segments of this program, (many,) int64."""
    return tl.program_id(0).to(tl.int64) * k.cut.many + tl.arange(0, k.cut.many)


@triton.jit
def _place(t, cut):
    """Return row, first column and length of segments, (many,)."""
    row = t // cut.per_row
    first = (t - row * cut.per_row) * cut.length
    return row, first, tl.minimum(cut.cols - first, cut.length)


@triton.jit
def _elements(t, cut, k: tl.constexpr):
    """Element places of segments, and their mask, (many, size)."""
    inside = tl.arange(0, k.cut.size)[None, :]
    if k.cut.flat:
        return t[:, None] * k.cut.size + inside, (t < cut.segments)[:, None]
    else:  # noqa: RET505 (Triton compiles one of the two)
        row, first, length = _place(t, cut)
        there = (t < cut.segments)[:, None] & (inside < length[:, None])
        return (row * cut.cols + first)[:, None] + inside, there


@triton.jit
def _bytes(t, cut, k: tl.constexpr):
    """First bytes of segments, and byte counts, (many,)."""
    if k.cut.flat:
        return t * (k.cut.size * k.width // 8), tl.where(t < cut.segments, k.cut.size * k.width // 8, 0)
    else:  # noqa: RET505
        row, first, length = _place(t, cut)
        last = (length * k.width + 7) // 8
        return row * cut.row_bytes + first * k.width // 8, tl.where(t < cut.segments, last, 0)


@triton.jit
def _noise(seed, t, cut, k: tl.constexpr):
    """Return the noise of the elements of segments, (many, size)."""
    start = t * k.cut.size
    if not k.cut.flat:
        row, first, _ = _place(t, cut)
        start = row * cut.cols + first
    return noise_of(seed, start[:, None], tl.arange(0, k.cut.size)[None, :], k)


@triton.jit
def _store_codes(data, codes, t, there, cut, k: tl.constexpr):
    """Pack codes, (many, size) int32, low bits first, in whole-byte groups."""
    many: tl.constexpr = k.cut.many
    groups: tl.constexpr = k.cut.size // k.group
    each: tl.constexpr = k.group * k.width // 8
    if not k.cut.flat:
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


@triton.jit(do_not_specialize=["seed"])
def quantize_blocks(x, scales, tables, coarse, zeros, data, notes, seed, cut, k: tl.constexpr):
    """Choose and write each segment's scale, zero point and codes.

    A segment is a whole block. coarse: (1,) float32, the scale of the whole tensor, read where there are two
    levels. scales: float32, or uint8 for scales that are bytes. notes: (1,) int32, set if a value is not
    finite or a scale does not fit its format.
    """
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    inside, amax = t < cut.segments, largest(value, k)
    low = tl.where(inside, tl.min(tl.where(there, value, float("inf")), axis=1), 0.0)
    high = tl.where(inside, tl.max(tl.where(there, value, float("-inf")), axis=1), 0.0)
    scale, factor, zero, fits = scales_of(amax, low, high, coarse, False, k)
    codes = encoded(value, factor, zero, amax, k, _noise(seed, t, cut, k))
    _store_codes(data, codes, t, there, cut, k)
    tl.store(scales + t, stored(scale, scales.dtype.element_ty), mask=inside)
    if k.element.zero_place:
        tl.store(zeros + t, stored(zero, zeros.dtype.element_ty), mask=inside)
    tl.store(notes + t * 0, 1, mask=inside & (((amax < float("inf")) & fits) == 0))


@triton.jit
def segment_extremes(x, low, high, cut, k: tl.constexpr):
    """Write each segment's extremes, float32; both NaN if one is there."""
    t = _segments(k)
    at, there = _elements(t, cut, k)
    value = float32(tl.load(x + at, mask=there, other=0))
    lost, inside = largest(value, k), t < cut.segments
    least = tl.min(tl.where(there, value, float("inf")), axis=1)
    most = tl.max(tl.where(there, value, float("-inf")), axis=1)
    tl.store(low + t, tl.where(lost == lost, least, lost), mask=inside)
    tl.store(high + t, tl.where(lost == lost, most, lost), mask=inside)


@triton.jit
def segment_largest(x, out, cut, k: tl.constexpr):
    """Write each segment's number of largest magnitude, float32, first of equals."""
    t = _segments(k)
    at, there = _elements(t, cut, k)
    bits = bits_of(float32(tl.load(x + at, mask=there, other=0))).to(tl.int32)
    magnitude, place = bits & 0x7FFFFFFF, tl.arange(0, k.cut.size)[None, :]
    most = tl.max(magnitude, axis=1)
    first = tl.min(tl.where(magnitude == most[:, None], place, k.cut.size), axis=1)
    found = tl.sum(tl.where(place == first[:, None], bits, 0), axis=1)
    tl.store(out + t, float_of(found), mask=t < cut.segments)
