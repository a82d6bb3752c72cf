"""Products with a packed weight decoded on the way, in Triton.

    out[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]

A program has a tile of rows of the weight and of tokens. In each step it decodes ``slices`` times ``width``
columns of its rows, rounds them to the dtype of the input as dequantizing does, and multiplies them; where
there are several slices each has warps and sums of its own, which are added at the end. Sums are float32.
``sizes`` is a :class:`..linear_tiles.Sizes`, ``k`` the :class:`..specialization.Constants` of compilation,
its cut a :class:`..linear_tiles.LayerShape`.

For ``scales``, ``tables`` and ``coarse`` see :mod:`.held_scales`.
"""

import triton
import triton.language as tl

from .element_codes import bfloat16_bits, decoded, float32, float_of, stored
from .held_scales import scale_of


@triton.jit
def tile_place(sizes, k: tl.constexpr):
    """Rows and tokens of the program, int32; same rows are neighbors."""
    part = tl.program_id(0)
    across = part // sizes.token_tiles
    token = (part - across * sizes.token_tiles) * k.cut.tokens + tl.arange(0, k.cut.tokens)
    return across * k.cut.rows, token


@triton.jit
def lines_of(first, k: tl.constexpr):
    """Rows of all slices, (slices * rows,), and first columns of steps."""
    line = tl.arange(0, k.cut.slices * k.cut.rows)
    if k.cut.slices == 1:
        return first + line, line * 0
    else:  # noqa: RET505 (Triton compiles one of the two)
        return first + line % k.cut.rows, line // k.cut.rows * k.cut.width


@triton.jit
def byte_tile(data, row, start, sizes, k: tl.constexpr):
    """Load ``width`` columns of bytes, int32; anything where columns or rows end."""
    count: tl.constexpr = 8 // k.width
    at = start[:, None] // count + tl.arange(0, k.cut.width // count)[None, :]
    there = (row < sizes.rows)[:, None]
    mask = there if k.cut.even else there & (at < sizes.row_bytes)
    return tl.load(data + row.to(tl.int64)[:, None] * sizes.row_bytes + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def code_tile(data, row, start, sizes, k: tl.constexpr):
    """Load ``width`` columns of codes, int32; anything where columns or rows end."""
    lines: tl.constexpr = row.shape[0]
    wide: tl.constexpr = k.cut.width
    each: tl.constexpr = k.width
    if each == 8:
        return byte_tile(data, row, start, sizes, k)
    elif 8 % each == 0:  # noqa: RET505 (Triton compiles one of the two)
        shifts = (tl.arange(0, 8 // each) * each)[None, None, :]
        found = byte_tile(data, row, start, sizes, k)
        return tl.reshape((found[:, :, None] >> shifts) & ((1 << each) - 1), [lines, wide])
    else:
        # Eight codes are ``each`` bytes.
        pieces: tl.constexpr = wide // 8
        word = tl.zeros([lines, pieces], tl.int64)
        place = (start[:, None] // 8 + tl.arange(0, pieces)[None, :]) * each
        first, there = data + row.to(tl.int64)[:, None] * sizes.row_bytes, (row < sizes.rows)[:, None]
        for byte in tl.static_range(each):
            found = tl.load(first + place + byte, mask=there & (place + byte < sizes.row_bytes), other=0)
            word |= found.to(tl.int64) << (8 * byte)
        shifts = (tl.arange(0, 8) * each)[None, None, :].to(tl.int64)
        codes = ((word[:, :, None] >> shifts) & ((1 << each) - 1)).to(tl.int32)
        return tl.reshape(codes, [lines, wide])


@triton.jit
def first_blocks(row, sizes, k: tl.constexpr):
    """Return the numbers of the first blocks of rows."""
    return row // sizes.block_rows * sizes.row_blocks


@triton.jit
def block_places(row, start, sizes, k: tl.constexpr):
    """Block numbers of parts of equal columns, (lines, parts)."""
    inside = start[:, None] + (tl.arange(0, k.cut.parts) * (k.cut.width // k.cut.parts))[None, :]
    if k.cut.block == 0:
        inside = inside * 0
    else:
        inside = inside // k.cut.block
    return first_blocks(row, sizes, k)[:, None] + inside


@triton.jit
def along(numbers, wide: tl.constexpr):
    """Repeat part numbers, (lines, parts), over ``wide`` columns or bytes."""
    lines: tl.constexpr = numbers.shape[0]
    parts: tl.constexpr = numbers.shape[1]
    if parts == wide:
        return numbers
    else:  # noqa: RET505 (Triton compiles one of the two)
        each: tl.constexpr = wide // parts
        return tl.reshape(tl.broadcast_to(numbers[:, :, None], [lines, parts, each]), [lines, wide])


@triton.jit
def values_of(codes, zero, scale, values, k: tl.constexpr):
    """Return the values of codes, float32."""
    value = decoded(codes, values, k)
    if k.element.zero_place:
        value -= zero
    return value * scale


@triton.jit
def block_numbers(scales, tables, coarse, zeros, row, start, sizes, k: tl.constexpr):
    """Zero points and scales of ``width`` columns, (lines, parts) float32."""
    place = block_places(row, start, sizes, k)
    there = place < sizes.blocks
    found = tl.load(scales + place, mask=there, other=0)
    scale = scale_of(found, tables, coarse, k) * k.held.unit
    zero = scale
    if k.element.zero_place:
        zero = float32(tl.load(zeros + place, mask=there, other=0))
    return zero, scale


@triton.jit
def as_factor(value, like: tl.constexpr):
    """Round float32 to the other factor's dtype; int16: bfloat16 bits."""
    if like == tl.int16:
        return float_of(bfloat16_bits(value) << 16)
    else:  # noqa: RET505
        return value.to(like)


@triton.jit
def input_tile(x, token, start, pitch, sizes, k: tl.constexpr):
    """Load a step's numbers or pairs, (columns, tokens); zeros past the end.

    pitch: of a token.
    """
    column = start + tl.arange(0, k.cut.slices * k.cut.width // (2 if k.cut.paired else 1))
    there = (token < sizes.tokens)[None, :]
    mask = there if k.cut.even else there & (column < pitch)[:, None]
    return tl.load(x + token.to(tl.int64)[None, :] * pitch + column[:, None], mask=mask, other=0)


@triton.jit
def sliced(tile, k: tl.constexpr):
    """Split lines or columns of all slices: (slices, each, ...)."""
    slices: tl.constexpr = k.cut.slices
    return tl.reshape(tile, [slices, tile.shape[0] // slices, tile.shape[1]])


@triton.jit
def halves(word, like: tl.constexpr):
    """Return both 16-bit numbers of words as factors."""
    if like == tl.int16:
        return float_of(word << 16), float_of((word >> 16) << 16)
    else:  # noqa: RET505 (Triton compiles one of the two)
        high = (word >> 16).to(tl.int16).to(like, bitcast=True)
        return word.to(tl.int16).to(like, bitcast=True), high


@triton.jit
def dot_of_slices(weight, given, total, k: tl.constexpr):
    """Return sums of products, (rows, tokens), or (slices, rows, tokens)."""
    if k.cut.slices == 1:
        return tl.dot(weight, given, total, input_precision="ieee", out_dtype=total.dtype)
    else:  # noqa: RET505 (Triton compiles one of the two)
        left, right = sliced(weight, k), sliced(given, k)
        return tl.dot(left, right, total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def no_sums(kind: tl.constexpr, k: tl.constexpr):
    """Return zeros that sums of products begin with."""
    rows: tl.constexpr = k.cut.rows
    tokens: tl.constexpr = k.cut.tokens
    slices: tl.constexpr = k.cut.slices
    if slices == 1:
        return tl.zeros([rows, tokens], kind)
    else:  # noqa: RET505 (Triton compiles one of the two)
        return tl.zeros([slices, rows, tokens], kind)


@triton.jit
def multiply_values(x, data, scales, tables, coarse, zeros, values, bias, out, sizes, k: tl.constexpr):
    """Write the products; bias: (rows,), read where there is one.

    x: (tokens, cols), or pairs, int32 (tokens, cols / 2), whose halves meet the codes of a byte.
    """
    like: tl.constexpr = out.dtype.element_ty
    first, token = tile_place(sizes, k)
    row, inside = lines_of(first, k)
    total = no_sums(tl.float32, k)
    wide: tl.constexpr = k.cut.width
    for start in range(0, sizes.cols, k.cut.slices * wide):
        zero, scale = block_numbers(scales, tables, coarse, zeros, row, start + inside, sizes, k)
        if k.cut.paired:
            zero, scale = along(zero, wide // 2), along(scale, wide // 2)
            found = byte_tile(data, row, start + inside, sizes, k)
            low = values_of(found & 15, zero, scale, values, k)
            high = values_of(found >> 4, zero, scale, values, k)
            if not k.cut.even:
                there = ((start + inside) // 2)[:, None] + tl.arange(0, wide // 2)[None, :] < sizes.row_bytes
                low, high = tl.where(there, low, 0.0), tl.where(there, high, 0.0)
            one, other = halves(input_tile(x, token, start // 2, sizes.cols // 2, sizes, k), like)
            total = dot_of_slices(as_factor(low, like), one, total, k)
            total = dot_of_slices(as_factor(high, like), other, total, k)
        else:
            codes = code_tile(data, row, start + inside, sizes, k)
            value = values_of(codes, along(zero, wide), along(scale, wide), values, k)
            if not k.cut.even:
                # Codes that there are not may be NaN, which times zero is NaN.
                there = (start + inside)[:, None] + tl.arange(0, wide)[None, :] < sizes.cols
                value = tl.where(there, value, 0.0)
            given = input_tile(x, token, start, sizes.cols, sizes, k)
            given = float32(given) if like == tl.int16 else given
            total = dot_of_slices(as_factor(value, like), given, total, k)
    if k.cut.slices > 1:
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
