"""Products of integer codes, summed exactly in int32, in Triton.

    out[m, n] = (sum over groups g of (sum over k in g of a[m, k] * w[n, k]) * t[n, g]) * s[m] + bias[n]
    a[m, k] = x[m, k] - z[m]

Tiles are cut as in :mod:`.value_products`. Sums of a group are scaled and added in float32, in parts of
``width`` columns where a group has several; a row of one group is scaled at the end. ``sum x w - z sum w``
takes the zero points out: the difference fits int32, whatever its terms.
"""

import triton
import triton.language as tl

from .element_codes import float32
from .held_scales import scale_of
from .value_products import (
    code_tile,
    dot_of_slices,
    first_blocks,
    input_tile,
    lines_of,
    no_sums,
    store_products,
    tile_place,
)


@triton.jit
def signed_input(found):
    """Return codes as int8; uint8 codes are shifted by -128."""
    if found.dtype == tl.uint8:
        return (found ^ 128).to(tl.int8, bitcast=True)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return found


@triton.jit
def signed_tile(data, row, start, sizes, k: tl.constexpr):
    """Load ``width`` columns of codes, int8; missing columns are zero."""
    column = start[:, None] + tl.arange(0, k.cut.width)[None, :]
    if k.width == 8:
        there = (row < sizes.rows)[:, None]
        mask = there if k.cut.even else there & (column < sizes.cols)
        return tl.load(data + row.to(tl.int64)[:, None] * sizes.row_bytes + column, mask=mask, other=0)
    else:  # noqa: RET505
        codes = (code_tile(data, row, start, sizes, k) ^ k.element.sign) - k.element.sign
        return (codes if k.cut.even else tl.where(column < sizes.cols, codes, 0)).to(tl.int8)


@triton.jit
def factors_of_rows(scales, tables, coarse, row, start, sizes, k: tl.constexpr):
    """Load row group scales of columns, float32."""
    place = first_blocks(row, sizes, k)
    if k.cut.block > 0:
        place += start // k.cut.block
    return scale_of(tl.load(scales + place, mask=place < sizes.blocks, other=0), tables, coarse, k)


@triton.jit
def multiply_codes(x, x_scales, x_zeros, data, scales, tables, coarse, bias, out, sizes, k: tl.constexpr):
    """Write the products.

    x: (tokens, cols) int8 or uint8. x_scales, x_zeros: a number for each token, or one. data: int8 where
    codes have 8 bits. bias: (rows,), read where there is one.
    """
    first, token = tile_place(sizes, k)
    row, inside = lines_of(first, k)
    there = token < sizes.tokens
    own = token if k.cut.per_token else token * 0
    zero = token * 0
    if k.cut.zeros:
        zero = tl.load(x_zeros + own, mask=there, other=0).to(tl.int32)
    if x.dtype.element_ty == tl.uint8:
        zero -= 128
    grouped: tl.constexpr = k.cut.block > 0
    total, weights = no_sums(tl.float32 if grouped else tl.int32, k), row * 0
    for start in range(0, sizes.cols, k.cut.slices * k.cut.width):
        weight = signed_tile(data, row, start + inside, sizes, k)
        given = signed_input(input_tile(x, token, start, sizes.cols, sizes, k))
        if grouped:
            part = dot_of_slices(weight, given, no_sums(tl.int32, k), k)
            if k.cut.shifted:
                part -= lined(tl.sum(weight.to(tl.int32), axis=1), k) * zero
            factor = factors_of_rows(scales, tables, coarse, row, start + inside, sizes, k)
            total += part.to(tl.float32) * lined(factor, k)
        else:
            total = dot_of_slices(weight, given, total, k)
            if k.cut.shifted:
                weights += tl.sum(weight.to(tl.int32), axis=1)
    if k.cut.shifted and not grouped:
        total -= lined(weights, k) * zero
    if k.cut.slices > 1:
        total = tl.sum(total, axis=0)
    if not grouped:
        row = first + tl.arange(0, k.cut.rows)
        factor = factors_of_rows(scales, tables, coarse, row, row * 0, sizes, k)
        total = total.to(tl.float32) * factor[:, None]
    total *= float32(tl.load(x_scales + own, mask=there, other=0))[None, :]
    store_products(total, bias, out, first, token, sizes, k)


@triton.jit
def lined(numbers, k: tl.constexpr):
    """Return numbers of lines as (rows, 1), or (slices, rows, 1)."""
    slices: tl.constexpr = k.cut.slices
    rows: tl.constexpr = k.cut.rows
    if slices == 1:
        return numbers[:, None]
    else:  # noqa: RET505 (Triton compiles one of the two)
        return tl.reshape(numbers, [slices, rows])[:, :, None]
