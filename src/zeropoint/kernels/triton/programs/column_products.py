"""Token-ordered sums of column products: Gram matrices and squares.

Numbers are rounded first (:mod:`zeropoint.ops.feedback_reference`), so that products are exact in float32,
fused with their addition or not. A program holds a tile of sums in float64 and adds to it what CHUNK tokens
add up to in float32.

Rounded numbers are float32, rows of tokens, with zeros up to whole chunks and whole tiles of columns: a sum
that began with +0 does not change by them.
"""

import triton
import triton.language as tl

from .element_codes import float32

_DROPPED = tl.constexpr(12)
_HALF, _KEPT = tl.constexpr((1 << 11) - 1), tl.constexpr(-(1 << 12))
_TINY = tl.constexpr(2.0**-60)
_CHUNK = tl.constexpr(64)
_STEPS = tl.constexpr(16)
"""Tokens that ``tl.dot`` takes at a time, its least."""


@triton.jit
def round_columns(x, rounded, factor, sizes, MANY: tl.constexpr):
    """Round numbers times a power of two to 12 significant bits.

    Those below 2**-60 are zero. x: (tokens, columns) floats of at most 32 bits. rounded: (all tokens, pitch)
    float32. factor: float32.
    """
    at = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
    token = at // sizes.pitch
    column = at - token * sizes.pitch
    there = (token < sizes.tokens) & (column < sizes.columns)
    near = float32(tl.load(x + (token * sizes.columns + column), mask=there, other=0)) * factor
    bits = near.to(tl.int32, bitcast=True)
    kept = (bits + _HALF + ((bits >> _DROPPED) & 1)) & _KEPT
    tl.store(rounded + at, tl.where(tl.abs(near) >= _TINY, kept.to(tl.float32, bitcast=True), 0.0))


@triton.jit
def add_column_products(x, y, tiles, sums, sizes, k: tl.constexpr):
    """Add products of all tokens to ``sums``, (height, width) float64.

    x, y: rounded numbers, with ``x_pitch`` and ``y_pitch`` columns. tiles: row and column of tiles, int32, a
    pair for each program. k: ``tile``, rows and columns of a tile; ``dot``, whether ``tl.dot`` adds tokens,
    which must be one after the other.
    """
    tile: tl.constexpr = k.tile
    row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.load(tiles + 2 * tl.program_id(0) + 1).to(tl.int64) * tile + tl.arange(0, tile)
    place = sums + (row[:, None] * sizes.width + column[None, :])
    there = (row < sizes.height)[:, None] & (column < sizes.width)[None, :]
    total = tl.load(place, mask=there, other=0.0)
    for start in range(0, sizes.tokens, _CHUNK):
        part = tl.zeros([tile, tile], tl.float32)
        left, other = x + start * sizes.x_pitch, y + start * sizes.y_pitch
        if k.dot:
            step = tl.arange(0, _STEPS).to(tl.int64)
            for _ in range(0, _CHUNK, _STEPS):
                a = tl.load(left + (step[None, :] * sizes.x_pitch + row[:, None]))
                b = tl.load(other + (step[:, None] * sizes.y_pitch + column[None, :]))
                part = tl.dot(a, b, part, input_precision="ieee")
                left += _STEPS * sizes.x_pitch
                other += _STEPS * sizes.y_pitch
        else:
            for _ in range(_CHUNK):
                a, b = tl.load(left + row), tl.load(other + column)
                a, b = tl.broadcast(a[:, None], b[None, :])
                part = tl.fma(a, b, part)
                left += sizes.x_pitch
                other += sizes.y_pitch
        total += part.to(tl.float64)
    tl.store(place, total, mask=there)


@triton.jit
def square_columns(x, sums, sizes, LANES: tl.constexpr, RUN: tl.constexpr):
    """Add squares of columns to their sums, (columns,) float64, by tokens.

    x: (tokens, columns) floats of at most 32 bits, whose squares are exact in float64.
    """
    column = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = column < sizes.columns
    total = tl.load(sums + column, mask=inside, other=0.0)
    place = x + column
    for start in range(0, sizes.tokens, RUN):
        for token in tl.static_range(RUN):
            there = inside & (start + token < sizes.tokens)
            value = float32(tl.load(place, mask=there, other=0)).to(tl.float64)
            total += value * value
            place += sizes.columns
    tl.store(sums + column, total, mask=inside)
