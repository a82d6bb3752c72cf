"""Values that are looked up: runs of neighbors, tables of blocks, grids that a sign chooses; and offsets."""

from typing import Any

import numpy as np

from ..machine.descriptor import unpack_element, unpack_layout, unpack_rule
from ..machine.intrinsics import bits32, device, scratch
from ..machine.pack import load_codes
from ..machine.tile import TILE
from ..machine.vector import floats_of, load_lanes, store_lanes
from .rows import dequantize_rows, emit_values

SHARED, OF_BLOCK, OF_SIGN = np.uint64(0), np.uint64(1), np.uint64(2)
"""Whose a table is: that of all blocks, of each block, or the second of two where a factor is negative."""
LONGEST = 16
"""Most values of a code."""
FEW = 1 << 15
"""Values that are decoded before their offsets are added: 128 KiB stay in the cache of a core."""
_ROOM = TILE + LONGEST
_ONE, _EIGHT = np.uint64(1), np.uint64(8)


@device
def _codes_at(source: Any, row: Any, bit: Any, count: Any, bits: Any, codes: Any) -> None:
    """Unpack ``count`` codes from a bit of the row that begins at byte ``row`` on."""
    if bit % _EIGHT == 0:
        load_codes(source, row + bit // _EIGHT, count, bits, codes)
        return
    mask = np.uint32((_ONE << bits) - _ONE)
    for c in range(count):
        at = bit + c * bits
        byte, shift = row + at // _EIGHT, np.uint32(at % _EIGHT)
        word = np.uint32(source[byte])
        if np.uint64(shift) + bits > _EIGHT:
            word |= np.uint32(source[byte + _ONE]) << np.uint32(8)
        codes[c] = np.uint8((word >> shift) & mask)


@device
def _run_values(codes: Any, count: Any, tables: Any, base: Any, per: Any, factor: Any, tile: Any) -> None:
    """Set a tile to the values of codes times a factor; what is written past a code, the next one writes."""
    if per == _ONE:
        for c in range(count):
            tile[c] = tables[base + np.uint64(codes[c])] * factor
        return
    times = floats_of(factor)
    for c in range(count):
        store_lanes(tile, c * per, load_lanes(tables, base + np.uint64(codes[c]) * per) * times)


@device
def lookup_rows(source: Any, sizes: Any, tables: Any, factors: Any, out: Any, first: Any, last: Any) -> None:
    """Decode rows ``first`` to ``last``: ``tables[table of b, code, j] * factors[b]``, in float32.

    sizes: (8,) uint64, bits and values of a code, values of a block, columns, blocks and bytes of a row, the
    kind of ``out``, and whose tables are. tables: float32, ``values of a code << bits`` numbers of each, and
    LONGEST more where codes have several.
    """
    bits, per, block, cols = sizes[0], sizes[1], sizes[2], sizes[3]
    width, row_bytes, kind, whose = sizes[4], sizes[5], sizes[6], sizes[7]
    tile, codes = scratch(_ROOM, np.float32), scratch(TILE, np.uint8)
    numbers, most = per << bits, np.uint64(TILE) // per * per
    for r in range(first, last):
        bit, b = np.uint64(0), r * width
        for start in range(np.uint64(0), cols, block):
            size, factor, base = min(block, cols - start), factors[b], np.uint64(0)
            if whose == OF_BLOCK:
                base = b * numbers
            elif whose == OF_SIGN and bits32(factor) >= np.uint32(0x80000000):
                base = numbers
            for i in range(np.uint64(0), size, most):
                n = min(size - i, most)
                count = (n + per - _ONE) // per
                _codes_at(source, r * row_bytes, bit, count, bits, codes)
                _run_values(codes, count, tables, base, per, factor, tile)
                emit_values(tile, n, kind, out, r * cols + start + i)
                bit += count * bits
            b += _ONE


@device
def _add_offsets(
    values: Any, origin: Any, offsets: Any, block: Any, kind: Any, out: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Write float32 values, of elements from ``origin`` on, plus the offsets of their blocks."""
    tile = scratch(TILE, np.float32)
    for b in range(first, last):
        offset, start = offsets[b], b * block
        for i in range(np.uint64(0), block, np.uint64(TILE)):
            n = min(block - i, np.uint64(TILE))
            for j in range(n):
                tile[j] = values[start + i + j - origin] + offset
            emit_values(tile, n, kind, out, start + i)


@device
def offset_rows(
    source: Any, desc: Any, table: Any, scales: Any, scale_codes: Any, zeros: Any, offsets: Any, sizes: Any,
    out: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Decode rows ``first`` to ``last``, a few at a time: values in float32, plus the offset of their block.

    desc: of values in float32. sizes: (3,) uint64, values of a block, columns, and the kind of ``out``.
    Rows have at most FEW values.
    """
    layout, element, rule = unpack_layout(desc), unpack_element(desc), unpack_rule(desc)
    block, cols, kind = sizes[0], sizes[1], sizes[2]
    values, step = scratch(FEW, np.float32), np.uint64(FEW) // cols
    for r in range(first, last, step):
        end = min(last, r + step)
        dequantize_rows(
            source, layout, element, rule, table, scales, scale_codes, zeros, values, r, False, r, end
        )
        begin, width = r * cols, cols // block
        _add_offsets(values, begin, offsets, block, kind, out, r * width, end * width)
