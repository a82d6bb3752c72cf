"""Looked-up values: runs of neighbors, block tables, grids by sign; offsets."""

from typing import Any, NamedTuple

import numpy as np

from ....ops.lowering import UInt8, UInt64
from ..encode.rows import tile_span
from ..machine.base3 import VALUED_DIGITS, load_digits
from ..machine.descriptor import LONGEST_CODE
from ..machine.intrinsics import bits32, device, inlined, scratch
from ..machine.named_records import unpacker
from ..machine.pack import load_codes
from ..machine.team import over_rows
from ..machine.tile import TILE, spread
from ..machine.vector import HALF, WHOLE, floats_of, load_lanes, load_nibbles, store_lanes
from .rows import emit_values
from .steps import put_picked

SHARED, OF_BLOCK, OF_SIGN, OF_DIGIT = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(3)
"""Kinds of tables: one shared table, or one per block, per sign of the factor, or per digit."""
_ROOM = TILE + LONGEST_CODE
_ONE, _EIGHT = np.uint64(1), np.uint64(8)


@device
def _codes_at(source: Any, row: Any, bit: Any, count: Any, bits: Any, codes: Any) -> None:
    """Unpack ``count`` codes from a bit of the row at byte ``row``."""
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


class LookupRows(NamedTuple):
    """Looked-up rows.

    bits, per: of a code, and its values. block: values of a block. cols, width, row_bytes: columns, blocks
    and bytes of a row. kind: dtype of the values. whose: the kind of tables: SHARED, OF_BLOCK, OF_SIGN or
    OF_DIGIT.
    """

    bits: UInt64
    per: UInt64
    block: UInt64
    cols: UInt64
    width: UInt64
    row_bytes: UInt64
    kind: UInt8
    whose: UInt64


unpack_lookup = unpacker(LookupRows)


class Tables(NamedTuple):
    """Tables of ``numbers`` values each, and a factor for each block."""

    values: Any
    whose: Any
    numbers: Any
    factors: Any


@inlined
def _table_at(tables: Any, numbers: Any, b: Any) -> Any:
    """Index of the first entry of the table of block ``b``."""
    if tables.whose == OF_BLOCK:
        return b * numbers
    second = tables.whose == OF_SIGN and bits32(tables.factors[b]) >= np.uint32(0x80000000)
    return numbers if second else np.uint64(0)


@device
def _take(codes: Any, first: Any, count: Any, tables: Any, base: Any, per: Any, tile: Any) -> None:
    """Look values up into a tile; vectors may end past the last.

    A code of several values stores a whole vector. Codes of two values have a loop of their own: it is 1.6
    times as fast.
    """
    if per == _ONE:
        for c in range(first, first + count):
            tile[c] = tables[base + np.uint64(codes[c])]
        return
    if per == np.uint64(2):
        pairs, values, start = tile.view(np.uint64), tables.view(np.uint64), base // np.uint64(2)
        for c in range(first, first + count):
            pairs[c] = values[start + np.uint64(codes[c])]
        return
    for c in range(first, first + count):
        store_lanes(tile, c * per, load_lanes(tables, base + np.uint64(codes[c]) * per))


@device
def _decode_run(codes: Any, n: Any, per: Any, block: Any, tables: Any, b: Any, own: Any, tile: Any) -> None:
    """Write ``n`` values times factors: whole blocks, or part of one."""
    step = n if tables.whose == SHARED else min(block, n)
    for start in range(np.uint64(0), n, step):
        base, size = _table_at(tables, tables.numbers, b + start // block), min(step, n - start)
        _take(codes, start // per, (size + per - _ONE) // per, tables.values, base, per, tile)
    spread(tables.factors[b:], n, block, own)
    for i in range(n):
        tile[i] *= own[i]


@device
def _pick_blocks(
    source: Any, byte_at: Any, count: Any, block: Any, tables: Any, b: Any, out: Any, at: Any
) -> None:
    """Write values of 4-bit codes; blocks of 16, or multiples of 32."""
    pair = np.uint64(1) if block < WHOLE else np.uint64(0)
    run = max(block, WHOLE)
    for start in range(np.uint64(0), count, run):
        f, g = tables.factors[b], tables.factors[b + pair]
        first = load_lanes(tables.values, _table_at(tables, HALF, b)) * floats_of(f)
        second = load_lanes(tables.values, _table_at(tables, HALF, b + pair)) * floats_of(g)
        for i in range(start, min(start + run, count), WHOLE):
            put_picked(out, at + i, first, second, load_nibbles(source, byte_at + i // np.uint64(2)), False)
        b += _ONE + pair


@device
def _pick_digits(
    source: Any, byte_at: Any, block: Any, tables: Any, b: Any, digits: Any, out: Any, at: Any
) -> None:
    """Write values of a block of codes of five base-3 digits.

    Gain that keeps it: 4 times the speed of tq1_0.
    """
    load_digits(VALUED_DIGITS, source, byte_at, _ONE, block, digits)
    values = load_lanes(tables.values, np.uint64(0)) * floats_of(tables.factors[b])
    for i in range(np.uint64(0), block, WHOLE):
        put_picked(out, at + i, values, values, load_lanes(digits, i), False)


@over_rows
def lookup_rows(source: Any, sizes: Any, tables: Any, factors: Any, out: Any, first: Any, last: Any) -> None:
    """Decode rows by ``tables[table of b, code, j] * factors[b]``, in float32.

    sizes: packed :class:`LookupRows`. tables: float32, ``values of a code << bits`` numbers of each, and
    LONGEST_CODE more entries where codes have several values; of digits so many numbers alone.
    """
    bits, per, block, cols, width, row_bytes, kind, whose = unpack_lookup(sizes)
    tile, own, codes = scratch(_ROOM, np.float32), scratch(TILE, np.float32), scratch(_ROOM, np.uint8)
    found, most = Tables(tables, whose, per << bits, factors), np.uint64(TILE) // per * per
    nibbles = bits == np.uint64(4) and per == _ONE and (block == HALF or block % WHOLE == 0)
    for r in range(first, last):
        start, bit, b = np.uint64(0), np.uint64(0), r * width
        while start < cols:
            # Blocks that end with a code leave no gap before the next, and are unpacked together.
            span = tile_span(block, cols - start) if block % per == 0 else min(block, cols - start)
            if whose == OF_DIGIT:
                span, byte = block, r * row_bytes + bit // _EIGHT
                _pick_digits(source, byte, block, found, b, codes, out, r * cols + start)
                bit += (block + per - _ONE) // per * bits
            elif nibbles and span % WHOLE == 0:
                byte = r * row_bytes + bit // _EIGHT
                _pick_blocks(source, byte, span, block, found, b, out, r * cols + start)
                bit += span * bits
            else:
                for i in range(np.uint64(0), span, most):
                    n = min(span - i, most)
                    count = (n + per - _ONE) // per
                    _codes_at(source, r * row_bytes, bit, count, bits, codes)
                    _decode_run(codes, n, per, block, found, b, own, tile)
                    emit_values(out, r * cols + start + i, tile, n, kind)
                    bit += count * bits
            start += span
            b += (span + block - _ONE) // block
