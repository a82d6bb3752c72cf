"""Tiles of linear layers: rows of the weight, and tokens."""

from __future__ import annotations

from typing import NamedTuple

from ...ops.registry import Request
from .piece_cuts import covering_power

FEW = 16
"""Tokens up to which programs have few rows, and slices of their columns: more programs read the weight."""
NARROW = 16
"""Least rows, tokens and columns of a product of matrices in Triton; of codes, twice as many columns."""
WIDE = 128
PART = 16
"""Most columns of bytes taken apart that share a number of a scale: Triton 3.6 loads it again for more."""


class Sizes(NamedTuple):
    """What kernels take at run time.

    rows, cols: of the weight. tokens: rows of the input. row_bytes: bytes of the codes of a row.
    block_rows: rows of a block. row_blocks, blocks: of a row, and in all. token_tiles: programs that have the
    same rows.
    """

    rows: int
    cols: int
    tokens: int
    row_bytes: int
    block_rows: int
    row_blocks: int
    blocks: int
    token_tiles: int


class LayerShape(NamedTuple):
    """What kernels are compiled for.

    rows, tokens: of a program. slices, width: parts of a step that have sums of their own, and columns of
    each. block: columns of a block of scales, 0 where rows have one. parts: scales of a slice along its
    columns. even: whether rows are whole steps. paired: whether the input is pairs of 16-bit numbers, one for
    each byte of codes. bias: whether there is one. Of products of codes: per_token, whether inputs have a
    scale a token; zeros, whether inputs have zero points; shifted, whether something is subtracted from their
    codes.
    """

    rows: int
    tokens: int
    slices: int
    width: int
    block: int
    parts: int
    even: bool
    bias: bool
    paired: bool = False
    per_token: bool = False
    zeros: bool = False
    shifted: bool = False


class LayerTiles(NamedTuple):
    """A layer in tiles, and the programs that take them."""

    cut: Sizes
    shape: LayerShape
    programs: int
    warps: int


def value_tiles(request: Request, tokens: int, *, bias: bool) -> LayerTiles:
    """Return the tiles of products with values of the weight."""
    if tokens <= FEW:
        return _few(request, tokens, 64, bias=bias, paired=_paired(request))
    across = min(WIDE, covering_power(tokens))
    warps = 8 if across == WIDE else 4
    return layer_tiles(request, tokens, Shape(64, across, 1, 64, warps), bias=bias)


def code_tiles(request: Request, tokens: int, *, bias: bool) -> LayerTiles:
    """Tiles of code products, of groups of whole times 32 columns."""
    cols = request.shape[1]
    group = min(request.scheme.granularity.block_shape(request.shape)[1], cols)
    width = min(WIDE, group & -group) if group < cols else WIDE
    if tokens <= FEW:
        return _few(request, tokens, width, bias=bias)
    if tokens <= WIDE // 2:
        return layer_tiles(request, tokens, Shape(64, covering_power(tokens), 1, width, 4), bias=bias)
    return layer_tiles(request, tokens, Shape(WIDE, WIDE, 1, width, 8), bias=bias)


class Shape(NamedTuple):
    """Rows and tokens of a tile, column slices and width, warps."""

    rows: int
    tokens: int
    slices: int
    width: int
    warps: int


def _paired(request: Request) -> bool:
    """Whether bytes are two codes of one scale, inputs 32-bit pairs."""
    cols, group = request.shape[1], request.scheme.granularity.block_shape(request.shape)[1]
    even = cols % 2 == 0 and (group >= cols or group in (2, 4, 8, 16, 32, 64) or group % 64 == 0)
    return request.scheme.bits == 4 and request.dtype.itemsize == 2 and even


def _few(request: Request, tokens: int, width: int, *, bias: bool, paired: bool = False) -> LayerTiles:
    """Tiles of few rows, with a column slice for each warp."""
    slices = min(8, covering_power(-(-request.shape[1] // width)))
    return layer_tiles(
        request, tokens, Shape(NARROW, NARROW, slices, width, slices), bias=bias, paired=paired
    )


def layer_tiles(
    request: Request, tokens: int, tile: Shape, *, bias: bool, paired: bool = False
) -> LayerTiles:
    """Return the tiles of a shape. bias, paired: as in :class:`LayerShape`."""
    (rows, cols), blocks = request.shape, request.scheme.granularity
    grid, (block_rows, block) = blocks.grid(request.shape), blocks.block_shape(request.shape)
    one, token_tiles = grid[1] == 1, -(-tokens // tile.tokens)
    cut = Sizes(
        rows=rows, cols=cols, tokens=tokens, row_bytes=-(-cols * request.scheme.bits // 8),
        block_rows=block_rows, row_blocks=grid[1], blocks=grid[0] * grid[1], token_tiles=token_tiles,
    )  # fmt: skip
    shape = LayerShape(
        rows=tile.rows, tokens=tile.tokens, slices=tile.slices, width=tile.width, block=0 if one else block,
        parts=_parts(tile.width, tile.width if one else block, whole=paired or request.scheme.bits == 8),
        even=cols % (tile.slices * tile.width) == 0, paired=paired, bias=bias,
    )  # fmt: skip
    return LayerTiles(cut=cut, shape=shape, programs=-(-rows // tile.rows) * token_tiles, warps=tile.warps)


def _parts(width: int, block: int, *, whole: bool) -> int:
    """Count equal-scale column parts; whole: bytes stay whole."""
    least = 1 if whole else width // PART
    if block % width == 0:
        return least
    return max(least, width // block) if width % block == 0 else width
