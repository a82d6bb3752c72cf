"""Code errors by parts of rows, in float64: :mod:`zeropoint.ops.row_errors`.

Figures of a number are the reference's; sums are added in another order, which is the same in each run. A
program has a part of one row, as in :mod:`.pieces`.
"""

import triton
import triton.language as tl

from .code_bytes import load_codes
from .element_codes import decoded, float32
from .held_scales import scale_of
from .pieces import (
    first_byte,
    load_of_blocks,
    part_blocks,
    part_elements,
    part_place,
    part_start,
    part_zeros,
    with_parameters,
)


@triton.jit
def _total(numbers):
    """Return the sum of (pieces, 8) float64."""
    return tl.sum(tl.sum(numbers, axis=1), axis=0)


@triton.jit
def measure_pieces(x, data, scales, tables, coarse, zeros, values, out, cut, k: tl.constexpr):
    """Write sums of squares, of errors, clipped counts, and largest errors.

    out: (parts, 4) float64. values: (256,) float32, of all codes. ``k.extent`` are the middle of the
    codes and how far from it nothing is clipped, in units of scales.
    """
    row, part, left = part_place(tl.program_id(0), cut, k)
    at, there = part_elements(left, k)
    start = part_start(row, part, cut, k)
    number = float32(tl.load(x + start + at, mask=there, other=0)).to(tl.float64)
    codes = load_codes(data, first_byte(row, part, cut, k), there, left, k.cut.pieces, k)
    place = part_blocks(row, part, at, cut, k)
    scale = scale_of(load_of_blocks(scales, place, there, 1, k), tables, coarse, k)
    zero = part_zeros(zeros, place, there, k)
    value = with_parameters(decoded(codes, values, k), scale * k.held.unit, zero, k).to(tl.float64)
    unit, one = scale.to(tl.float64), tl.full([1, 1], 1.0, tl.float64)
    middle = with_parameters(one * k.extent[0], unit, zero.to(tl.float64), k)
    clipped = tl.abs(number - middle) > one * k.extent[1] * tl.abs(unit)
    off = tl.where(there, number - value, 0.0)
    own = out + tl.program_id(0).to(tl.int64) * 4
    tl.store(own, _total(number * number))
    tl.store(own + 1, _total(off * off))
    tl.store(own + 2, _total((there & clipped).to(tl.float64)))
    tl.store(own + 3, tl.max(tl.max(tl.abs(off), axis=1), axis=0))
