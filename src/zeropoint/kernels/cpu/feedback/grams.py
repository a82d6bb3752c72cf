"""Gram matrices: sums over tokens of exact float32 column products.

Numbers are rounded to BITS significant bits, half to even, so that a product fits the 24 bits of float32. A
number below TINY counts as zero, and none is 1 / TINY or larger: no product is subnormal or too large. Those
of CHUNK tokens are added in float32 in the order of tokens, then to float64 in the order of chunks.

Panels of PANEL columns are packed chunk by chunk, a step a token: ``packed[chunk][panel][token][column]``.
"""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import Flag, Float32, UInt8, UInt64
from ..machine.intrinsics import bits32, device, float32_of, scratch
from ..machine.named_records import unpacker
from ..machine.team import over_rows
from ..machine.tile import TILE, load
from .register_tiles import HIGH, PANEL, add_float32_sums

BITS = 12
CHUNK = 64
"""Tokens whose products are summed in float32."""
TINY = np.float32(2.0**-60)
ROWS = 64
"""Rows of the result that a thread takes at a time; their panels fit the first cache."""
_CHUNK, _PANEL, _HIGH, _ROWS = np.uint64(CHUNK), np.uint64(PANEL), np.uint64(HIGH), np.uint64(ROWS)
_DROPPED = np.uint32(24 - BITS)
_HALF, _KEPT = np.uint32((1 << (23 - BITS)) - 1), np.uint32(0xFFFFFFFF << (24 - BITS) & 0xFFFFFFFF)
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)


class TokenChunks(NamedTuple):
    """Packed tokens: dtype, first, end, columns; factor: power of two."""

    kind: UInt8
    start: UInt64
    end: UInt64
    columns: UInt64
    factor: Float32


class GramTiles(NamedTuple):
    """Tokens, panels of x and y, panels per tile; same: upper half.

    Same: y is x.
    """

    tokens: UInt64
    x_panels: UInt64
    y_panels: UInt64
    across: UInt64
    same: Flag


unpack_chunks, unpack_tiles = unpacker(TokenChunks), unpacker(GramTiles)


@device
def _round_tile(tile: Any, factor: Any) -> None:
    """Multiply by a power of two and round to BITS bits."""
    for i in range(np.uint64(TILE)):
        value = tile[i] * factor
        bits = bits32(value)
        odd = np.uint32(np.uint32(bits >> _DROPPED) & np.uint32(1))
        near = float32_of(np.uint32(np.uint32(bits + _HALF + odd) & _KEPT))
        tile[i] = near if abs(value) >= TINY else np.float32(0)


@over_rows
def pack_columns(x: Any, sizes: Any, packed: Any, first: Any, last: Any) -> None:
    """Pack chunks ``first`` to ``last`` of tokens.

    x: flat, rows of tokens. sizes: packed :class:`TokenChunks`.
    """
    kind, start, end, columns, factor = unpack_chunks(sizes)
    tile, panels = scratch(TILE, np.float32), (columns + _PANEL - ONE) // _PANEL
    for chunk in range(first, last):
        begin = start + chunk * _CHUNK
        for token in range(begin, min(begin + _CHUNK, end)):
            for column in range(ZERO, columns, np.uint64(TILE)):
                count = min(np.uint64(TILE), columns - column)
                load(x, token * columns + column, count, kind, tile)
                for i in range(count, (count + _PANEL - ONE) // _PANEL * _PANEL):
                    tile[i] = np.float32(0)
                _round_tile(tile, factor)
                for p in range((count + _PANEL - ONE) // _PANEL):
                    panel = column // _PANEL + p
                    at = ((chunk * panels + panel) * _CHUNK + (token - begin)) * _PANEL
                    for i in range(_PANEL):
                        packed[at + i] = tile[p * _PANEL + i]


@over_rows
def add_tiles(x: Any, y: Any, sizes: Any, places: Any, sums: Any, first: Any, last: Any) -> None:
    """Add products of packed tokens to tiles ``first`` to ``last``.

    sizes: packed :class:`GramTiles`. places: uint64, first row and first panel of y of each tile. sums:
    float64, rows of whole panels.
    """
    tokens, x_panels, y_panels, across, same = unpack_tiles(sizes)
    pitch, depth = y_panels * _PANEL, _CHUNK * _PANEL
    for tile in range(first, last):
        top, left = places[TWO * tile], places[TWO * tile + ONE]
        bottom, right = min(top + _ROWS, x_panels * _PANEL), min(left + across, y_panels)
        for chunk in range((tokens + _CHUNK - ONE) // _CHUNK):
            steps = min(_CHUNK, tokens - chunk * _CHUNK)
            for panel in range(left, right):
                b = (chunk * y_panels + panel) * depth
                for row in range(top, bottom, _HIGH):
                    if same and (panel + ONE) * _PANEL <= row:
                        continue
                    a = (chunk * x_panels + row // _PANEL) * depth + row % _PANEL
                    add_float32_sums((sums, row * pitch + panel * _PANEL, pitch), (x, a), (y, b), steps)


@over_rows
def mirror(sums: Any, panels: Any, first: Any, last: Any) -> None:
    """Copy a square matrix's upper half to the lower, by row panels."""
    pitch = panels * _PANEL
    for p in range(first, last):
        for left in range(ZERO, (p + ONE) * _PANEL, _PANEL):
            for row in range(p * _PANEL, (p + ONE) * _PANEL):
                for column in range(left, min(left + _PANEL, np.uint64(row))):
                    sums[row * pitch + column] = sums[column * pitch + row]
