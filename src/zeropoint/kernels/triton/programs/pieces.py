"""Kernels under given scales: eight-element pieces, 16 bytes of two-byte floats.

A program has a part of one row; rows that follow each other, with their blocks in order, are one row. Offsets
inside a part have 32 bits, places of parts 64. ``cut`` is a :class:`..piece_cuts.PieceCut`, ``k`` the
:class:`..specialization.Constants` of compilation.

Values are float32, float16, bfloat16, or int16 bits of bfloat16, codes packed bytes. For ``scales``,
``tables`` and ``coarse`` see :mod:`.held_scales`.
"""

import triton
import triton.language as tl

from ....ops.lowering import Kind, ZeroPlace
from .code_bytes import load_codes, store_codes
from .element_codes import (
    bits_of,
    codes_of,
    decoded,
    float32,
    float_of,
    largest,
    ratio_of,
    ratios,
    rounded_values,
    stored,
    usual,
)
from .held_scales import factors_of, scale_of
from .rounding_modes import noise_of, piece_noise

_INTEGER, _PRODUCT = tl.constexpr(int(Kind.INTEGER)), tl.constexpr(int(ZeroPlace.PRODUCT))


@triton.jit
def part_place(part, cut, k: tl.constexpr):
    """Row and number of a part, int64, and elements, int32.

    part: of the program.
    """
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
def first_byte(row, part, cut, k: tl.constexpr):
    """Return where the bytes of the program's codes begin, int64."""
    start = row * cut.row_bytes + part * (k.cut.pieces * k.width)
    if k.cut.even and k.width == 8:
        start = tl.multiple_of(start, 8)
    return start


@triton.jit
def part_elements(left, k: tl.constexpr):
    """Element places in the part, (pieces, 8), and their mask."""
    piece = tl.arange(0, k.cut.pieces)[:, None] * 8
    at = piece + tl.arange(0, 8)[None, :]
    if k.cut.even:
        return at, piece < left
    else:  # noqa: RET505 (Triton compiles one of the two)
        return at, at < left


@triton.jit
def part_blocks(row, part, at, cut, k: tl.constexpr):
    """Block numbers of elements: (1, 1), (pieces, 1) or (pieces, 8)."""
    tile: tl.constexpr = k.cut.pieces * 8
    base = row * cut.row_blocks
    if not k.cut.own:
        base = row // cut.row_div % cut.row_mod * cut.row_blocks
    if k.cut.single:
        return (base + part * tile // cut.block) + tl.zeros([1, 1], tl.int32)
    elif k.cut.block > 0:  # noqa: RET505
        inside = tl.arange(0, k.cut.pieces)[:, None] // (k.cut.block // 8)
        return (base + part * (tile // k.cut.block)) + inside
    else:
        return base + (part * tile + at) // cut.block


@triton.jit
def load_of_blocks(numbers, place, there, otherwise, k: tl.constexpr):
    """Return the numbers of blocks."""
    if k.cut.single:
        return tl.load(numbers + place)
    else:  # noqa: RET505
        return tl.load(numbers + place, mask=there, other=otherwise)


@triton.jit
def part_zeros(zeros, place, there, k: tl.constexpr):
    """Zero points of blocks, or offsets, float32; zeros if none."""
    if k.element.zero_place:
        return float32(load_of_blocks(zeros, place, there, 0, k))
    else:  # noqa: RET505
        return place.to(tl.float32) * 0.0


@triton.jit
def part_noise(seed, start, k: tl.constexpr):
    """Return the noise of elements of the part."""
    piece = tl.arange(0, k.cut.pieces)[:, None] * 8
    if k.cut.even:
        return piece_noise(seed, start, piece, k)
    else:  # noqa: RET505
        return noise_of(seed, start, piece + tl.arange(0, 8)[None, :], k)


@triton.jit
def without_offsets(value, zero, k: tl.constexpr):
    """Return values less offsets, where there are some."""
    return value - zero if k.element.zero_place == _PRODUCT else value


@triton.jit
def with_parameters(value, scale, zero, k: tl.constexpr):
    """Values of codes less zero points times scales; offsets are added."""
    if k.element.zero_place == _PRODUCT:
        return value * scale + zero
    else:  # noqa: RET505
        if k.element.zero_place:
            value -= zero
        return value * scale


@triton.jit(do_not_specialize=["seed"])
def quantize_pieces(x, scales, tables, coarse, zeros, data, notes, seed, cut, k: tl.constexpr):
    """Write the codes of ``x``; 1 in ``notes`` for non-finite values.

    Notes are (1,) int32.
    """
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    place = part_blocks(row, part, at, cut, k)
    zero = part_zeros(zeros, place, there, k)
    value = without_offsets(float32(tl.load(x + start + at, mask=there, other=0)), zero, k)
    factor, inverse, rest = factors_of(load_of_blocks(scales, place, there, 1, k), tables, coarse, k)
    amax = largest(value, k)[:, None]
    tl.store(notes + tl.zeros_like(amax).to(tl.int32), 1, mask=(amax < float("inf")) == 0)
    ratio = ratios(value, factor, inverse, rest, amax, k)
    codes = codes_of(ratio, zero, part_noise(seed, start, k), False, k)
    store_codes(data, codes, first_byte(row, part, cut, k), there, left, k)


@triton.jit
def dequantize_pieces(data, scales, tables, coarse, zeros, values, out, cut, k: tl.constexpr):
    """Write the values of codes; values: (256,) float32, of all codes."""
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    codes = load_codes(data, first_byte(row, part, cut, k), there, left, k.cut.pieces, k)
    place = part_blocks(row, part, at, cut, k)
    scale = scale_of(load_of_blocks(scales, place, there, 1, k), tables, coarse, k) * k.held.unit
    value = with_parameters(decoded(codes, values, k), scale, part_zeros(zeros, place, there, k), k)
    tl.store(out + part_start(row, part, cut, k) + at, stored(value, out.dtype.element_ty), mask=there)


@triton.jit
def _ratio_or_lost(value, factor, k: tl.constexpr):
    """Quotients, which are zeros for lost scales, even of Inf."""
    lost = (factor == float("inf")) & (value == value)
    value = tl.where(lost, float_of(bits_of(value) & 0x80000000), value)
    return ratio_of(value, factor, factor, factor, False, k)


@triton.jit
def faked(value, found, tables, coarse, zero, noise, values, k: tl.constexpr):
    """Values of codes of ``value``, (many, size), under stored scales."""
    given, value = value, without_offsets(value, zero, k)
    factor, inverse, rest = factors_of(found, tables, coarse, k)
    plain = False
    if k.fused:
        plain = usual(largest(value, k)[:, None], factor, k)
        if plain:
            ratio = ratio_of(value, factor, inverse, rest, True, k)
        else:
            ratio = _ratio_or_lost(value, factor, k)
    elif k.multiply:
        ratio = ratio_of(value, factor, inverse, rest, False, k)
    else:
        ratio = _ratio_or_lost(value, factor, k)
    scale = scale_of(found, tables, coarse, k) * k.held.unit
    result = rounded_values(ratio, zero, noise, values, k) * scale
    if k.element.zero_place == _PRODUCT:
        result += zero
    if k.element.kind != _INTEGER:
        if k.fused:
            if plain == 0:
                result = tl.where(given == given, result, float("nan"))
        else:
            result = tl.where(given == given, result, float("nan"))
    return result


@triton.jit(do_not_specialize=["seed"])
def fake_quantize_pieces(x, scales, tables, coarse, zeros, values, out, seed, cut, k: tl.constexpr):
    """Write values of the codes of ``x``; NaN: lowest integer or NaN."""
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    value = float32(tl.load(x + start + at, mask=there, other=0))
    place = part_blocks(row, part, at, cut, k)
    found, zero = load_of_blocks(scales, place, there, 1, k), part_zeros(zeros, place, there, k)
    result = faked(value, found, tables, coarse, zero, part_noise(seed, start, k), values, k)
    tl.store(out + start + at, stored(result, out.dtype.element_ty), mask=there)
