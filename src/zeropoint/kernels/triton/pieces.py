"""Kernels under given scales: a thread has pieces of eight elements, 16 bytes of two-byte floats.

A program has a part of one row; rows that follow each other, with their blocks in order, are one row. Offsets
inside a part are of 32 bits, those of parts of 64. ``cut`` is a :class:`.piece_cuts.PieceCut`, ``k`` the
:class:`.specialization.Constants` of compilation.

Values are float32, float16, bfloat16, or int16 bits of bfloat16. Codes are packed bytes, or words of the
codes of a piece. Scales are floats, or bytes whose values ``levels`` has, (256,) float32; ``coarse`` is the
scale of the whole tensor, (1,) float32, by which they are multiplied or divided.
"""

import triton
import triton.language as tl

from ...ops.lowering import Kind
from .code_bytes import load_codes, store_codes
from .element_codes import (
    bits_of,
    codes_of,
    decoded,
    float32,
    float_of,
    largest,
    rounded_values,
    stored,
    usual,
)

_INTEGER = tl.constexpr(int(Kind.INTEGER))


@triton.jit
def part_place(cut, k: tl.constexpr):
    """Return row and number of the program's part, int64, and how many elements of the row are left, int32."""
    part = tl.program_id(0)
    row = part * 0
    if not k.cut.joined:
        row = part // cut.tiles
        part -= row * cut.tiles
    part = part.to(tl.int64)
    left = tl.minimum(cut.cols - part * (k.cut.pieces * 8), k.cut.pieces * 8)
    return row.to(tl.int64), part, left.to(tl.int32)


@triton.jit
def part_start(row, part, cut, k: tl.constexpr):
    """Return where the program's elements begin, int64."""
    start = row * cut.cols + part * (k.cut.pieces * 8)
    if k.cut.even:
        start = tl.multiple_of(start, 8)
    return start


@triton.jit
def _first_byte(row, part, cut, k: tl.constexpr):
    """Return where the bytes of the program's codes begin, int64."""
    start = row * cut.row_bytes + part * (k.cut.pieces * k.width)
    if k.cut.even and k.width == 8:
        start = tl.multiple_of(start, 8)
    return start


@triton.jit
def part_elements(left, k: tl.constexpr):
    """Return the places of elements in the part, (pieces, 8), and which there are."""
    piece = tl.arange(0, k.cut.pieces)[:, None] * 8
    at = piece + tl.arange(0, 8)[None, :]
    if k.cut.even:
        return at, piece < left
    else:  # noqa: RET505 (Triton compiles one of the two)
        return at, at < left


@triton.jit
def _blocks(row, part, at, cut, k: tl.constexpr):
    """Return the numbers of the blocks of elements, of shape (1, 1), (pieces, 1) or (pieces, 8)."""
    tile: tl.constexpr = k.cut.pieces * 8
    base = row // cut.row_div % cut.row_mod * cut.row_blocks
    if k.cut.single:
        return (base + part * tile // cut.block) + tl.zeros([1, 1], tl.int32)
    elif k.cut.block > 0:  # noqa: RET505
        inside = tl.arange(0, k.cut.pieces)[:, None] // (k.cut.block // 8)
        return (base + part * (tile // k.cut.block)) + inside
    else:
        return base + (part * tile + at) // cut.block


@triton.jit
def _load(numbers, place, there, otherwise, k: tl.constexpr):
    """Return the numbers of blocks."""
    if k.cut.single:
        return tl.load(numbers + place)
    else:  # noqa: RET505
        return tl.load(numbers + place, mask=there, other=otherwise)


@triton.jit
def _scales(scales, levels, coarse, place, there, k: tl.constexpr):
    """Return the scales of blocks, or their reciprocals where values are multiplied by them, float32."""
    found = _load(scales, place, there, 1, k)
    if k.held.bytes:
        scale = tl.load(levels + found.to(tl.int32))
    else:
        scale = float32(found)
    if k.held.coarse:
        if k.held.inverse:
            scale = tl.div_rn(scale, tl.zeros_like(scale) + float32(tl.load(coarse)))
        else:
            scale = scale * float32(tl.load(coarse))
    return scale


@triton.jit
def _divisors(scale, k: tl.constexpr):
    """Return what values are divided by: Inf where a scale was lost, by which every value divides to zero."""
    return tl.where(scale == 0.0, float("inf"), scale) * k.held.unit


@triton.jit
def _zeros(zeros, place, there, k: tl.constexpr):
    """Return the zero points of blocks, float32; zeros where there are none."""
    if k.element.zero_place:
        return _load(zeros, place, there, 0, k).to(tl.float32)
    else:  # noqa: RET505
        return place.to(tl.float32) * 0.0


@triton.jit
def quantize_pieces(x, scales, levels, coarse, zeros, data, bad, cut, k: tl.constexpr):
    """Write the codes of ``x``, and 1 to ``bad``, (1,) int32, if a value is not finite."""
    row, part, left = part_place(cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    value = float32(tl.load(x + start + at, mask=there, other=0))
    place = _blocks(row, part, at, cut, k)
    factor = _scales(scales, levels, coarse, place, there, k)
    zero = _zeros(zeros, place, there, k)
    if not k.multiply:
        factor = _divisors(factor, k)
    amax = largest(value, k)[:, None]
    if k.fused:
        if usual(amax, factor):
            codes = codes_of(value, factor, zero, True, k)
        else:
            codes = codes_of(value, factor, zero, False, k)
            tl.store(bad + tl.zeros_like(amax).to(tl.int32), 1, mask=(amax < float("inf")) == 0)
    else:
        codes = codes_of(value, factor, zero, False, k)
        tl.store(bad + tl.zeros_like(amax).to(tl.int32), 1, mask=(amax < float("inf")) == 0)
    store_codes(data, codes, _first_byte(row, part, cut, k), there, left, k)


@triton.jit
def dequantize_pieces(data, scales, levels, coarse, zeros, table, out, cut, k: tl.constexpr):
    """Write the values of codes; table: (256,) float32, those of all codes."""
    row, part, left = part_place(cut, k)
    at, there = part_elements(left, k)
    first = _first_byte(row, part, cut, k)
    value = decoded(load_codes(data, first, there, left, k.cut.pieces, k), table, k)
    place = _blocks(row, part, at, cut, k)
    if k.element.zero_place:
        value -= _zeros(zeros, place, there, k)
    value *= _scales(scales, levels, coarse, place, there, k) * k.held.unit
    start = part_start(row, part, cut, k)
    tl.store(out + start + at, stored(value, out.dtype.element_ty), mask=there)


@triton.jit
def fake_quantize_pieces(x, scales, levels, inverses, coarse, zeros, table, out, cut, k: tl.constexpr):
    """Write the values of the codes of ``x``; NaN takes the lowest integer, or stays NaN.

    inverses: reciprocals of ``levels``, where values are multiplied by them.
    """
    row, part, left = part_place(cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    value = float32(tl.load(x + start + at, mask=there, other=0))
    place = _blocks(row, part, at, cut, k)
    scale = _scales(scales, levels, coarse, place, there, k)
    zero = _zeros(zeros, place, there, k)
    if k.multiply:
        factor, kept = _scales(scales, inverses, coarse, place, there, k), value
    else:
        factor = _divisors(scale, k)
        # A block whose scale was lost holds zeros of the signs of its values, also where they are Inf.
        lost = (factor == float("inf")) & (value == value)
        kept = tl.where(lost, float_of(bits_of(value) & 0x80000000), value)
    if k.fused:
        if usual(largest(kept, k)[:, None], factor):
            result = rounded_values(kept, factor, zero, table, True, k)
        else:
            result = rounded_values(kept, factor, zero, table, False, k)
    else:
        result = rounded_values(kept, factor, zero, table, False, k)
    result *= scale * k.held.unit
    if k.element.kind != _INTEGER:
        result = tl.where(value == value, result, float("nan"))
    tl.store(out + start + at, stored(result, out.dtype.element_ty), mask=there)
