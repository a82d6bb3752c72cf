"""Products of an input with a packed weight whose values are decoded on the way, in Triton.

    out[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]

A program has a tile of rows of the weight and of tokens. In each step it decodes ``slices`` times ``width``
columns of its rows, rounds them to the dtype of the input as dequantizing does, and multiplies them; where
there are several slices each has warps and sums of its own, which are added at the end. Sums are float32.
``sizes`` is a :class:`..linear_tiles.Sizes`, ``k`` the :class:`..specialization.Constants` of compilation,
its cut a :class:`..linear_tiles.TileShape`.

For ``scales``, ``tables`` and ``coarse`` see :mod:`.held_scales`.
"""

import triton
import triton.language as tl

from .element_codes import bfloat16_bits, decoded, float32, float_of, stored
from .held_scales import scale_of


@triton.jit
def tile_place(sizes, k: tl.constexpr):
    """Return the rows and the tokens of the program, int32; programs of the same rows follow each other."""
    part = tl.program_id(0)
    across = part // sizes.token_tiles
    token = (part - across * sizes.token_tiles) * k.cut.tokens + tl.arange(0, k.cut.tokens)
    return across * k.cut.rows, token


@triton.jit
def lines_of(first, k: tl.constexpr):
    """Return the rows of all slices, (slices * rows,), and their first columns in a step."""
    line = tl.arange(0, k.cut.slices * k.cut.rows)
    if k.cut.slices == 1:
        return first + line, line * 0
    else:  # noqa: RET505 (Triton compiles one of the two)
        return first + line % k.cut.rows, line // k.cut.rows * k.cut.width


@triton.jit
def code_tile(data, row, start, sizes, k: tl.constexpr):
    """Return the codes of ``width`` columns of lines, int32; any of columns and rows that there are not."""
    lines: tl.constexpr = row.shape[0]
    wide: tl.constexpr = k.cut.width
    first = data + row.to(tl.int64)[:, None] * sizes.row_bytes
    there = (row < sizes.rows)[:, None]
    if 8 % k.width == 0:
        count: tl.constexpr = 8 // k.width
        at = start[:, None] // count + tl.arange(0, wide // count)[None, :]
        mask = there if k.cut.even else there & (at < sizes.row_bytes)
        found = tl.load(first + at, mask=mask, other=0).to(tl.int32)
        if count == 1:
            return found
        else:  # noqa: RET505 (Triton compiles one of the two)
            shifts = (tl.arange(0, count) * k.width)[None, None, :]
            return tl.reshape((found[:, :, None] >> shifts) & ((1 << k.width) - 1), [lines, wide])
    else:
        # Eight codes are ``width`` bytes.
        each: tl.constexpr = k.width
        pieces: tl.constexpr = wide // 8
        word = tl.zeros([lines, pieces], tl.int64)
        place = (start[:, None] // 8 + tl.arange(0, pieces)[None, :]) * each
        for byte in tl.static_range(each):
            found = tl.load(first + place + byte, mask=there & (place + byte < sizes.row_bytes), other=0)
            word |= found.to(tl.int64) << (8 * byte)
        shifts = (tl.arange(0, 8) * k.width)[None, None, :].to(tl.int64)
        codes = ((word[:, :, None] >> shifts) & ((1 << k.width) - 1)).to(tl.int32)
        return tl.reshape(codes, [lines, wide])


@triton.jit
def block_places(row, start, sizes, k: tl.constexpr):
    """Return the numbers of the blocks of parts of equal columns, (lines, parts)."""
    first = row // sizes.block_rows * sizes.row_blocks
    inside = tl.arange(0, k.cut.parts) * (k.cut.width // k.cut.parts)
    return first[:, None] + (start[:, None] + inside[None, :]) // sizes.block


@triton.jit
def along_columns(numbers, k: tl.constexpr):
    """Return numbers of parts, (lines, parts), for all columns."""
    lines: tl.constexpr = numbers.shape[0]
    parts: tl.constexpr = k.cut.parts
    each: tl.constexpr = k.cut.width // parts
    if each == 1:
        return numbers
    else:  # noqa: RET505 (Triton compiles one of the two)
        return tl.reshape(tl.broadcast_to(numbers[:, :, None], [lines, parts, each]), [lines, parts * each])


@triton.jit
def value_tile(data, scales, tables, coarse, zeros, values, row, start, sizes, k: tl.constexpr):
    """Return the values of ``width`` columns of lines, float32; any of columns that there are not."""
    value = decoded(code_tile(data, row, start, sizes, k), values, k)
    place = block_places(row, start, sizes, k)
    there = place < sizes.blocks
    if k.element.zero_place:
        value -= along_columns(float32(tl.load(zeros + place, mask=there, other=0)), k)
    found = tl.load(scales + place, mask=there, other=0)
    return value * along_columns(scale_of(found, tables, coarse, k) * k.held.unit, k)


@triton.jit
def as_factor(value, like: tl.constexpr):
    """Return float32 rounded to the dtype of the other factor, which is int16 for bits of bfloat16."""
    if like == tl.int16:
        return float_of(bfloat16_bits(value) << 16)
    else:  # noqa: RET505
        return value.to(like)


@triton.jit
def input_tile(x, token, start, sizes, k: tl.constexpr):
    """Return the columns of a step, (slices * width, tokens); zeros of columns that there are not."""
    column = start + tl.arange(0, k.cut.slices * k.cut.width)
    place = x + token.to(tl.int64)[None, :] * sizes.cols + column[:, None]
    there = (token < sizes.tokens)[None, :]
    mask = there if k.cut.even else there & (column < sizes.cols)[:, None]
    found = tl.load(place, mask=mask, other=0)
    return float32(found) if found.dtype == tl.int16 else found


@triton.jit
def sliced(tile, k: tl.constexpr):
    """Return lines or columns of all slices, one after the other, as (slices, each, ...)."""
    slices: tl.constexpr = k.cut.slices
    return tl.reshape(tile, [slices, tile.shape[0] // slices, tile.shape[1]])


@triton.jit
def multiply_values(x, data, scales, tables, coarse, zeros, values, bias, out, sizes, k: tl.constexpr):
    """Write the products; bias: (rows,), read where there is one."""
    rows: tl.constexpr = k.cut.rows
    tokens: tl.constexpr = k.cut.tokens
    slices: tl.constexpr = k.cut.slices
    first, token = tile_place(sizes, k)
    row, inside = lines_of(first, k)
    if slices == 1:
        total = tl.zeros([rows, tokens], tl.float32)
    else:
        total = tl.zeros([slices, rows, tokens], tl.float32)
    for start in range(0, sizes.cols, slices * k.cut.width):
        value = value_tile(data, scales, tables, coarse, zeros, values, row, start + inside, sizes, k)
        if not k.cut.even:
            # Codes that there are not may be NaN, which times zero is NaN.
            column = (start + inside)[:, None] + tl.arange(0, k.cut.width)[None, :]
            value = tl.where(column < sizes.cols, value, 0.0)
        weight, given = as_factor(value, x.dtype.element_ty), input_tile(x, token, start, sizes, k)
        if slices == 1:
            total = tl.dot(weight, given, total, input_precision="ieee")
        else:
            total = tl.dot(sliced(weight, k), sliced(given, k), total, input_precision="ieee")
    if slices > 1:
        total = tl.sum(total, axis=0)
    store_products(total, bias, out, first, token, sizes, k)


@triton.jit
def store_products(total, bias, out, first, token, sizes, k: tl.constexpr):
    """Write products, (rows, tokens) float32, and the bias."""
    row = first + tl.arange(0, k.cut.rows)
    if k.cut.bias:
        total += float32(tl.load(bias + row, mask=row < sizes.rows, other=0))[:, None]
    place = out + token.to(tl.int64)[None, :] * sizes.rows + row[:, None]
    there = (row < sizes.rows)[:, None] & (token < sizes.tokens)[None, :]
    tl.store(place, stored(total, out.dtype.element_ty), mask=there)
